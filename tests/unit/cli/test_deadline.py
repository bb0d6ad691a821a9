"""Time-outs of the command ``sbus``: deadlines by the clock."""

from __future__ import annotations

import os
import re
import socket

import pytest

from sbus.cli.deadline import Deadline
from sbus.cli.options import Target
from sbus.client.blocking import connect
from sbus.errors import ConnectError, TimedOut
from tests.support import ROOT


def test_deadline():
    """A deadline passes when its seconds are over; without seconds it never passes."""
    assert Deadline(None).left is None
    assert Deadline(None).poll_ms is None
    assert not Deadline(None).has_passed
    assert Deadline(0).has_passed
    later = Deadline(1000)
    assert later.left is not None
    assert 990 < later.left <= 1000
    assert not later.has_passed
    later.check()


def test_longest_poll():
    """A deadline in a hundred years gives poll(2) a timeout that it accepts."""
    assert Deadline(3e9).poll_ms == 2**31 - 1


def test_text():
    """The error names what did not finish, also if a call within had another text for its time-out."""
    with pytest.raises(TimedOut, match=r"^timed out: waiting did not finish within 0 s$"):
        Deadline(0).check()
    with (
        pytest.raises(TimedOut, match=r"^timed out: publishing did not finish within 2\.5 s$"),
        Deadline(2.5, "publishing").applied(),
    ):
        raise TimedOut("no answer within 2.4 s")


def test_server_that_does_not_read(tmp_path):
    """Publishing to a server that does not read ends with the limit of the block, and so does subscribing."""
    address = str(tmp_path / "bus")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(address)
        listening.listen()
        with connect(address) as bus:
            with pytest.raises(TimedOut), bus.limit(0.05):
                bus.publish_many([("k", bytes(1000))] * 10_000)
            with pytest.raises(TimedOut), bus.limit(0.05):
                bus.subscribe("k")


@pytest.mark.parametrize("reconnect", [False, True])
def test_no_server(tmp_path, reconnect):
    """Without a server, connecting fails at once with the remedy; if it is to wait, it times out with the remedy."""
    target = Target(socket=str(tmp_path / "bus"))
    kind = TimedOut if reconnect else ConnectError
    with pytest.raises(kind, match="start one"):
        target.connect_by(Deadline(0.05), reconnect=reconnect)


def test_full_backlog(tmp_path):
    """A server that accepts no connections is a time-out."""
    address = str(tmp_path / "bus")
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other,
    ):
        listening.bind(address)
        listening.listen(0)
        other.connect(address)
        with pytest.raises(TimedOut, match="accepts no connections"):
            Target(socket=address).connect_by(Deadline(0.05))


def test_no_alarm_rings_anywhere():
    """No program of this project sets an alarm: it would ring between any two statements."""
    alarm = re.compile(r"\bsetitimer\b|\bsignal\.alarm\b|\bSIGALRM\b|\bfrom signal import .*\balarm\b")
    found = []
    for room in ("sbus", "twisted", "benchmarks", "tests", "tools", "docs"):
        for directory, _, names in os.walk(ROOT / room):
            for name in names:
                path = os.path.join(directory, name)
                if name.endswith((".py", ".pyx", ".rst")) and path != os.path.abspath(__file__):
                    with open(path, encoding="utf-8") as file:
                        found += [f"{path}: {line}" for line in file if alarm.search(line)]
    assert not found
