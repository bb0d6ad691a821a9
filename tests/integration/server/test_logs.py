"""The log of a real twistd under a storm of clients: its size, its sums, and its files."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.support.harness import Bus, Client
from tests.support.waiting import wait_until

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"


def storm(bus, connections=1_500):
    """Connect, break the protocol and leave; return how often, and in how many seconds.

    One more client stays.
    """
    began = time.monotonic()
    for _ in range(connections):
        with Client(bus.address) as client:
            client.send(b"JUNK")
    assert bus.client(b"last").sync() == []  # the others were accepted before it
    return connections, time.monotonic() - began


def numbers(kind, *texts):
    """Return the sum of the numbers of a kind in the texts."""
    return sum(int(n.replace(",", "")) for text in texts for n in re.findall(rf"([\d,]+) {re.escape(kind)}", text))


@pytest.fixture
def limited(spawn, directory):
    """Start a bus whose log has the limits of an operator's."""

    def start(*options, flags=(), **kwargs):
        return spawn(Bus, directory, "--log-rate=10000", *options, flags=("-n", "--pidfile=", *flags), **kwargs)

    return start


def test_a_storm_is_few_lines_and_all_of_it_is_counted(limited, directory):
    """1,500 connections with junk take a few kilobytes, and the lines and sums account for each of them."""
    bus = limited(flags=(f"--logfile={directory}/log",))
    log = directory / "log"
    wait_until(lambda: log.exists() and "sbus listens on" in log.read_text())
    before = log.stat().st_size
    connections, seconds = storm(bus)
    assert bus.stop() == 0
    text = log.read_text()
    assert len(text) - before < 10_000 * max(4.0, seconds)
    assert text.count("violation by client 1,") == 1, "the first one has a line"
    sums = [line for line in text.splitlines() if "not logged one by one" in line]
    assert sums
    assert text.count(": violation by client") + numbers("violations (UNKNOWN_VERB)", *sums) <= connections
    connected = len(re.findall(r"client \d+ connected", text)) + numbers("clients connected", *sums)
    gone = len(re.findall(r"client \d+ disconnected", text)) + sum(
        numbers(f"clients disconnected ({reason})", *sums)
        for reason in ("VIOLATION", "PEER_CLOSED", "PEER_RESET", "SERVER_STOPPED")
    )
    assert connected == gone == connections + 1
    assert "Server Shut Down" in text


@pytest.mark.parametrize("keep", [["--log-keep=3x5000"], ["--log-file-bytes=5000", "--log-files=3"]])
def test_log_files_are_bounded(limited, directory, keep):
    """However much is logged, there are --log-keep files of as many bytes."""
    options = ("--log-rate=100000000", *keep)
    bus = limited(*options, flags=(f"--logfile={directory}/log",))
    wait_until(lambda: (directory / "log").exists() and "sbus listens on" in (directory / "log").read_text())
    storm(bus, 300)
    assert bus.stop() == 0
    assert sorted(path.name for path in directory.glob("log*")) == ["log", "log.1", "log.2"]
    assert all(path.stat().st_size <= 5_000 for path in directory.glob("log*"))


def test_sigusr1_begins_a_new_log_file(limited, directory):
    """SIGUSR1 renames the log, whole, to log.1, and what comes later is in a new one."""
    bus = limited(flags=(f"--logfile={directory}/log",))
    log = directory / "log"
    wait_until(lambda: log.exists() and "sbus listens on" in log.read_text())
    before = log.read_bytes()
    bus.kill(signal.SIGUSR1)
    wait_until(lambda: (directory / "log.1").exists())
    assert bus.stop() == 0
    assert (directory / "log.1").read_bytes().startswith(before), "nothing was lost"
    assert "Server Shut Down" in log.read_text()
    assert sorted(path.name for path in directory.glob("log*")) == ["log", "log.1"]


def test_json_logs_are_limited_too(limited, directory):
    """A logger of the operator's own gets no more bytes, and the sums as fields."""
    bus = limited(flags=("--logger=json_log.observer",), env={"PYTHONPATH": str(EXAMPLES)}).wait_started()
    before = len(bus.log)
    _, seconds = storm(bus)
    assert bus.stop() == 0
    assert len(bus.log) - before < 10_000 * max(4.0, seconds)
    events = [json.loads(line) for line in bus.log.splitlines() if line.startswith("{")]
    assert sum(event.get("reason") == "UNKNOWN_VERB" for event in events) >= 1
    (summed, *_) = [event for event in events if event["log_namespace"] == "sbus.log"]
    assert summed["uid"] == os.geteuid()
    assert "violations (UNKNOWN_VERB)" in summed["events"]


def test_wrong_loggers_and_log_files_are_named(spawn, directory):
    """A logger that cannot be imported, or a file that cannot be opened, is one line and status 1."""
    for flag, text in (
        ("--logger=json_log.missing", "--logger=json_log.missing: it cannot be imported"),
        ("--logfile=/nowhere/log", "cannot write the log /nowhere/log: No such file or directory: choose another"),
    ):
        bus = spawn(Bus, directory, flags=("-n", "--pidfile=", flag), env={"PYTHONPATH": str(EXAMPLES)})
        assert bus.wait() == 1
        assert text in bus.log
        assert "Traceback" not in bus.log
