"""The audit log: what a line says, how many there are, and what a storm of refusals costs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from twisted.internet.task import Clock
from twisted.logger import ILogObserver, eventAsJSON, eventAsText
from zope.interface import implementer

from sbus.daemon.log_budget import LogBudget
from sbus.daemon.log_limiter import INTERVAL, LogLimiter
from sbus.daemon.log_text import text_log
from sbus.errors import CloseReason
from sbus.policy import Identity, Verdict, load
from sbus.protocol.keys import PeerCredentials
from sbus.server.core.listeners import MAIN, Listener
from sbus.server.ops.audit import FIRSTS, AuditLog
from tests.support.buses import Bus

RULE = Verdict(False, "sensors", "p.toml:7")
UNLIMITED = 1_000_000_000
"""A rate of a log that lets every line through."""


class Connection:
    """A client, as far as an audit log looks at it."""

    def __init__(self, uid: int = 1001, *, groups: Any = (20, 4), path: str | None = "/usr/bin/sensord") -> None:
        self.number = 12
        self.peer = PeerCredentials(4711, uid, 100)
        self.listener = Listener("guests")
        self.identity = Identity(uid, 100, frozenset(groups), "guests", True)
        self.path = path
        self.asked = 0
        self.transport: Any = self

    def peer_executable(self) -> str | None:
        self.asked += 1
        return self.path


@implementer(ILogObserver)
class Log:
    """An audit log, with what it has written."""

    def __init__(self, rate: int = UNLIMITED, **settings: Any) -> None:
        self.clock = Clock()
        self.events: list[dict[str, Any]] = []
        self.limiter = LogLimiter(self.clock, self, LogBudget(self.clock.seconds, rate))
        self.audit = AuditLog(self.limiter, generation=lambda: 3, **settings)

    def __call__(self, event: dict[str, Any]) -> None:
        self.events.append(event)

    def deny(self, client: Any, key: bytes = b"sensors/1", verb: bytes = b"MSG", verdict: Verdict = RULE) -> None:
        self.audit.denied(client, verb, key, verdict, True)

    def take(self) -> list[str]:
        """Return the texts since the last call."""
        events, self.events[:] = list(self.events), []
        return [eventAsText(event, includeTimestamp=False, includeSystem=False) for event in events]


# --- a line ----------------------------------------------------------------------------------------


def test_the_fields_of_a_refusal():
    """A log in JSON has each part of a line by itself."""
    log = Log()
    log.deny(Connection(), b"sensors/\xff")
    (event,) = log.events
    found = json.loads(eventAsJSON(event))
    expected = {
        "verdict": "denied",
        "number": 12,
        "listener": "guests",
        "pid": 4711,
        "uid": 1001,
        "gid": 100,
        "groups": [4, 20],
        "executable": "/usr/bin/sensord",
        "verb": "MSG",
        "key": "sensors/\\xff",
        "rule": "sensors",
        "where": "p.toml:7",
        "generation": 3,
        "times": 1,
        "log_namespace": "sbus.audit",
    }
    assert {name: found[name] for name in expected} == expected
    assert found["log_level"]["name"] == "warn"
    assert log.take() == [
        "denied: client 12, pid 4711 uid 1001 gid 100 at guests ('/usr/bin/sensord'): MSG 'sensors/\\\\xff', "
        "rule sensors (p.toml:7), generation 3"
    ]


def test_verdicts():
    """What an observing policy would refuse and what is audited have words of their own; allowed messages a number."""
    log, client = Log(), Connection(path=None)
    client.listener = MAIN
    log.audit.denied(client, b"SUB", b"a/*", Verdict(False, "default"), False)
    log.audit.audited(client, b"MSG", b"a", Verdict(True, "reads", "p.toml:2", True), 40)
    assert [event["log_level"].name for event in log.events] == ["warn", "info"]
    assert [event["times"] for event in log.events] == [1, 40]
    assert log.take() == [
        "would-deny: client 12, pid 4711 uid 1001 gid 100: SUB 'a/*', rule default, generation 3",
        "allowed: client 12, pid 4711 uid 1001 gid 100: MSG 'a' 40 times, rule reads (p.toml:2), generation 3",
    ]


def test_journald_gets_the_priority_of_a_warning(tmp_path, monkeypatch):
    """A refusal is a warning for ``journalctl -p warning``, in one line."""
    log = Log()
    log.deny(Connection(path="/a\nb"), b"a\nb")
    with open(tmp_path / "journal", "w+") as stream:
        status = Path(stream.name).stat()
        monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
        text_log(stream)(log.events[0])
        stream.seek(0)
        (line,) = stream.read().splitlines()
    assert line.startswith("<4>denied: client 12, ")
    assert "('/a\\\\nb')" in line


def test_what_clients_choose_is_short():
    """Keys, paths and groups, however long, leave a line that no limiter has to cut."""
    log = Log(10_000)
    log.deny(Connection(groups=range(60_000), path="/" + "\n" * 4_000), b"\xff" * 60_000)
    (event,) = log.events
    assert len(event["groups"]) == 32
    assert event["rule"] == "sensors"
    assert len(log.take()[0]) < 2_000


# --- the program -----------------------------------------------------------------------------------


def test_the_kernel_is_asked_once_for_each_connection():
    """The program is read when a line is written, kept until the connection ends, and then forgotten."""
    log, client = Log(), Connection()
    for _ in range(FIRSTS + 5):
        log.deny(client)
    assert client.asked == 1
    log.audit.closed(client, CloseReason.PEER_CLOSED)
    assert log.audit._executables == {}


def test_a_program_cannot_forge_the_rest_of_a_line():
    """The path of a program, which its owner chooses, is quoted as the key is."""
    log = Log()
    log.deny(Connection(path="/x): MSG 'other', rule other ('"))
    (line,) = log.take()
    assert r"""("/x): MSG 'other', rule other ('"): MSG 'sensors/1', rule sensors (p.toml:7)""" in line


def test_no_line_asks_nothing():
    """A connection whose refusals are only counted costs no system call."""
    log = Log()
    for _ in range(FIRSTS):
        log.deny(Connection())
    silent = Connection()
    log.deny(silent)
    assert silent.asked == 0
    assert log.audit._executables.get(silent) is None


def test_a_connection_that_is_lost():
    """A client without a transport has no program."""
    log, client = Log(), Connection()
    client.transport = None
    log.deny(client)
    assert log.events[0]["executable"] is None


# --- how many lines --------------------------------------------------------------------------------


def test_eight_lines_then_a_sum():
    """Of each verb and rule of a user the first eight have lines, and all others are in the sum, whatever the keys."""
    log, client = Log(), Connection()
    for number in range(1_000):
        log.deny(client, b"sensors/%d" % number)
        log.deny(client, b"sensors/%d" % number, b"SUB")
        log.deny(client, b"x", b"MSG", Verdict(False, "closed", "p.toml:2"))
    assert len(log.take()) == 3 * FIRSTS
    log.clock.advance(INTERVAL)
    (line,) = log.take()
    for kind in ("denied (MSG, rule sensors)", "denied (SUB, rule sensors)", "denied (MSG, rule closed)"):
        assert f"{1_000 - FIRSTS} {kind}" in line
    log.deny(client)
    assert len(log.take()) == 1, "a new interval begins with lines"


def test_users_have_their_own_lines():
    """A user's storm takes nothing of what others have; all UIDs of an owner are one user."""
    log = Log(owner_of=lambda uid: 7 if uid >= 100_000 else uid)
    for uid in range(100_000, 100_100):
        log.deny(Connection(uid))
    assert len(log.take()) == FIRSTS
    log.deny(Connection(1))
    assert len(log.take()) == 1


@pytest.mark.parametrize("rules", [1, 100])
def test_a_storm_is_bounded(rules):
    """A hostile user with 100,000 refusals fills neither the log nor memory; the first refusal of another is there."""
    log, client = Log(10_000), Connection()
    verdicts = [Verdict(False, f"rule-{number}", "p.toml:1") for number in range(rules)]
    for number in range(100_000):
        log.deny(client, b"sensors/%d" % number, verdict=verdicts[number % rules])
    lines = log.take()
    assert sum(map(len, lines)) < 14_000
    for uid in range(1002, 1010):
        log.deny(Connection(uid), b"mine", verdict=verdicts[0])
    assert [line.count("'mine'") for line in log.take()] == [1] * 8, "others have their first lines at once"
    (entry,) = (each for uid, each in log.limiter._users.items() if uid == 1001)
    assert len(entry.counts) <= 41
    assert sum(entry.counts.values()) == 100_000 - len(lines)
    assert sys.getsizeof(log.audit._executables) < 1_000


# --- on a bus --------------------------------------------------------------------------------------


def test_a_bus_reports(tmp_path):
    """Refused and audited packets, and the rule of secret keys, are reported with the rule; secrets are cut."""
    file = tmp_path / "p.toml"
    file.write_text('version = 1\nclosed = ["jobs/"]\n[[rule]]\nname = "watched"\npublish = ["jobs/x"]\naudit = true\n')
    log = Log()
    bus = Bus(policy=load(str(file)), observers=(log.audit,))
    client = bus.connect(uid=7)
    client.send(b"CMSG denied/on")
    client.send(b"MSG jobs/y\0", b"SUB jobs/", b"SUB !/cred/1/2/3/hidden", b"MSG jobs/x\0", b"MSG open\0")
    lines = [line.partition(": ")[2].partition(": ")[2] for line in log.take()]
    assert lines == [
        f"MSG 'jobs/y', rule closed ({file}:2), generation 3",
        f"SUB 'jobs/', rule closed ({file}:2), generation 3",
        "SUB '!/cred/1/2/3/', rule secret, generation 3",
        f"MSG 'jobs/x', rule watched ({file}:3), generation 3",
    ]
    assert client.is_connected
