"""Settings for all tests: property tests, signals, tests that need Java, samples, the distribution over processes."""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Generator, Iterable

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from sbus.errors import UsageError
from tests.support import ROOT

pytest_plugins = ["tests.support.servers", "tests.support.journals"]

# pytest asks for Twisted's version in each test, which takes a millisecond.
importlib.metadata.version = functools.cache(importlib.metadata.version)

# Other load on the machine must not fail a property test.
settings.register_profile("sbus", deadline=None, max_examples=5)
settings.register_profile("thorough", deadline=None, max_examples=100)
settings.load_profile("sbus")

# A shell starts background jobs with SIGINT ignored. The processes that tests start would inherit that, and tests
# stop them with SIGINT.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _hangups() -> None:
    """Give processes that tests start the usual SIGHUP, even below nohup; this process goes on ignoring it."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)  # exec(2) resets a handler, but not SIG_IGN


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sample", type=int, metavar="N", help="of the slow tests and the property tests, run one in N, by the commit"
    )


_MEMORY = "/dev/shm"
_ROOM = 4 << 30
"""Bytes of memory that must be free for temporary files: make test has ten megabytes at once, slow tests have more."""


def pytest_configure(config: pytest.Config) -> None:
    """Keep temporary files in memory where there is room, and compiled Python files at all.

    Tests wait thousands of times until a disk has what they wrote. They start more than a thousand processes, and each
    would compile all of sbus where the environment forbids to keep compiled files beside the sources.
    """
    if "TMPDIR" not in os.environ and os.path.isdir(_MEMORY):
        memory = os.statvfs(_MEMORY)
        if memory.f_bavail * memory.f_frsize > _ROOM and not memory.f_flag & os.ST_NOEXEC:
            os.environ["TMPDIR"] = tempfile.tempdir = _MEMORY
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
        try:
            folder = str(config.cache.mkdir("bytecode"))
        except (AttributeError, OSError):  # pytest runs without a cache, or in a tree that cannot be written
            folder = tempfile.mkdtemp(prefix="sbus-bytecode-")
            config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = folder
        sys.dont_write_bytecode = False


_OWN_SPARK = {
    "tests/spark/test_archive_killed.py",
    "tests/spark/test_cluster.py",
    "tests/spark/test_connect.py",
    "tests/spark/test_demo.py",
    "tests/spark/test_hosts.py",
    "tests/spark/test_tutorial.py",
}
"""Files whose tests start Spark in processes of their own, so they need Java without the fixture ``spark``."""

_CACHE = "sbus/seconds"
"""Where pytest's cache keeps how long each group of tests took, in seconds."""
_INTEGRATION, _UNIT = 0.5, 0.05
"""Seconds that a test is expected to take in a file that the cache does not know."""


def _java_problem() -> str | None:
    """Return why Spark cannot run here, with the remedy, or None if it can."""
    try:
        from sbus.spark.runtime.java import find_java

        find_java()
    except UsageError as e:
        return str(e)
    except ImportError as e:
        return f"{e}: run make test, which installs it"
    return None


def _scope(nodeid: str) -> str:
    """Return the group of tests that one process runs: a file, or all tests that share the Spark session."""
    path = nodeid.partition("::")[0]
    return "spark" if path.startswith("tests/spark/") else path


def _by_length(items: Iterable[pytest.Item], known: dict[str, float]) -> list[pytest.Item]:
    """Order tests so that the longest groups come first, each in its own order."""
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        groups.setdefault(_scope(item.nodeid), []).append(item)

    def seconds(scope: str) -> float:
        if scope == "spark":  # one process has it from start to end
            return 1e9
        guess = _UNIT if scope.startswith("tests/unit/") else _INTEGRATION
        return known.get(scope, guess * len(groups[scope]))

    return [item for scope in sorted(groups, key=seconds, reverse=True) for item in groups[scope]]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep what collection creates, six thousand tests and all modules, out of the garbage collector's rounds.

    Its looks at them would take a quarter of the CPU time of the tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@functools.cache
def _commit() -> str:
    """Return the commit, so that a sample is the same for all processes and whoever repeats it."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "none"


def pytest_report_header(config: pytest.Config) -> str | None:
    one_in = config.getoption("sample")
    return f"sample: one in {one_in} of the slow tests and property tests, of commit {_commit()}" if one_in else None


def _is_sampled(item: pytest.Item, one_in: int) -> bool:
    """Return whether a test is in the sample: `make test` leaves it out, or has fewer examples of it."""
    is_property = item.get_closest_marker("hypothesis") is not None
    if not is_property and item.get_closest_marker("slow") is None:
        return False
    return zlib.crc32(f"{_commit()} {item.nodeid}".encode()) % one_in == 0


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests that need Java where there is none, and start long files first where several processes share them."""
    if one_in := config.getoption("sample"):
        left_out = [item for item in items if not _is_sampled(item, one_in)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if _is_sampled(item, one_in)]
    spark = [
        item
        for item in items
        if "spark" in getattr(item, "fixturenames", ())
        or item.nodeid.partition("::")[0] in _OWN_SPARK
        or (_scope(item.nodeid) == "spark" and item.get_closest_marker("slow"))
    ]
    if spark and (problem := _java_problem()):
        for item in spark:
            item.add_marker(pytest.mark.skip(reason=problem))
    if hasattr(config, "workerinput"):
        cache = getattr(config, "cache", None)
        items[:] = _by_length(items, cache.get(_CACHE, {}) if cache else {})


class _ByFile(LoadScopeScheduling):  # type: ignore[misc]
    """Gives each process one file after the other, and one process all tests that share the Spark session.

    Files come in the order of collection, the longest first, so that no process ends long before the others.
    """

    def _split_scope(self, nodeid: str) -> str:
        return _scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> _ByFile:
    """Say which process runs which tests, and note how long they take."""
    config.option.loadscopereorder = False
    config.pluginmanager.register(_Stopwatch(config))
    return _ByFile(config, log)


class _Stopwatch:
    """Notes how long each group of tests took, for the next run."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        scope = _scope(report.nodeid)
        self._seconds[scope] = self._seconds.get(scope, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        cache = getattr(self._config, "cache", None)  # pytest may run without one
        usual = self._config.option.markexpr in self._config.getini("addopts")
        if cache is None or self._config.option.keyword or not usual:
            return  # parts of files say nothing of the whole
        cache.set(_CACHE, {**cache.get(_CACHE, {}), **{k: round(v, 2) for k, v in self._seconds.items()}})
