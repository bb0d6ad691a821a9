"""The client's core says what to send, and gives each subscription what it asked for, once: checked without I/O."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbus.client.core import ClientCore, Message, as_bytes, find_dialect
from sbus.errors import InvalidKey, PacketTooLong, UsageError, ViolationReason
from sbus.keys import CURRENT, EARLY, Dialect, matches
from tests.strategies import PEERS, dialects, keys, may_subscribe, patterns

ME = PEERS[0]
WHOAMI = b"CMSG !/cred/whoami"
ACTIONS = ("subscribe", "subscribe", "publish", "publish", "unsubscribe", "reconnect")


class Sink:
    """A subscription that keeps its messages."""

    pattern = b""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def deliver(self, message: Message) -> None:
        self.messages.append(message)


class Waiter:
    """Somebody who waits, and writes down what for."""

    def __init__(self) -> None:
        self.outcomes: list[Any] = []

    def succeed(self, value: bytes) -> None:
        self.outcomes.append(value)

    def fail(self, error: Exception) -> None:
        self.outcomes.append(error)


class PlainServer:
    """What a server does with a client's subscriptions, by the plain matcher: the reference."""

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect
        self.patterns: Counter[bytes] = Counter()

    def take(self, packets: list[bytes]) -> None:
        for packet in packets:
            verb, _, pattern = packet.partition(b" ")
            if verb == b"SUB":
                self.patterns[pattern] += 1
            else:
                assert verb == b"UNSUB"
                assert self.patterns[pattern] > 0
                self.patterns[pattern] -= 1

    def wants(self, key: bytes) -> bool:
        return any(matches(pattern, key, self.dialect, ME) for pattern in +self.patterns)


@settings(max_examples=300)
@given(st.data(), dialects)
def test_each_subscription_gets_what_it_asked_for_once(data: st.DataObject, dialect: Dialect) -> None:
    """Whatever subscriptions come, go and overlap, on however many connections: the sinks get what the matcher says."""
    core, server = ClientCore(dialect), PlainServer(dialect)
    sinks: list[Sink] = []
    wanted: dict[Sink, list[Message]] = {}
    usable = patterns(dialect).filter(lambda pattern: may_subscribe(dialect, ME, pattern))
    for number in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(ACTIONS))
        if action == "subscribe":
            sink = Sink()
            server.take(core.subscribe(data.draw(usable), sink))
            sinks.append(sink)
            wanted[sink] = []
        elif action == "unsubscribe" and sinks:
            sink = data.draw(st.sampled_from(sinks))
            sinks.remove(sink)
            server.take(core.unsubscribe(sink))
            assert core.unsubscribe(sink) == []
        elif action == "reconnect":
            core.lost()
            server = PlainServer(dialect)
            server.take(core.greeting())
        else:
            message = Message(data.draw(keys(dialect)), b"%d" % number)
            packet = core.publish(*message)
            core.receive([packet] * server.wants(message.key))
            for sink in sinks:
                if matches(sink.pattern, message.key, dialect, ME):
                    wanted[sink].append(message)
        assert +server.patterns == Counter({sink.pattern for sink in sinks})
        assert set(core.sinks()) == set(sinks)
    for sink, messages in wanted.items():
        assert sink.messages == messages


def test_message_on_its_way_when_its_subscription_went_is_nobodys() -> None:
    """What was sent before the server heard of the end of a subscription does not reach the others."""
    core, one, other = ClientCore(), Sink(), Sink()
    core.subscribe("a/", one)
    core.subscribe("b/", other)
    core.receive([b"MSG a/x\0"])
    core.unsubscribe(one)
    core.receive([b"MSG a/x\0", b"MSG a/y\0", b"MSG !/odd\0", b"MSG b/x\0"])
    assert (len(one.messages), [m.key for m in other.messages]) == (1, [b"b/x"])


def test_publishing_builds_one_packet() -> None:
    """Text keys are UTF-8; payloads hold anything."""
    core = ClientCore()
    assert core.publish("ä", b"\0x") == b"MSG \xc3\xa4\0\0x"
    assert core.publish(b"", b"") == b"MSG \0"
    assert core.publish("!/cred/1//3/x", b"") == b"MSG !/cred/1//3/x\0"
    assert core.publish("a!/b!", b"") == b"MSG a!/b!\0"


@pytest.mark.parametrize(
    ("dialect", "key", "reason"),
    [
        (CURRENT, b"a\0b", None),
        (CURRENT, b"!", ViolationReason.RESERVED_KEY),
        (CURRENT, b"a/!", ViolationReason.RESERVED_KEY),
        (CURRENT, b"!/cred/1/2/x/", ViolationReason.BAD_ID),
        (EARLY, b"!a", ViolationReason.RESERVED_KEY),
        (EARLY, b"a\0", None),
    ],
)
def test_forbidden_keys_are_refused(dialect: Dialect, key: bytes, reason: ViolationReason | None) -> None:
    """Neither published nor subscribed to, with the rule that they break; nothing is remembered of them."""
    core = ClientCore(dialect)
    for call in (lambda: core.publish(key, b""), lambda: core.subscribe(key, Sink())):
        with pytest.raises(InvalidKey) as raised:
            call()
        assert raised.value.reason is reason
    assert core.greeting() == []


def test_packets_over_the_limit_are_refused() -> None:
    """The limit is of whole packets, for all kinds of them; a setting that is refused is not remembered."""
    core = ClientCore(max_packet=20)
    assert len(core.publish("k", bytes(14))) == 20
    assert core.subscribe(b"k" * 16, Sink()) == [b"SUB " + b"k" * 16]
    core.control("order/" + "o" * 9)
    greeting = core.greeting()
    for call in (
        lambda: core.publish("k", bytes(15)),
        lambda: core.subscribe(b"k" * 17, Sink()),
        lambda: core.control("order/" + "o" * 10),
    ):
        with pytest.raises(PacketTooLong, match="21 bytes, and the limit is 20"):
            call()
    assert core.greeting() == greeting


def test_settings_are_remembered_the_newest_of_each_kind() -> None:
    """What `greeting` sends is what the server would have in force; other control messages are not repeated."""
    core = ClientCore()
    for key in ("echo/off", "order/stack", "blocking/soft/block", "other/thing", "blocking/hard/error", "order/random"):
        assert core.control(key) == b"CMSG " + key.encode()
    assert core.control(b"echo/on", b"payload") == b"CMSG echo/on\0payload"
    assert set(core.greeting()) == {
        b"CMSG echo/on",
        b"CMSG order/stack",
        b"CMSG order/random",
        b"CMSG blocking/soft/block",
        b"CMSG blocking/hard/error",
    }
    assert core.greeting().index(b"CMSG order/stack") < core.greeting().index(b"CMSG order/random")
    core.control("order/queue")
    assert [packet for packet in core.greeting() if b"order" in packet] == [b"CMSG order/queue"]
    with pytest.raises(InvalidKey, match="holds a NUL"):
        core.control("echo/\0")


def test_early_dialect_has_no_control_messages() -> None:
    """Whatever needs one raises, and leaves nobody waiting."""
    core = ClientCore(EARLY)
    for call in (lambda: core.control("echo/off"), lambda: core.whoami(Waiter())):
        with pytest.raises(UsageError, match="early dialect has no control messages"):
            call()
    assert (core.greeting(), core.lost()) == ([], [])


def test_answers_go_to_those_who_asked_in_order() -> None:
    """Each gets one; a raw question's goes to the hook, and so does one that nobody has asked for."""
    told: list[tuple[bytes, bytes]] = []
    core = ClientCore(on_control=lambda key, payload: told.append((key, payload)))
    one, two, three = Waiter(), Waiter(), Waiter()
    assert core.whoami(one) == [WHOAMI]
    assert core.control("!/cred/whoami") == WHOAMI
    assert core.whoami(two) == core.fence(three) == [WHOAMI]
    core.receive([WHOAMI + b"\0" + name for name in (b"1", b"2", b"3", b"4", b"5")])
    assert [waiter.outcomes for waiter in (one, two, three)] == [[b"1"], [b"3"], [b"4"]]
    assert told == [(b"!/cred/whoami", b"2"), (b"!/cred/whoami", b"5")]


def test_early_fence_is_a_message_to_ourselves() -> None:
    """It comes back behind everything, and no subscription sees it; fences keep apart."""
    core, sink, one, two = ClientCore(EARLY), Sink(), Waiter(), Waiter()
    core.subscribe("", sink)
    first, second = core.fence(one), core.fence(two)
    assert [packet[:10] for packet in first] == [b"SUB fence.", b"MSG fence.", b"UNSUB fenc"]
    key = first[1][4:-1]
    assert first == [b"SUB " + key, b"MSG " + key + b"\0", b"UNSUB " + key]
    core.receive([second[1]])
    assert (one.outcomes, two.outcomes) == ([], [b""])
    core.receive([first[1], b"MSG fence.other\0"])
    assert one.outcomes == [b""]
    assert [m.key for m in sink.messages] == [b"fence.other"]


@pytest.mark.parametrize("dialect", [CURRENT, EARLY])
def test_who_waits_when_the_connection_is_lost_is_named(dialect: Dialect) -> None:
    """Those who wait are handed out, to be told; an answer that still comes is not theirs, nor the next one's."""
    core, one, two = ClientCore(dialect), Waiter(), Waiter()
    packets = core.fence(one) + core.fence(two)
    if dialect.control:
        core.control("!/cred/whoami")
    assert core.lost() == [one, two]
    assert core.lost() == []
    core.receive([WHOAMI + b"\0x", *packets])
    assert (one.outcomes, two.outcomes) == ([], [])


@given(st.lists(st.binary(max_size=20), max_size=5))
def test_whatever_a_server_sends_is_borne(packets: list[bytes]) -> None:
    """Packets of no known kind are ignored, and never end in an exception."""
    core, sink = ClientCore(on_control=lambda key, payload: None), Sink()
    core.subscribe("", sink)
    core.receive([*packets, b"", b"MSG", b"MSG ", b"MSG a", b"CMSG", b"CMSG \0", b"SUB a", b"MSG a\0last"])
    assert sink.messages[-1] == (b"a", b"last")


def test_iterator_of_packets_is_taken_up_where_it_stands() -> None:
    """A sink that has the core receive from the same iterator gets what is behind its message, each packet once."""
    core = ClientCore()
    got: list[bytes] = []
    packets = iter([b"MSG a\0%d" % i for i in range(4)])

    class Greedy(Sink):
        def deliver(self, message: Message) -> None:
            got.append(message.payload)
            core.receive(packets)

    core.subscribe("a", Greedy())
    core.receive(packets)
    assert got == [b"0", b"1", b"2", b"3"]


def test_text_and_names() -> None:
    """Text is UTF-8, bytes are as they are; dialects have names."""
    assert (as_bytes("ö"), as_bytes(b"\xff")) == (b"\xc3\xb6", b"\xff")
    assert (find_dialect("current"), find_dialect("early")) == (CURRENT, EARLY)
    with pytest.raises(UsageError, match="say 'current' or 'early'"):
        find_dialect("latest")
