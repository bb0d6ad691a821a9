"""Each message has the sender that the server has named last, and no other."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import pwd
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sbus
from sbus.client.core import Batch, ClientCore, Message
from sbus.client.identity import Sender
from sbus.client.options import ConnectOptions
from sbus.client.responding import Request
from sbus.client.senders import kind_of
from sbus.errors import UsageError
from sbus.protocol.keys import EARLY
from sbus.protocol.notices import NOBODY
from sbus.protocol.notices import sender as named
from sbus.syscalls.sockets import overflow_ids
from tests.support.examples import examples
from tests.support.packets import bundle

WHOAMI = b"CMSG !/cred/whoami"
ASKED = [b"CMSG sender/on", WHOAMI]
ANSWER = b"CMSG sender/on\0"
NAME = WHOAMI + b"\0!/cred/1/2/3"


class Sink:
    """A subscription that notes the payload and the sender of each message.

    :param callback: also called with each message.
    """

    def __init__(self, callback: Callable[[Message], object] | None = None) -> None:
        self.pattern = b""
        self.callback = callback
        self.got: list[tuple[bytes, str | None]] = []

    def begin(self) -> None:
        """Do nothing: no messages of others are kept."""

    def deliver(self, messages: list[Message]) -> None:
        for message in messages:
            self.got.append((message.payload, None if message.sender is None else str(message.sender)))
            if self.callback is not None:
                self.callback(message)


def credentials(number: int) -> bytes:
    return b"!/cred/1/2/%d" % number


# --- the value --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "sender"),
    [
        (b"7 !/cred/100/1000/42", Sender(7, 100, 1000, 42)),
        (b"7 !/cred/0/0/1/!/cred/100/1000/42", Sender(7, 100, 1000, 42, "!/cred/0/0/1")),
        (b"7 !/cred/5/6/7/!/cred/0/0/1/!/cred/100/1000/42", Sender(7, 100, 1000, 42, "!/cred/5/6/7/!/cred/0/0/1")),
        (b"0 -", Sender(0, None, None, None)),
        (b"", None),
        (b"7 !/cred/100/1000", None),
        (b"-1 !/cred/100/1000/42", None),
    ],
)
def test_parsing(payload: bytes, sender: Sender | None) -> None:
    """A sender has the IDs of the publisher, and in front of them the links; as text it is what the notice has."""
    assert Sender.parse(payload) == sender
    if sender is not None:
        assert named(sender.number, str(sender).encode()) == b"CMSG sender\0" + payload


def test_value() -> None:
    """It is small, does not change, and serves as a key."""
    sender = Sender(7, 100, 1000, 42)
    assert sbus.Sender is Sender
    assert {sender: 1}[Sender(7, 100, 1000, 42)] == 1
    assert not hasattr(sender, "__dict__")
    with pytest.raises(dataclasses.FrozenInstanceError):
        sender.uid = 0  # type: ignore[misc]


def test_users() -> None:
    """A sender is a user by name or UID, behind a link too; the program around the bus is none."""
    me, name = os.geteuid(), pwd.getpwuid(os.geteuid()).pw_name
    for sender in (Sender(7, 0, me, 42), Sender(7, 0, me, 42, "!/cred/0/0/1")):
        assert sender.is_user(me)
        assert sender.is_user(name)
        assert sender.is_user(str(me))
        assert not sender.is_user(me + 1)
    assert not Sender(0, None, None, None).is_user(me)


@pytest.mark.parametrize("chain", ["", "!/cred/0/0/0", "!/cred/0/{uid}/1", "!/cred/{gid}/0/1"])
def test_ids_that_prove_nothing(chain: str) -> None:
    """PID 0 and the overflow IDs are shared by many processes; in the name of a link, nobody vouches for the rest."""
    uid, gid = overflow_ids()
    chain = chain.format(uid=uid, gid=gid)
    assert Sender(7, 1, 1, 42).is_user(1)
    if chain:
        assert not Sender(7, 1, 1, 42, chain).is_user(1)
    assert not Sender(7, 1, 1, 0, chain or None).is_user(1)
    assert not Sender(7, 1, uid, 42, chain or None).is_user(uid)
    assert not Sender(7, gid, 1, 42, chain or None).is_user(1)


@pytest.mark.parametrize("name", ["no such user", "a\0b", "", "\ud800", "9" * 5000])
def test_unknown_user(name: str) -> None:
    """A name that is wrong is an error, not a refusal: it may be a misspelt administrator."""
    with pytest.raises(UsageError, match=r"there is no user .*: give a name from `getent passwd`, or a UID"):
        Sender(7, 1, 1, 42).is_user(name)


@pytest.mark.parametrize("user", [None, b"root", 0.0, False])
def test_no_user(user: Any) -> None:
    """What is neither a name nor a UID is an error: None is not the user of the program around the bus."""
    for sender in (Sender(7, 1, 0, 42), Sender(0, None, None, None)):
        with pytest.raises(UsageError, match="a user is a name or a UID"):
            sender.is_user(user)


def test_messages_are_tuples_as_before() -> None:
    """A message with a sender is a `Message`; copied, pickled or replaced, it keeps its sender."""
    plain, message = Message(b"k", b"p"), kind_of(b"7 !/cred/100/1000/42")(b"k", b"p")
    assert plain.sender is None
    key, payload = message
    assert (key, payload) == message == plain
    assert repr(message) == "Message(key=b'k', payload=b'p', sender=!/cred/100/1000/42)"
    assert isinstance(message, Message)
    for other in (copy.copy(message), copy.deepcopy(message), pickle.loads(pickle.dumps(message))):
        assert type(other) is type(message)
        assert (other, other.sender) == (message, Sender(7, 100, 1000, 42))
    assert message._replace(payload=b"q").sender is message.sender
    assert pickle.loads(pickle.dumps(plain)) == plain


def test_a_run_shares_its_sender() -> None:
    """The messages of one publisher have one value, also when another one comes in between."""
    core = ClientCore(sender=True)
    got: list[Message] = []
    sink = Sink(got.append)
    core.subscribe("", sink)
    core.receive([ANSWER, named(1, credentials(1)), b"MSG a\0", b"MSG a\0", named(2, credentials(2)), b"MSG a\0"])
    core.receive([named(1, credentials(1)), b"MSG b\0"])
    assert got[0].sender is got[1].sender is got[3].sender
    assert got[2].sender == Sender(2, 1, 2, 2)


# --- asking -----------------------------------------------------------------------------------


def test_asking_on_each_connection() -> None:
    """`sender=True` of the connection asks before everything, and again on the next connection."""
    core = ClientCore(sender=True)
    assert core.resync_packets() == ASKED
    assert core.subscribe("a", Sink(), sender=True) == [b"SUB a"]
    core.disconnected()
    assert core.resync_packets() == [*ASKED, b"SUB a"]


def test_asking_with_the_first_subscription() -> None:
    """The question goes out before the first subscription that wants senders; the connection keeps asking."""
    core, sink = ClientCore(), Sink()
    assert core.subscribe("a", Sink()) == [b"SUB a"]
    assert core.subscribe("a", sink, sender=True) == ASKED
    assert core.subscribe("b", Sink(), sender=True) == [b"SUB b"]
    assert core.unsubscribe(sink) == []
    core.disconnected()
    assert core.resync_packets() == [*ASKED, b"SUB a", b"SUB b"]


def test_asking_with_a_snapshot() -> None:
    """The question precedes the request for last values, which have senders too."""
    core, sink, other = ClientCore(), Sink(), Sink()
    core.subscribe("", other)
    packets = core.subscribe("a", sink, last=True, sender=True)
    assert packets == [*ASKED, b"CMSG bye/on", b"CMSG last\0a", b"SUB a", WHOAMI]
    core.receive([ANSWER, NAME, b"CMSG bye/on\0", named(1, credentials(1)), b"MSG a\0old"])
    core.receive([named(2, credentials(2)), b"MSG a\0older", b"CMSG last/done\0a", b"MSG a\0new", NAME])
    assert sink.got == [(b"old", "!/cred/1/2/1"), (b"older", "!/cred/1/2/2"), (b"new", "!/cred/1/2/2")]
    assert other.got == sink.got[2:]


def test_snapshot_out_of_order() -> None:
    """Under another order the other subscriptions get the snapshot too, with the same senders."""
    core, other = ClientCore(), Sink()
    core.control("order/stack")
    core.subscribe("", other)
    core.subscribe("a", Sink(), last=True, sender=True)
    core.receive([ANSWER, NAME, b"CMSG bye/on\0", named(1, credentials(1)), b"MSG a\0old", b"CMSG last/done\0a"])
    assert other.got == [(b"old", "!/cred/1/2/1")]


def test_notices_count_from_the_answer_on() -> None:
    """A notice may come early, for a message in a replaced place; it names the messages behind the answer."""
    core, sink, strict = ClientCore(), Sink(), Sink()
    core.subscribe("", sink)
    core.subscribe("", strict, sender=True)
    core.receive([b"MSG a\0" + b"before", named(1, credentials(1)), b"MSG a\0early", ANSWER, b"MSG a\0named", NAME])
    assert sink.got == [(b"before", None), (b"early", None), (b"named", "!/cred/1/2/1")]
    assert strict.got == sink.got[2:]


def test_notices_that_nobody_asked_for() -> None:
    """They name nobody, as do those that are malformed: no message may have another one's sender."""
    core, sink = ClientCore(), Sink()
    core.subscribe("", sink)
    core.receive([named(1, credentials(1)), b"MSG a\0" + b"0"])
    core = ClientCore(sender=True)
    core.subscribe("", sink)
    core.receive([ANSWER, b"MSG a\0" + b"1", named(1, credentials(1)), b"MSG a\0" + b"2"])
    core.receive([b"CMSG sender\0" + b"2 !/creed/1/2/3", b"MSG a\0" + b"3", named(0, NOBODY), b"MSG a\0" + b"4"])
    assert sink.got == [(b"0", None), (b"1", None), (b"2", "!/cred/1/2/1"), (b"3", None), (b"4", "-")]


def test_no_sender_outlives_its_connection() -> None:
    """On the next connection nobody is named until that server has answered."""
    core, sink = ClientCore(sender=True), Sink()
    core.subscribe("", sink)
    core.connected(100)
    core.receive([ANSWER, named(1, credentials(1)), b"MSG a\0" + b"0"])
    core.disconnected()
    core.resync_packets()
    core.connected(100)
    core.receive([b"MSG a\0" + b"1", ANSWER, b"MSG a\0" + b"2", named(2, credentials(2)), b"MSG a\0" + b"3"])
    assert sink.got == [(b"0", "!/cred/1/2/1"), (b"1", None), (b"2", None), (b"3", "!/cred/1/2/2")]


@pytest.mark.parametrize("late", [False, True])
def test_server_without_senders(late: bool) -> None:
    """If the server ignores the question, the client does not go on as if messages had no senders."""
    errors: list[UsageError] = []
    core = ClientCore(sender=not late, give_up=errors.append)
    core.resync_packets()
    if late:
        core.subscribe("a", Sink(), sender=True)
    core.receive([b"MSG a\0"])
    assert errors == []
    core.receive([NAME])
    assert "runs with --no-sender" in str(errors[0])
    core.disconnected()
    core.resync_packets()
    core.receive([ANSWER, NAME])
    assert len(errors) == 1
    assert core.extensions.answered == {"sender"}


def test_asking_is_the_librarys() -> None:
    """The control message has a call of its own; the early dialect does not have it."""
    with pytest.raises(UsageError, match="connect or subscribe with sender=True"):
        ClientCore().control("sender/off")
    core = ClientCore(EARLY)
    with pytest.raises(UsageError, match="early dialect has no control messages"):
        core.subscribe("a", Sink(), sender=True)
    assert list(core.sinks()) == []
    with pytest.raises(UsageError, match="early dialect"):
        ConnectOptions(dialect="early", sender=True)


def test_requests() -> None:
    """A request has the sender of its message; one that was made by hand has none."""
    bus: Any = object()
    message = kind_of(b"7 !/cred/100/1000/42")(b"k", b"!/cred/1/2/3/sbus/reply/x\0hello")
    request = Request.received(bus, message)
    assert (request.payload, request.sender) == (b"hello", Sender(7, 100, 1000, 42))
    assert Request.received(bus, Message(*message)).sender is None
    assert Request(b"k", b"p").sender is None


# --- whatever comes ---------------------------------------------------------------------------


@settings(max_examples=examples(300))
@given(st.data())
def test_the_last_notice_names_the_sender(data: st.DataObject) -> None:
    """However the packets are bundled and read, each subscription finds each message's sender, over reconnects too."""
    core = ClientCore(sender=True)
    batch = Batch([])

    def receive(packets: list[bytes]) -> None:
        nonlocal batch
        batch = Batch(core.extensions.mark_start(packets))
        core.process(batch)

    def read_on(message: Message) -> None:
        if message.payload.endswith(b"7"):
            core.process(batch)

    plain, calling, other = Sink(), Sink(read_on), Sink()
    for pattern, sink in (("", plain), ("a/", calling), ("b/*", other)):
        core.subscribe(pattern, sink)
    wanted: list[tuple[bytes, bytes, str | None]] = []
    for _ in range(data.draw(st.integers(1, 3))):
        core.disconnected()
        core.resync_packets()
        core.connected(10_000)
        packets, last, answered = [], None, False
        events = data.draw(
            st.lists(
                st.tuples(st.sampled_from([1, 1, 2, 3]), st.sampled_from([b"a/x", b"a/y", b"b/z", b"c"])), max_size=60
            )
        )
        early = data.draw(st.integers(0, 5))
        for at, (publisher, key) in enumerate(events):
            if at == early:
                packets.append(ANSWER)
                answered = True
            if publisher != last and (answered or data.draw(st.booleans())):
                packets.append(named(publisher, credentials(publisher)))
                last = publisher
            if answered or publisher == last:
                payload = b"%d" % len(wanted)
                packets.append(b"MSG %b\0%b" % (key, payload))
                wanted.append((key, payload, credentials(publisher).decode() if answered else None))
            if data.draw(st.booleans()):
                packets.append(b"CMSG other\0")
        while packets:
            count = data.draw(st.integers(1, len(packets)))
            read, packets = packets[:count], packets[count:]
            receive([bundle(*read)] if data.draw(st.booleans()) else read)
    for sink, prefix in ((plain, b""), (calling, b"a/"), (other, b"b/")):
        assert sink.got == [(payload, name) for key, payload, name in wanted if key.startswith(prefix)]


def test_messages_that_wait_share_the_class_of_their_publisher():
    """However many publishers take turns, messages that a program has not read take one class for each of these."""
    kinds = [kind_of(b"%d !/cred/1/2/3" % number) for _ in range(3) for number in range(5000, 5400)]
    assert len(set(map(id, kinds))) == 400


def test_notices_that_are_too_long_are_not_kept():
    """A server that goes wrong cannot fill a client's memory with long names, which are nobody's."""
    payload = b"7 " + b"!/cred/1/2/3/" * 5000
    before = sys.getrefcount(payload)
    assert kind_of(payload) is Message
    assert sys.getrefcount(payload) == before
