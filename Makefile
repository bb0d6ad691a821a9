# make run     set everything up, then run the bus in the foreground
# make test    set everything up, then run the tests      (ARGS="tests/unit -x": arguments for pytest)
# make test-pipeline   run the tests of recording, journals, lakes, Spark and reports, which make test leaves out
# make test-all   run everything: slow tests too, and all examples of property tests, 15 to 25 minutes; before a release
# make test-sample   run one in eight of the slow tests and the property tests of test-all, without torch
# make coverage   run the tests in plain Python and report which code they reach; fails below a room's gate
# make lint    check style, types, architecture and news fragments   (BASE=origin/main: branch to compare with)
# make format  reformat the source the way lint expects
# make bench   measure the bus beside others, about 12 minutes   (ARGS="--quick": see benchmarks/README.rst)
# make bench-clients   measure the clients beside redis-py, nats-py and pyzmq, about five minutes
# make bench-micro   time single steps, and report which have become slower
# make bench-payloads   measure large messages beside zenoh and iceoryx2, about three minutes
# make bench-attacks   attack the bus as one user and measure another user's clients, about 15 minutes, as root
# make web     build the page of `sbus web` into sbus/web/static (needs the npm registry)
# make test-web   test the page in Chromium, against a real bus, about a minute
# make docs    build the documentation into docs/_build/html
# make dist    build wheels, the source archive and a Debian package into dist/, and try them
# make setup   only create .venv and install sbus into it
# make clean   remove everything that the other targets created
#
# Variables for the bus:     SOCKET=/path/of/sbus.sock   OPTIONS="--dialect=early ..." (see: twistd sbus --help)
# Variables for the set-up:  PYTHON=python3.12   SBUS_EXTENSION=auto|yes|no   CC=clang   SBUS_WHEEL=/path/of/a.whl

BASE ?= origin/main
OPTIONS ?=

# A stamp records that .venv is up to date. Its name encodes what the set-up depends on besides files. The directory is
# part of that, so a tree that was copied or moved sets itself up again.
settings := $(CURDIR)|$(PYTHON)|$(or $(SBUS_EXTENSION),auto)|$(if $(filter-out default,$(origin CC)),$(CC))
key := $(shell printf '%s' '$(settings)' | cksum | cut -d ' ' -f 1)
ready := .venv/.ready-$(key)
sources := Makefile pyproject.toml setup.py tools/setup-venv tools/can-compile \
	$(wildcard sbus/*.p[xy][xd] sbus/*/*.p[xy][xd] sbus/*/*/*.p[xy][xd])

.NOTPARALLEL:
.PHONY: help run test test-pipeline test-all test-sample web test-web coverage lint format bench bench-clients bench-micro bench-payloads bench-attacks docs dist setup clean

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

$(ready): $(sources)
	@tools/setup-venv
	@touch $@

# The tests cover the pipeline, so they need its extra.
$(ready)-test: $(ready)
	@tools/setup-venv test spark delta interop
	@touch $@

$(ready)-%: $(ready)
	@tools/setup-venv $*
	@touch $@

setup: $(ready)

run: $(ready)
	@exec tools/run-bus '$(SOCKET)' $(OPTIONS)

# Tests wait for processes half of the time, so there are more of them at once than processors.
workers := $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) + 2)))

# The data pipeline only uses the bus, and its tests take a third of the time of all. A path in ARGS is run in any case.
pipeline := tests/spark $(addprefix tests/unit/,interchange journal lake recorder report spark) \
	$(addprefix tests/integration/,archive recorder cli/test_journal.py cli/test_replay.py cli/test_reports.py)

# A test that hangs fails after 300 seconds. Of a process that has ended, pytest-xdist would wait for its tests.
pytest := .venv/bin/python -m pytest --numprocesses=$(workers) --max-worker-restart=0 --timeout=300

test: $(ready)-test
	$(pytest) $(addprefix --ignore=,$(pipeline)) $(ARGS)

test-pipeline: $(ready)-test
	$(pytest) $(pipeline) $(ARGS)

# Some of these start several Java machines each: no more at once than processors.
thoroughly := .venv/bin/python -m pytest --numprocesses=auto --max-worker-restart=0 --timeout=1200 \
	-m "slow or not slow" --hypothesis-profile=thorough

test-all: $(ready)-test $(ready)-torch
	$(thoroughly) $(ARGS)

test-sample: $(ready)-test
	$(thoroughly) --sample=8 $(ARGS)

# The page of `sbus web`. The licences are written last.
page := sbus/web/static/THIRD-PARTY.txt

$(page): $(ready)-web tools/build-web $(wildcard web/*.json web/*.mjs web/src/*)
	tools/build-web
	@touch $@

web: $(page)

test-web: $(page) $(ready)-browser
	.venv/bin/python -m pytest web/tests $(ARGS)

# Coverage does not see compiled code, so it measures the plain twins. Each gate is what the tests reach today.
gates := protocol=99 routing=99 flood=99

coverage: $(ready)-test
	SBUS_PURE=1 .venv/bin/python -m pytest --numprocesses=auto --max-worker-restart=0 --timeout=300 --cov --cov-report= $(or $(ARGS),tests/unit)
	.venv/bin/coverage report --skip-covered
	@for gate in $(gates); do \
		echo "sbus.$${gate%=*}: at least $${gate#*=} %"; \
		.venv/bin/coverage report --include="sbus/$${gate%=*}/*" --fail-under="$${gate#*=}" --format=total || exit 1; \
	done

# mypy checks the tests too, so it needs what they import.
lint: $(ready)-test $(ready)-lint
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	tools/check-examples
	.venv/bin/python tools/check_docstrings.py
	.venv/bin/lint-imports --no-cache --no-logo
	.venv/bin/towncrier build --draft --version next >/dev/null
	@if git rev-parse --quiet --verify '$(BASE)^{commit}' >/dev/null 2>&1; then \
		echo .venv/bin/towncrier check --compare-with '$(BASE)'; \
		.venv/bin/towncrier check --compare-with '$(BASE)'; \
	else \
		echo 'No branch $(BASE) here: the check for missing news fragments is skipped.'; \
	fi

format: $(ready)-lint
	.venv/bin/ruff check --fix-only .
	.venv/bin/ruff format .

bench: $(ready)-bench
	.venv/bin/python benchmarks/run.py $(ARGS)

bench-clients: $(ready)-bench
	.venv/bin/python benchmarks/clients.py $(ARGS)

bench-micro: $(ready)-bench
	.venv/bin/python benchmarks/micro/compare.py $(ARGS)

bench-payloads: $(ready)-bench-payloads
	.venv/bin/python benchmarks/payloads.py $(ARGS)

bench-attacks: $(ready)-bench
	.venv/bin/python -m benchmarks.attacks $(ARGS)

# The reference imports every module, so it needs what they import.
docs: $(ready)-test $(ready)-docs
	.venv/bin/sphinx-build -W --keep-going -n -b html docs docs/_build/html

dist: $(ready)-test $(ready)-docs $(ready)-dist $(page)
	rm -rf build/man
	.venv/bin/sphinx-build -W --keep-going -q -b man -t man docs build/man
	.venv/bin/python -m pytest -m "slow or not slow" -q -p no:cacheprovider tests/integration/docs/test_man.py
	.venv/bin/python tools/make_dist.py
	tools/try-dist

clean:
	rm -rf .venv .run build dist docs/_build sbus/web/static web/node_modules *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache .coverage*
	rm -f twisted/plugins/dropin.cache
	find sbus \( -name '*.so' -o -name '*.c' \) -delete
	find sbus twisted tests benchmarks docs web tools -name __pycache__ -type d -prune -exec rm -rf {} +
