"""The tap: what operators see of what is published, and what it costs the others."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest

from sbus.admin.pages import Asked, Problem
from sbus.flood import Signature
from sbus.protocol.keys import CURRENT
from sbus.server.asks.last_values import LastValueRule
from sbus.server.bus.handover import OF_OTHERS
from sbus.server.core.limits import Limits
from sbus.server.ops.admin_events import events
from sbus.server.ops.tap import BURST, MOST_LOSSES, Run, Tap
from sbus.server.ops.viewers import (
    LONGEST_KEY,
    MOST_FLOWS,
    MOST_KEYS,
    MOST_NOTES,
    MessageViewer,
    TalkViewer,
    UnroutedViewer,
)
from tests.support.buses import Bus


class Time:
    """A clock that each look moves on."""

    def __init__(self, step: float = 0.0) -> None:
        self.now = 1.0
        self.step = step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


class Stream:
    """A stream of events of a bus, read by hand."""

    def __init__(self, bus: Bus, *, is_owner: bool = True, tap: Tap | None = None, **parameters: Any) -> None:
        self.tap = tap or Tap(bus.registry, Time())
        self._pieces = events(bus.registry, self.tap, Asked(parameters, is_owner))
        self.read()

    def read(self) -> dict[str, list[Any]]:
        """Return the events until there are none for now, by name."""
        text = "".join(iter_until_none(self._pieces))
        found: dict[str, list[Any]] = {}
        for each in text.split("\n\n"):
            lines = dict(line.split(": ", 1) for line in each.splitlines())
            if "event" in lines:
                found.setdefault(lines["event"], []).append(json.loads(lines["data"]))
        return found

    def messages(self) -> list[dict[str, Any]]:
        return [message for event in self.read().get("messages", ()) for message in event["messages"]]

    def close(self) -> None:
        self._pieces.close()  # type: ignore[attr-defined]


def iter_until_none(pieces: Iterator[str | None]) -> Iterator[str]:
    for piece in pieces:
        if piece is None:
            return
        yield piece


def test_nobody_looks():
    """Without a viewer messages go straight to delivery; they do so again when the last one has gone."""
    bus = Bus()
    registry = bus.registry
    assert registry.deliver == registry.delivery.deliver
    stream = Stream(bus, monitor="")
    other = Stream(bus, tap=stream.tap, talk="1")
    assert registry.deliver == stream.tap.deliver
    stream.close()
    assert registry.deliver == stream.tap.deliver
    other.close()
    assert registry.deliver == registry.delivery.deliver
    assert not registry._events.dropped


def test_messages():
    """An event shows the key, the size, the head, the publisher, and how many receivers a message has."""
    bus = Bus()
    reader, publisher = bus.connect(), bus.connect(uid=1001, pid=77)
    reader.send(b"SUB a/")
    stream = Stream(bus, monitor="a/", head="3")
    publisher.send(b"MSG a/1\0hello", b"MSG a/1\0x", b"MSG b\0y", b"MSG a/2\0\xff")
    found = stream.messages()
    assert [(m["key"], m["size"], base64.b64decode(m["head"]), m["receivers"]) for m in found] == [
        ("a/1", 5, b"hel", 1),
        ("a/1", 1, b"x", 1),
        ("a/2", 1, b"\xff", 1),
    ]
    assert found[0]["publisher"] == {"client": 2, "pid": 77, "uid": 1001, "listener": "main"}
    assert found[0]["lost"] == 0
    assert stream.messages() == []


def test_messages_of_the_program():
    """What the program around the bus publishes is of client 0; a bus that keeps last values does not count them."""
    bus = Bus(last_values=(LastValueRule(b"k"),))
    stream = Stream(bus, monitor="")
    bus.registry.publish(b"k", b"v")
    (found,) = stream.messages()
    assert (found["publisher"]["client"], found["receivers"]) == (0, 0)


def test_senders():
    """An event has what receivers are told of the publisher; of what a link passes on, the author, if it is known."""
    bus = Bus()
    link = bus.connect(uid=0, pid=77, gid=5)
    stream = Stream(bus, monitor="")
    too_long = b"/".join([b"!/cred/1/2/3"] * 60)
    for author in (b"", b"9 !/cred/0/0/8/!/cred/100/1000/42", b"0 -"):
        link.send(b"CMSG link/sender\0" + author, b"MSG k\0")
    link.protocol.signature = Signature.vouched(9, too_long)
    link.send(b"MSG k\0")
    nobody = {"gid": None, "uid": None, "pid": None, "chain": None}
    assert [message["sender"] for message in stream.messages()] == [
        {"number": 1, "gid": 5, "uid": 0, "pid": 77, "chain": None},
        {"number": 9, "gid": 100, "uid": 1000, "pid": 42, "chain": "!/cred/0/0/8"},
        {"number": 0, **nobody},
        {"number": None, **nobody},
    ]


def test_secrets_are_cut():
    """Of a secret message only the address and the size are shown."""
    bus = Bus()
    stream = Stream(bus, monitor="")
    secrets = Stream(bus, tap=stream.tap, monitor="!/")
    talk = Stream(bus, tap=stream.tap, talk="8", unrouted="1")
    bus.connect().send(b"MSG !/cred/1/2/3/hidden\0payload")
    for each in (stream, secrets):
        (found,) = each.messages()
        assert (found["key"], found["is_secret"], found["size"], found["head"]) == ("!/cred/1/2/3/", True, 7, None)
    assert b"hidden" not in json.dumps([talk_rows(talk)]).encode()


def talk_rows(stream: Stream) -> Any:
    """Return the counted events of a stream, without waiting for a second."""
    owner = stream._pieces.gi_frame.f_locals["self"]  # type: ignore[attr-defined]
    text = "".join(owner._counted())
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]


def test_who_lost_a_message():
    """A message that a receiver did not take is marked, and only that one."""
    bus = Bus()
    slow, quick, publisher = bus.connect(capacity=2), bus.connect(), bus.connect()
    slow.send(b"SUB k", b"CMSG blocking/soft/discard")
    quick.send(b"SUB k")
    stream = Stream(bus, monitor="")
    publisher.send(*(b"MSG k\0%d" % n for n in range(4)))
    stream.tap._settled_at = 0.0
    assert [(m["lost"], m["lost_by"]) for m in stream.messages()] == [(0, []), (0, []), (1, [1]), (1, [1])]
    publisher.send(b"MSG other\0", b"MSG k\0")
    stream.tap._settled_at = 0.0
    assert [(m["key"], m["lost_by"]) for m in stream.messages()] == [("other", []), ("k", [1])]


def test_who_lost_a_message_that_found_no_room_in_the_mail():
    """A gap and an entry report later: the messages that were handled in the meantime are not blamed."""
    bus = Bus(limits=Limits(user_memory=320_000))
    readers, publisher = [bus.connect(uid=2) for _ in range(OF_OTHERS + 7)], bus.connect(uid=1)
    for reader in readers:
        reader.send(b"SUB k")
    readers[0].send(b"CMSG blocking/soft/discard")
    readers[0].stall()
    bus.registry.scheduler.is_busy = True
    publisher.transport.deliver(b"MSG k\0before")
    stream = Stream(bus, monitor="")
    for key in (b"k", b"k", b"k", b"other"):
        publisher.transport.deliver(b"MSG %b\0" % key + bytes(4_000))
    assert len(readers[0].protocol.user.lines.mail) == 2  # messages, and a gap
    bus.settle()
    numbers = [reader.protocol.number for reader in readers]
    stream.tap._settled_at = 0.0
    assert [(m["key"], m["lost"], m["lost_by"]) for m in stream.messages()] == [
        ("k", 1, numbers[:1]),
        ("k", len(numbers), numbers[::-1][:8]),
        ("k", len(numbers), numbers[::-1][:8]),
        ("other", 0, []),
    ]


def test_losses_of_messages_that_a_filter_leaves_out():
    """A loss of another message is not that of a message with a filter."""
    bus = Bus()
    slow, publisher = bus.connect(capacity=1), bus.connect()
    slow.send(b"SUB ", b"CMSG blocking/soft/discard")
    stream = Stream(bus, monitor="a")
    publisher.send(b"MSG a\0", b"MSG b\0")
    assert [(m["key"], m["lost"]) for m in stream.messages()] == [("a", 0)]


def test_blocked_messages_are_shown_once():
    """A message at which its publisher is blocked is delivered later, and shown then."""
    bus = Bus()
    slow, publisher = bus.connect(capacity=1), bus.connect()
    slow.send(b"SUB k", b"CMSG blocking/soft/block")
    stream = Stream(bus, monitor="")
    publisher.send(*(b"MSG k\0%d" % n for n in range(4)))
    slow.drain()
    heads = [base64.b64decode(m["head"]) for m in stream.messages()]
    assert heads == [b"0", b"1", b"2", b"3"]


def test_the_budget():
    """What the budget does not cover is delivered, not looked at, and counted."""
    bus = Bus()
    reader, publisher = bus.connect(), bus.connect()
    reader.send(b"SUB k")
    clock = Time()
    tap = Tap(bus.registry, clock)
    stream = Stream(bus, tap=tap, monitor="")
    clock.step = BURST
    for _ in range(10):
        publisher.send(b"MSG k\0")
    clock.step = 0.0
    assert len(reader.take()) == 10
    (event,) = stream.read()["messages"]
    seen = len(event["messages"])
    assert seen < 5
    assert event["missed"] == {"budget": 10 - seen, "reader": 0}
    clock.now += 10 * BURST * 20
    publisher.send(b"MSG k\0")
    assert len(stream.messages()) == 1


def test_preemption_is_not_charged():
    """A server that is preempted for a second while it notes a message shows the next one."""
    bus = Bus()
    publisher = bus.connect()
    clock = Time()

    class Preempted(MessageViewer):
        def note(self, run: Run) -> None:
            super().note(run)
            clock.now += 1.0

    tap, viewer = Tap(bus.registry, clock), Preempted(CURRENT, b"", 10)
    tap.add(viewer)
    for _ in range(3):
        publisher.send(b"MSG k\0")
    assert (len(viewer.take()), tap.missed) == (3, 0)


def test_making_the_events_is_charged():
    """The time that making events takes counts toward the budget, by the clock of the tap."""
    bus = Bus()
    publisher = bus.connect()
    clock = Time()
    stream = Stream(bus, tap=Tap(bus.registry, clock), monitor="")
    publisher.send(b"MSG k\0")
    clock.step = BURST
    assert len(stream.messages()) == 1
    clock.step = 0.0
    publisher.send(b"MSG k\0")
    (event,) = stream.read()["messages"]
    assert (event["messages"], event["missed"]["budget"]) == ([], 1)


def test_a_reader_that_does_not_read():
    """A stream that is not read keeps a bounded number of messages, flows and keys; the others are counted."""
    bus = Bus()
    publisher = bus.connect()
    tap = Tap(bus.registry, Time())
    messages = MessageViewer(CURRENT, b"", 10)
    talk = TalkViewer(CURRENT, 1)
    unrouted = UnroutedViewer(CURRENT, set())
    for viewer in (messages, talk, unrouted):
        tap.add(viewer)
    for at in range(0, 1100, 50):
        publisher.send(*(b"MSG k%d\0" % n for n in range(at, at + 50)))
    assert (len(messages.take()), messages.missed) == (MOST_NOTES, 100)
    assert (len(talk.take()), talk.others) == (MOST_FLOWS, 100)
    assert (len(unrouted.take()), unrouted.others) == (MOST_KEYS, 100)


def test_long_keys_and_payloads_are_not_kept():
    """What waits for a reader has the beginning of a key and of a payload alone; a pattern sees all of the key."""
    bus = Bus()
    publisher = bus.connect()
    tap = Tap(bus.registry, Time())
    viewer = MessageViewer(CURRENT, b"k/" + b"x" * LONGEST_KEY + b"/", 10)
    tap.add(viewer)
    key = b"k/%b/%b" % (b"x" * LONGEST_KEY, b"y" * 100_000)
    publisher.send(b"MSG %b\0%b" % (key, b"p" * 100_000), b"MSG k/%b\0" % (b"y" * 100_000))
    (note,) = viewer.take()
    assert (note.key, note.head, note.size) == (key[:LONGEST_KEY], b"p" * 10, 100_000)


@pytest.mark.parametrize("asked", [{"monitor": "", "head": "4096"}, {"talk": "8"}, {"unrouted": "1"}])
def test_pieces_are_short(asked):
    """Also of keys that take long to write: each is written in the time of the bus."""
    bus = Bus()
    publisher = bus.connect()
    tap = Tap(bus.registry, Time())
    pieces = events(bus.registry, tap, Asked(asked, True))
    next(pieces)
    publisher.send(*(b"MSG %02d%b\0%b" % (n, b"\xff" * LONGEST_KEY, b"p" * 4096) for n in range(40)))
    found = [piece or "" for piece in iter_until_none(pieces)]
    assert "".join(found).count("\\xff") == 40 * (LONGEST_KEY - 2)
    assert max(map(len, found)) < 3 * (5 * LONGEST_KEY + 6000)


def test_losses_are_bounded():
    """A receiver that loses message by message does not make the tap grow."""
    bus = Bus()
    tap = Tap(bus.registry, Time())
    tap.add(TalkViewer(CURRENT, 1))
    peer = bus.connect()
    for _ in range(MOST_LOSSES + 5):
        tap.dropped(peer.protocol, 1, 10)
    assert len(tap._losses) == MOST_LOSSES
    tap.settle()
    assert not tap._losses


def test_who_talks_to_whom():
    """Flows have a publisher, a prefix of the wanted depth, and the receivers."""
    bus = Bus()
    reader, publisher = bus.connect(), bus.connect(pid=78)
    reader.send(b"SUB a/")
    stream = Stream(bus, talk="1")
    publisher.send(b"MSG a/b/c\0xx", b"MSG a/b\0x", b"MSG a\0", b"MSG z/1\0")
    (found,) = talk_rows(stream)
    assert [(f["publisher"], f["prefix"], f["messages"], f["receivers"]) for f in found["flows"]] == [
        (2, "a/", 2, [1]),
        (2, "a", 1, []),
        (2, "z/", 1, []),
    ]
    assert [c["client"] for c in found["clients"]] == [2, 1]
    assert (found["missed"], found["others"]) == (0, 0)
    assert talk_rows(stream)[0]["flows"] == []


def test_keys_that_nobody_wants():
    """A key is unrouted if only observers get its messages."""
    bus = Bus(last_values=(LastValueRule(b"kept"),))
    recorder, reader, publisher = bus.connect(), bus.connect(), bus.connect()
    recorder.send(b"CMSG observer/on", b"SUB ")
    reader.send(b"SUB wanted")
    stream = Stream(bus, unrouted="1")
    publisher.send(b"MSG wanted\0", b"MSG kept\0v", b"MSG b\xff\0xx", b"MSG b\xff\0xx")
    (found,) = talk_rows(stream)
    assert found["keys"] == [
        {"key": "kept", "messages": 1, "bytes": 10},
        {"key": "b\\xff", "messages": 2, "bytes": 18},
    ]


@pytest.mark.parametrize(
    "parameters", [{"talk": "9"}, {"talk": "x"}, {"monitor": "", "head": "5000"}, {"unrouted": "no"}]
)
def test_bad_parameters(parameters: dict[str, Any]):
    """A parameter out of range is refused with the range."""
    bus = Bus()
    with pytest.raises(Problem, match="give a number from"):
        Stream(bus, **parameters)
    assert bus.registry.deliver == bus.registry.delivery.deliver


def test_only_the_owner_may_monitor():
    """A member of the admin group sees who talks to whom, but not what is said."""
    bus = Bus()
    with pytest.raises(Problem) as caught:
        Stream(bus, is_owner=False, monitor="")
    assert caught.value.status == 403
    Stream(bus, is_owner=False, talk="1").close()


def test_the_status_comes_first():
    """The first event of a stream is the status, at once."""
    bus = Bus()
    bus.connect()
    pieces = events(bus.registry, Tap(bus.registry), Asked({}))
    text = "".join(iter_until_none(pieces))
    assert text.startswith(": ")
    assert '"clients": 1' in text
