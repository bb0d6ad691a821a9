"""The wall clock: setting it back delays no timer of the processes that sbus starts."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from tests.support.harness import TIMEOUT, Bus, numbered

_WALL_CLOCK = """
import signal, sys, time
real, offset = time.time, [0.0]
time.time = lambda: real() + offset[0]
signal.signal(signal.SIGUSR2, lambda *_: offset.__setitem__(0, -3600.0))
"""
"""Sets the wall clock, as Python sees it, back by an hour at a signal."""
_TWISTD = "from twisted.scripts.twistd import run; sys.argv[0] = 'twistd'; run()"
_SBUSD = "from sbus.server.run.sbusd import main; main()"
_REPORT = """
import atexit, os
def report():
    from twisted.internet import reactor
    os.write(2, b"monotonic: %a" % (reactor.seconds is time.monotonic))
atexit.register(report)
"""

_STOP_SOON = """
import os, threading
def stop():
    from twisted.internet import reactor
    reactor.callWhenRunning(reactor.callLater, 0, os.kill, os.getpid(), signal.SIGTERM)
import twisted.internet.main as main
install = main.installReactor
def installed(reactor):
    install(reactor)
    stop()
main.installReactor = installed
"""
"""Stops the process in the first turn of its reactor."""


class JumpingBus(Bus):
    """A bus whose wall clock jumps at SIGUSR2."""

    launcher = (sys.executable, "-c", _WALL_CLOCK + _TWISTD)


def test_block_time_out_ends_although_the_clock_was_set_back(spawn, directory):
    """A receiver that blocks a publisher is disconnected in time when the wall clock jumps back by an hour."""
    started = spawn(JumpingBus, directory, "--max-packet=1024", "--block-timeout=1").wait_started()
    reader = started.client(b"flood")
    reader.cmsg(b"blocking/soft/block")
    reader.sync()
    publisher = started.client()
    for packet in numbered(b"flood", 1000):
        if not publisher.push(packet) and not publisher.waits_for_room(0.2):
            break
    started.kill(signal.SIGUSR2)
    began = time.monotonic()
    started.wait_log("it blocked publishers and received nothing")
    assert time.monotonic() - began < TIMEOUT
    assert started.stop() == 0


@pytest.mark.parametrize(
    ("launch", "arguments"),
    [
        (_TWISTD, ["-n", "--pidfile=", "sbus", "--socket=bus"]),
        (_TWISTD, ["-n", "--pidfile=", "sbus-recorder", "--socket=nowhere", "--journal=journal"]),
        (_SBUSD, ["-f", "-a", "bus"]),
    ],
    ids=["sbus", "sbus-recorder", "sbusd"],
)
def test_every_process_uses_the_monotonic_clock(directory, launch, arguments):
    """The reactor of each process takes the time of its delayed calls from the monotonic clock."""
    if "sbus-recorder" in arguments:
        pytest.importorskip("pyarrow")
    code = _WALL_CLOCK + _REPORT + _STOP_SOON + launch
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=directory, capture_output=True, text=True, timeout=TIMEOUT
    )
    assert "monotonic: True" in result.stderr
