"""The client core without I/O: packets to send, and messages to each subscription, once."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbus.client import blocking
from sbus.client.arguments import as_bytes
from sbus.client.core import Batch, ClientCore, Message
from sbus.client.options import ConnectOptions
from sbus.client.senders import kind_of
from sbus.client.snapshots import LastValue
from sbus.errors import InvalidKey, PacketTooLong, UsageError, ViolationReason
from sbus.protocol.keys import CURRENT, EARLY, Dialect, find_dialect, matches
from tests.support.examples import examples
from tests.support.packets import bundle
from tests.support.strategies import PEERS, dialects, keys, may_subscribe, patterns
from tests.unit.client.fakes import Waiter

ME = PEERS[0]
WHOAMI = b"CMSG !/cred/whoami"
ON = b"CMSG bundle/on"
LONG = b"a" * 2000  # its way is looked up each time
ACTIONS = ("subscribe", "subscribe", "publish", "publish", "unsubscribe", "reconnect")


class Sink:
    """A subscription that keeps its messages."""

    pattern = b""
    callback: Any = None

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def begin(self) -> None:
        """Do nothing: no messages of others are kept."""

    def deliver(self, messages: list[Message]) -> None:
        self.messages += messages


class Calling(Sink):
    """A subscription with a callback."""

    def __init__(self, callback: Callable[[Message], Any]) -> None:
        super().__init__()
        self.callback = callback

    def begin(self) -> None:
        """Do nothing: no messages of others are kept."""

    def deliver(self, messages: list[Message]) -> None:
        for message in messages:
            self.messages.append(message)
            self.callback(message)


class PlainServer:
    """A model of the server's subscriptions, with the plain matcher as the reference."""

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


@settings(max_examples=examples(300))
@given(st.data(), dialects)
def test_each_subscription_gets_what_it_asked_for_once(data: st.DataObject, dialect: Dialect) -> None:
    """Whatever subscriptions come, go and overlap, over reconnects too, each sink gets what the matcher says."""
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
            core.disconnected()
            server = PlainServer(dialect)
            server.take(core.resync_packets())
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


def test_message_in_flight_when_its_subscription_ends() -> None:
    """A message in flight when its subscription ends does not reach other subscriptions."""
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
    """A forbidden key can be neither published nor subscribed to; the error names the rule, and no state remains."""
    core = ClientCore(dialect)
    for call in (lambda: core.publish(key, b""), lambda: core.subscribe(key, Sink())):
        with pytest.raises(InvalidKey) as raised:
            call()
        assert raised.value.reason is reason
    assert core.resync_packets() == []


def test_packets_over_the_limit_are_refused() -> None:
    """The limit holds for whole packets of every kind; a refused setting is not repeated."""
    core = ClientCore(max_packet=20)
    assert len(core.publish("k", bytes(14))) == 20
    assert core.subscribe(b"k" * 14, Sink()) == [b"SUB " + b"k" * 14]
    core.control("order/" + "o" * 9)
    resync = core.resync_packets()
    for call in (
        lambda: core.publish("k", bytes(15)),
        lambda: core.subscribe(b"k" * 15, Sink()),
        lambda: core.control("order/" + "o" * 10),
    ):
        with pytest.raises(PacketTooLong, match="21 bytes, and the limit is 20"):
            call()
    assert core.resync_packets() == resync


def test_settings_are_remembered_the_newest_of_each_kind() -> None:
    """`resync_packets` repeats the settings in force, and no other control messages."""
    core = ClientCore()
    for key in ("echo/off", "order/stack", "blocking/soft/block", "other/thing", "blocking/hard/error", "order/random"):
        assert core.control(key) == b"CMSG " + key.encode()
    assert core.control(b"echo/on", b"payload") == b"CMSG echo/on\0payload"
    assert set(core.resync_packets()) == {
        b"CMSG echo/on",
        b"CMSG order/stack",
        b"CMSG order/random",
        b"CMSG blocking/soft/block",
        b"CMSG blocking/hard/error",
    }
    assert core.resync_packets().index(b"CMSG order/stack") < core.resync_packets().index(b"CMSG order/random")
    core.control("order/queue")
    assert [packet for packet in core.resync_packets() if b"order" in packet] == [b"CMSG order/queue"]
    with pytest.raises(InvalidKey, match="contains a NUL"):
        core.control("echo/\0")


def test_early_dialect_has_no_control_messages() -> None:
    """Calls that need a control message raise in the early dialect, and leave no waiter behind."""
    core = ClientCore(EARLY)
    for call in (lambda: core.control("echo/off"), lambda: core.whoami(Waiter())):
        with pytest.raises(UsageError, match="early dialect has no control messages"):
            call()
    assert (core.resync_packets(), core.disconnected()) == ([], [])


def test_replies_complete_waiters_in_order() -> None:
    """Replies complete waiters in order; a raw question's reply and an unexpected one reach `on_control`."""
    reported: list[tuple[bytes, bytes]] = []
    core = ClientCore(on_control=lambda key, payload: reported.append((key, payload)))
    one, two, three = Waiter(), Waiter(), Waiter()
    assert core.whoami(one) == [WHOAMI]
    assert core.control("!/cred/whoami") == WHOAMI
    assert core.whoami(two) == core.fence(three) == [WHOAMI]
    core.receive([WHOAMI + b"\0" + name for name in (b"1", b"2", b"3", b"4", b"5")])
    assert [waiter.outcomes for waiter in (one, two, three)] == [[b"1"], [b"3"], [b"4"]]
    assert reported == [(b"!/cred/whoami", b"2"), (b"!/cred/whoami", b"5")]


def test_early_fence_is_a_message_to_itself() -> None:
    """An early fence comes back after everything before it; no subscription sees it, and fences do not mix."""
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
def test_loss_returns_the_waiters(dialect: Dialect) -> None:
    """`disconnected` returns the waiters; a late reply completes neither them nor later ones."""
    core, one, two = ClientCore(dialect), Waiter(), Waiter()
    packets = core.fence(one) + core.fence(two)
    if dialect.control:
        core.control("!/cred/whoami")
    assert core.disconnected() == [one, two]
    assert core.disconnected() == []
    core.receive([WHOAMI + b"\0x", *packets])
    assert (one.outcomes, two.outcomes) == ([], [])


@given(st.lists(st.binary(max_size=20), max_size=5))
def test_unknown_packets_are_ignored(packets: list[bytes]) -> None:
    """Packets of unknown kinds are ignored and never raise."""
    core, sink = ClientCore(on_control=lambda key, payload: None), Sink()
    core.subscribe("", sink)
    core.receive([*packets, b"", b"MSG", b"MSG ", b"MSG a", b"CMSG", b"CMSG \0", b"SUB a", b"MSG a\0last"])
    assert sink.messages[-1] == (b"a", b"last")


def test_nested_processing_continues_the_batch() -> None:
    """A callback that processes the same batch gets the packets after its message, each once."""
    core = ClientCore()
    got: list[bytes] = []
    batch = Batch([b"MSG a\0%d" % i for i in range(4)])
    assert len(batch) == 4

    def greedy(message: Message) -> None:
        got.append(message.payload)
        core.process(batch)

    core.subscribe("a", Calling(greedy))
    core.process(batch)
    assert got == [b"0", b"1", b"2", b"3"]
    assert (len(batch), batch.take()) == (0, [])
    batch = Batch([b"MSG b\0", bundle(b"MSG a\x001", b"MSG a\x002")])
    assert batch.take() == [b"MSG b\0", b"MSG a\x001", b"MSG a\x002"]
    core.process(batch)
    assert len(got) == 4


def test_run_of_messages_comes_as_a_list() -> None:
    """A run is delivered as one list, shared by all sinks, unless one of them has a callback."""
    core = ClientCore()
    got: list[tuple[str, list[bytes]]] = []

    class Recording(Sink):
        def begin(self) -> None:
            """Do nothing: no messages of others are kept."""

        def deliver(self, messages: list[Message]) -> None:
            got.append((self.pattern.decode(), [message.payload for message in messages]))

    for pattern in ("a", "a*", "b"):
        core.subscribe(pattern, Recording())
    core.receive([b"MSG a\0%d" % i for i in range(4)] + [b"MSG b\x00x", WHOAMI, b"MSG b\x00y"])
    core.receive([b"MSG a\0%d" % i for i in range(4)] + [b"MSG b\x00x", WHOAMI, b"MSG b\x00y", b"MSG b\x00z"])
    rest = [("a", [b"1", b"2", b"3"]), ("a*", [b"1", b"2", b"3"])]
    again = [("a", [b"0", b"1", b"2", b"3"]), ("a*", [b"0", b"1", b"2", b"3"])]
    first = [("a", [b"0"]), ("a*", [b"0"]), *rest, ("b", [b"x"]), ("b", [b"y"])]  # a key that is new comes alone
    assert got == [*first, *again, ("b", [b"x"]), ("b", [b"y", b"z"])]
    got.clear()
    core.subscribe("b", Calling(lambda message: got.append(("called", [message.payload]))))
    core.receive([b"MSG b\x000", b"MSG b\x001"])
    assert got == [("b", [b"0"]), ("called", [b"0"]), ("b", [b"1"]), ("called", [b"1"])]


def test_callback_may_change_where_the_next_message_goes() -> None:
    """A subscription that a callback makes gets the later messages, and one that it ends does not."""
    core, new = ClientCore(), Sink()

    def swap(message: Message) -> None:
        if message.payload == b"1":
            core.subscribe("a", new)
        if message.payload == b"3":
            core.unsubscribe(first)

    first = Calling(swap)
    core.subscribe("a", first)
    core.receive([b"MSG a\x00warm"])
    core.receive([bundle(*[b"MSG a\0%d" % i for i in range(6)])])
    assert [m.payload for m in first.messages] == [b"warm", b"0", b"1", b"2", b"3"]
    assert [m.payload for m in new.messages] == [b"2", b"3", b"4", b"5"]


@pytest.fixture
def reading_bus() -> Iterator[tuple[blocking.Bus, socket.socket]]:
    """A blocking client, and the server's end of its socket."""
    ours, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, server, blocking.Bus("/fake", ConnectOptions(bundles=False)) as bus:
        ours.setblocking(False)
        bus._attach(ours)
        yield bus, server


@pytest.mark.parametrize("key", [b"a", b"!/cred/1//3/x", LONG, b"!/cred/1//3/" + LONG])
def test_callback_that_reads_on_reorders_nothing(reading_bus: tuple[blocking.Bus, socket.socket], key: bytes) -> None:
    """Other sinks get the callback's message before those that the callback reads."""
    bus, server = reading_bus
    got: list[bytes] = []

    def callback(message: Message) -> None:
        got.append(message.payload)
        if message.payload == b"1":
            server.send(WHOAMI + b"\0me")
            bus.fence(10)

    bus.subscribe(key, callback)
    behind = bus.subscribe(key)
    behind._claim()
    for i in range(4):
        server.send(b"MSG %b\0%d" % (key, i))
    assert [behind.get(10).payload for _ in range(4)] == [b"0", b"1", b"2", b"3"]
    assert got == [b"0", b"1", b"2", b"3"]


@pytest.mark.parametrize("key", [b"a", LONG])
def test_callback_that_reads_on_doubles_nothing(reading_bus: tuple[blocking.Bus, socket.socket], key: bytes) -> None:
    """The bus yields a message once, although subscriptions before and after the callback match it."""
    bus, server = reading_bus

    def callback(message: Message) -> None:
        if message.payload == b"1":
            server.send(WHOAMI + b"\0me")
            bus.fence(10)

    bus.subscribe(key)
    bus.subscribe(key, callback)
    bus.subscribe(key)
    for i in range(4):
        server.send(b"MSG %b\0%d" % (key, i))
    messages = iter(bus)
    assert [next(messages).payload for _ in range(4)] == [b"0", b"1", b"2", b"3"]
    server.send(b"MSG %b\0last" % key)
    assert next(messages).payload == b"last"


@given(st.data())
def test_however_packets_are_bundled_each_comes_once_in_order(data: st.DataObject) -> None:
    """Messages and replies count alike in plain packets and in bundles of any size."""
    core, sinks, waiters = ClientCore(), [Sink(), Sink(), Calling(lambda message: None)], []
    for pattern, sink in zip(("a", "a*", "b"), sinks, strict=True):
        core.subscribe(pattern, sink)
    keys = data.draw(st.lists(st.sampled_from([b"a", b"b", b"ab", b"c", b"?"]), max_size=30))
    packets = [WHOAMI + b"\0%d" % i if key == b"?" else b"MSG %b\0%d" % (key, i) for i, key in enumerate(keys)]
    for key in keys:
        if key == b"?":
            waiters.append(Waiter())
            core.whoami(waiters[-1])
    while packets:
        batch: list[bytes] = []
        for size, together in data.draw(st.lists(st.tuples(st.integers(1, 7), st.booleans()), min_size=1, max_size=4)):
            some, packets = packets[:size], packets[size:]
            batch += [bundle(*some)] if some and together else some
        core.receive(batch)
    for sink, wanted in zip(sinks, ((b"a",), (b"a", b"ab"), (b"b",)), strict=True):
        assert [int(m.payload) for m in sink.messages] == [i for i, key in enumerate(keys) if key in wanted]
    assert [waiter.outcomes for waiter in waiters] == [[b"%d" % i] for i, key in enumerate(keys) if key == b"?"]


def test_bundles_are_asked_for_on_each_connection() -> None:
    """The question is the first resync packet; the reply holds until the connection is lost."""
    reported: list[tuple[bytes, bytes]] = []
    core = ClientCore(bundles=True, on_control=lambda *control: reported.append(control))
    core.control("echo/off")
    core.subscribe("a", Sink())
    for _ in range(2):
        assert core.resync_packets() == [ON, b"CMSG echo/off", b"SUB a"]
        assert core.bundle_limit == 0
        core.connected(1_000_000)
        core.receive([bundle(ON + b"\x0065536", WHOAMI)])
        assert core.bundle_limit == 65_536
        core.disconnected()
    core.connected(50_000)
    core.receive([ON + b"\x0065536"])
    assert core.bundle_limit == 50_000
    assert [key for key, _ in reported] == [b"!/cred/whoami"] * 2


@pytest.mark.parametrize("payload", [b"", b"x", b"-1", b"65536 ", b"9" * 5000, "٣".encode()])
def test_answer_that_is_none_is_not_ours(payload: bytes) -> None:
    """A malformed reply enables no bundles, and reaches `on_control`."""
    reported: list[tuple[bytes, bytes]] = []
    core = ClientCore(bundles=True, on_control=lambda *control: reported.append(control))
    core.receive([ON + b"\0" + payload])
    assert (core.bundle_limit, reported) == (0, [(b"bundle/on", payload)])


def test_bundles_that_were_not_asked_for() -> None:
    """The early dialect and bundles=False do not ask for bundles; an unexpected reply enables none."""
    assert ClientCore(EARLY, bundles=True).resync_packets() == []
    core = ClientCore()
    assert core.resync_packets() == []
    core.receive([ON + b"\x0065536"])
    assert core.bundle_limit == 0
    for key in ("bundle/on", "bundle/off"):
        with pytest.raises(UsageError, match="connect with bundles=True, or bundles=False"):
            core.control(key)


@given(st.lists(st.tuples(keys(CURRENT) | st.text(max_size=5), st.binary(max_size=30)), max_size=20))
def test_many_are_published_as_one_by_one(messages: list[tuple[bytes | str, bytes]]) -> None:
    """`publish_many` gives the packets, or the error, of single calls, from any iterable."""
    core = ClientCore(max_packet=25)

    def outcome(publish: Any) -> Any:
        try:
            return publish()
        except (InvalidKey, PacketTooLong) as error:
            return type(error), str(error)

    expected = outcome(lambda: [core.publish(key, payload) for key, payload in messages])
    assert outcome(lambda: core.publish_many(messages)) == expected
    assert outcome(lambda: core.publish_many(iter(messages))) == expected


def test_messages_of_odd_types_are_published_alike() -> None:
    """Lists serve as tuples, and other buffers as bytes."""
    core = ClientCore()
    odd: Any = [["a", b"1"], ("b", bytearray(b"2")), ("c", memoryview(b"3")), Message(b"d", b"4")]
    assert core.publish_many(odd) == [b"MSG a\x001", b"MSG b\x002", b"MSG c\x003", b"MSG d\x004"]
    for wrong in ([("a",)], [("a", b"", b"")], [1], [("a", "text")], [(1, b"")]):
        with pytest.raises(UsageError):
            core.publish_many(cast(Any, wrong))


def test_text_and_names() -> None:
    """Text is encoded as UTF-8, bytes are unchanged, and dialects are found by name."""
    assert (as_bytes("ö"), as_bytes(b"\xff")) == (b"\xc3\xb6", b"\xff")
    assert (find_dialect("current"), find_dialect("early")) == (CURRENT, EARLY)
    with pytest.raises(UsageError, match="use 'current' or 'early'"):
        find_dialect("latest")


def test_secret_patterns_with_old_ids_are_not_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a fork, a pattern with the old PID is not subscribed to again; one without it is."""
    core = ClientCore()
    old, own, open_ = Sink(), Sink(), Sink()
    core.subscribe(b"!/cred///%d/letters" % os.getpid(), old)
    core.subscribe("!/cred////letters", own)
    core.subscribe("open", open_)
    core.connected(1000)
    assert len(core.resync_packets()) == 3
    child = os.getpid() + 1
    monkeypatch.setattr(os, "getpid", lambda: child)
    for _ in range(2):
        core.disconnected()
        assert core.resync_packets() == [b"SUB !/cred////letters", b"SUB open"]
        core.connected(1000)
    assert list(core.sinks()) == [own, open_]


@pytest.mark.parametrize("key", [b"!/x", b"k\0x"])
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_keys_are_checked_in_every_buffer_type(kind: Any, key: bytes) -> None:
    """Keys in any buffer type are checked."""
    core = ClientCore()
    with pytest.raises(InvalidKey):
        core.publish(kind(key), b"")
    assert core.publish(kind(b"k"), b"x") == b"MSG k\0x"


def test_pattern_that_can_be_subscribed_to_can_be_given_back() -> None:
    """A pattern must fit UNSUB, which is longer than SUB."""
    core, sink = ClientCore(max_packet=100), Sink()
    for size in (95, 96):
        with pytest.raises(PacketTooLong):
            core.subscribe(b"k" * size, sink)
    assert core.subscribe(b"k" * 94, sink) == [b"SUB " + b"k" * 94]
    assert [len(packet) for packet in core.unsubscribe(sink)] == [100]


@pytest.mark.parametrize("many", [False, True], ids=["publish", "publish_many"])
@pytest.mark.parametrize(
    ("key", "payload", "message"),
    [
        (None, b"", r"a routing key is str or bytes, not NoneType"),
        (7, b"", r"a routing key is str or bytes, not int"),
        ("\udc80", b"", r"the routing key '\\udc80' is text that UTF-8 cannot encode"),
        ("k", "text", r"a payload is bytes, not str: encode it"),
        ("k", None, r"a payload is bytes, not NoneType"),
        ("k", 7, r"a payload is bytes, not int"),
        (b"!/cred/1/2/3/x", "text", r"a payload is bytes, not str"),
    ],
)
def test_wrong_types_are_named(key: Any, payload: Any, message: str, many: bool) -> None:
    """A key or a payload of a wrong type is an error that says what it should be, and nothing is published."""
    core = ClientCore()
    call = (
        (lambda: core.publish_many([("first", b"x"), (key, payload)])) if many else lambda: core.publish(key, payload)
    )
    with pytest.raises(UsageError, match=message):
        call()


def test_messages_are_pairs() -> None:
    """Something else than pairs is named by `publish_many`."""
    for wrong in (None, b"key", ("k", b"p", 1)):
        with pytest.raises(UsageError, match=r"a message to publish is a pair \(key, payload\), not "):
            ClientCore().publish_many([cast(Any, wrong)])


def test_payloads_may_be_any_buffer() -> None:
    """Payloads of the type bytearray or memoryview are published, and so is an empty key."""
    messages: list[Any] = [("", bytearray(b"a")), (b"k", memoryview(b"b"))]
    packets = ClientCore().publish_many(messages)
    assert packets == [b"MSG \0a", b"MSG k\0b"]


def test_patterns_of_a_wrong_type_are_named() -> None:
    """A pattern is text or bytes."""
    with pytest.raises(InvalidKey, match="a pattern is str or bytes, not NoneType"):
        ClientCore().subscribe(cast(Any, None), Sink())


def test_a_message_in_one_line() -> None:
    """It shows key, payload, and what else is known; a long payload is cut, with its length."""
    assert repr(Message(b"k", b"21.5\n")) == str(Message(b"k", b"21.5\n")) == r"Message(key=b'k', payload=b'21.5\n')"
    long = repr(Message(b"k", bytes(400_000)))
    assert len(long) < 1000
    assert long.endswith("... (400,000 bytes))")
    sent = kind_of(b"7 !/cred/1/2/3")(b"k", b"")
    assert repr(sent) == "Message(key=b'k', payload=b'', sender=!/cred/1/2/3)"
    value = LastValue(b"k", b"")
    assert repr(value) == "LastValue(key=b'k', payload=b'', is_last_value=True)"


def test_a_coroutine_function_is_no_callback() -> None:
    """Nobody would await its coroutines; the error says so, and nothing is subscribed to."""
    core = ClientCore()

    async def callback(message: Message) -> None:
        """Never run."""

    with pytest.raises(UsageError, match="a callback is an ordinary function"):
        core.subscribe("a", Calling(callback), sender=True)
    assert not list(core.sinks())
    assert core.state() == ClientCore().state()


def test_snapshots_are_expected_in_the_order_in_which_they_are_asked_for() -> None:
    """Also after a reconnect, if a pattern was subscribed to without last values first."""
    core = ClientCore()
    plain, other, last = Sink(), Sink(), Sink()
    core.subscribe("a/", plain)
    core.subscribe("b/", other, last=True)
    core.subscribe("a/", last, last=True)
    core.disconnected()
    asked = [packet for packet in core.resync_packets() if packet.startswith(b"CMSG last\0")]
    core.connected(1 << 20)
    name = b"CMSG !/cred/whoami\0!/cred/1/2/3"
    for request in asked:
        pattern = request.partition(b"\0")[2]
        core.receive([b"CMSG bye/on\0", b"MSG %bx\0value" % pattern, b"CMSG last/done\0" + pattern, name])
    assert [[(m.key, m.is_last_value) for m in sink.messages] for sink in (plain, other, last)] == [
        [],
        [(b"b/x", True)],
        [(b"a/x", True)],
    ]
