"""The audit log of a real bus: who was refused what, with the program behind it, and a storm that changes nothing."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from sbus.server.ops.audit import FIRSTS
from tests.support.harness import OTHER_USER, THIRD_USER, Bus

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"
POLICY = 'version = 1\nclosed = ["jobs/"]\n[[rule]]\nname = "quiet"\ndeny_publish = ["noise/"]\n'
LOGGER = ("-n", "--pidfile=", "--logger=json_log.observer")


def audited(started: Bus) -> list[dict[str, Any]]:
    """Return the lines of the audit log, once the bus has stopped."""
    assert started.stop() == 0
    events = [json.loads(line) for line in started.log.splitlines() if line.startswith("{")]
    return [event for event in events if event["log_namespace"] == "sbus.audit"]


def test_a_refusal_in_json(as_root, bus, directory):
    """A log in JSON names the connection, the process, its program, what was refused, and by which rule."""
    file = directory / "p.toml"
    file.write_text(POLICY)
    started = bus("--mode=0777", f"--policy={file}", flags=LOGGER, env={"PYTHONPATH": str(EXAMPLES)})
    other = started.client(user=OTHER_USER)
    other.send(b"CMSG denied/on")
    other.msg(b"noise/1")
    other.sub(b"jobs/*")
    assert other.sync()[1:] == [b"CMSG denied\0MSG noise/1 quiet", b"CMSG denied\0SUB jobs/* closed"]
    first, second = audited(started)
    assert (first["verb"], first["key"], first["rule"], first["where"]) == ("MSG", "noise/1", "quiet", f"{file}:3")
    assert (second["verb"], second["key"], second["rule"], second["where"]) == ("SUB", "jobs/*", "closed", f"{file}:2")
    for event in (first, second):
        assert (event["verdict"], event["generation"], event["listener"]) == ("denied", 1, "main")
        assert (event["number"], event["uid"], event["gid"], event["groups"]) == (1, *OTHER_USER, [])
        assert event["pid"] == other.pid
        assert event["executable"] is None, "the process that connected has handed its socket over, and ended"


def test_the_program(bus, directory):
    """The program of a process that is there is named."""
    file = directory / "p.toml"
    file.write_text(POLICY)
    started = bus(f"--policy={file}", flags=LOGGER, env={"PYTHONPATH": str(EXAMPLES)})
    client = started.client()
    client.send(b"CMSG denied/on")
    client.msg(b"noise/1")
    client.sync()
    (event,) = audited(started)
    assert event["executable"] in (os.path.realpath(sys.executable), None), "None before Linux 6.5"


def test_a_storm(as_root, bus, directory):
    """A user who is refused all the time has eight lines and a sum; another one is served, and has its line."""
    file = directory / "p.toml"
    file.write_text(POLICY)
    started = bus("--mode=0777", "--log-rate=10000", f"--policy={file}")
    noisy, other = started.client(user=OTHER_USER), started.client(b"k", user=THIRD_USER)
    other.send(b"CMSG denied/on")
    noisy.send(b"CMSG denied/on")
    longest = 0.0
    for number in range(100_000):
        noisy.push(b"MSG noise/%d\0" % number)
        if number % 2_000 == 0:
            began = time.monotonic()
            packet = other.msg(b"k")
            while other.recv() != packet:
                pass
            longest = max(longest, time.monotonic() - began)
    assert longest < 1
    other.msg(b"noise/mine")
    other.sync()
    started.wait_log(r"denied: client 2, .*MSG 'noise/mine', rule quiet")
    assert len(started.wait_log(rf"denied: client 1, .* uid {OTHER_USER[0]} .*, rule quiet")) == FIRSTS
    assert started.stop() == 0
    assert f"user {OTHER_USER[0]}: " in started.log
    assert " denied (MSG, rule quiet)" in started.log
