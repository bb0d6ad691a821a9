"""The page on many hosts, run in order in real shells: three buses over NATS, one journal, a cluster, one lake."""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("nats", reason="no nats-py: pip install 'sbusd[nats]'")

from tests.integration.docs.pages import page
from tests.spark.test_tutorial import Shell, has_rows, until
from tests.support.archived import archived
from tests.support.nats import free_ports, nats_server

HOSTS = ("berlin", "lyon", "paris")
MESSAGES = 50
"""Messages that the page publishes on each host."""


def blocks() -> Iterator[str]:
    """The commands of the page, from the start of NATS on."""
    text = page("pipeline/7-hosts.rst")
    text = text[text.index("\nThree hosts\n") :]
    for found in re.finditer(r"(?:::|\.\. code-block:: \w+)\n\n((?:    .*\n|\n)+)", text):
        yield re.sub("^    ", "", found[1], flags=re.MULTILINE).rstrip("\n") + "\n"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """The directory in place of ``/tmp/hosts``; what was started there ends with the test."""
    home = tmp_path / "hosts"
    yield home
    for path in home.glob("*.pid"):
        try:
            os.kill(int(path.read_text()), signal.SIGKILL)
        except (ProcessLookupError, ValueError):
            pass


def logged(path: Path, pattern: str) -> bool:
    return path.exists() and re.search(pattern, path.read_text()) is not None


@pytest.mark.slow
def test_all_commands(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command does what the page says, and the lake has every message once."""
    monkeypatch.setenv("PATH", f"{Path(nats_server()).parent}{os.pathsep}{os.environ['PATH']}")
    shell, ports = Shell(tmp_path), dict(zip(("4222", "7077"), map(str, free_ports(2)), strict=True))

    def run(text: str) -> str:
        for port, free in ports.items():
            text = text.replace(port, free)
        # What goes on in the background must not keep the pipe of its shell.
        return shell.run("bash", "-e", text=re.sub(r"(?<!2>&1) &$", " > /dev/null 2>&1 &", text, flags=re.MULTILINE))

    buses, bridges, publish, look, cluster, archive, traffic, stop = blocks()
    run(buses)
    until(lambda: has_rows(home / "journal", 1))  # the recorder has begun
    run(bridges)
    for host in HOSTS:
        until(partial(logged, home / f"{host}-nats.log", "joined NATS"))
    run(publish)
    rows = len(HOSTS) * MESSAGES + 1
    until(lambda: has_rows(home / "journal", rows))
    assert f"{rows}" in run(look)

    run(cluster)
    for worker in (1, 2):
        until(partial(logged, home / f"worker{worker}.log", "Successfully registered with master"))
    assert re.search(rf"\b{rows} rows", run(archive))
    assert set(re.findall(r"hosts/(?:berlin|lyon)/sensors|sensors/temperature", run(traffic))) == {
        "hosts/berlin/sensors",
        "hosts/lyon/sensors",
        "sensors/temperature",
    }
    lake = archived(home / "lake")
    found = Counter((row["key"], row["payload"]) for row in lake if row["kind"] == "message")
    prefixes = {"berlin": "hosts/berlin/", "lyon": "hosts/lyon/", "paris": ""}
    assert found == Counter(
        (prefixes[host] + "sensors/temperature", b"%d" % number) for host in HOSTS for number in range(1, MESSAGES + 1)
    )
    run(stop)
    for host in HOSTS:
        until(partial(logged, home / f"{host}-nats.log", "the bridge stops"))
