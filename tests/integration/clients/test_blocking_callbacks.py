"""What callbacks of a blocking client raise reaches the caller, whatever it is."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from socket import MSG_DONTWAIT
from typing import Any

import pytest

import sbus
from sbus.client import blocking
from sbus.client.blocking.callbacks import DEEPEST
from sbus.client.connecting import Backoff
from sbus.client.losses import Lost
from sbus.client.outbox import Outbox
from sbus.errors import Closed, ConnectionLost, Disconnected, RequestFailed, SbusError, TimedOut
from sbus.protocol.bundles import pack
from sbus.routing import trie
from sbus.routing.cache import RouteCache
from sbus.routing.trie import PatternIndex
from sbus.syscalls.polling import is_readable
from tests.integration.clients.fake_servers import FakeServer
from tests.support.harness import TIMEOUT, Bus
from tests.support.servers import StartBus

WHOAMI = b"CMSG !/cred/whoami"
ERRORS = [
    TimedOut("a callback's"),
    Closed("a callback's"),
    ConnectionLost("a callback's"),
    RequestFailed("a callback's"),
]


def verify_oneself(client: blocking.Bus) -> bool:
    with sbus.connect(client.address) as peer:
        return client.verify(peer.whoami(), TIMEOUT)


CALLS: dict[str, Callable[[blocking.Bus], object]] = {
    "receive": lambda client: client.receive(TIMEOUT),
    "receive, not waiting": lambda client: client.receive(flags=MSG_DONTWAIT),
    "get_many": lambda client: client.get_many(TIMEOUT),
    "get_ready": lambda client: client.get_ready(),
    "iter": lambda client: list(client),
    "fence": lambda client: client.fence(TIMEOUT),
    "whoami": lambda client: client.whoami(TIMEOUT),
    "verify": verify_oneself,
    "enqueue": lambda client: client.enqueue("none", "k", timeout=TIMEOUT),
    "sub.get": lambda client: client.subscribe("never").get(TIMEOUT),
    "sub.get_ready": lambda client: client.subscribe("never").get_ready(),
    "sub.iter": lambda client: list(client.subscribe("never")),
    "watch.iter": lambda client: list(client.watch_subscribers("never")),
    "work.iter": lambda client: list(client.work("none")),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_of_callbacks_reach_the_caller(
    client: blocking.Bus, error: SbusError, call: Callable[[blocking.Bus], object]
) -> None:
    """A callback's error is raised as it is, and the client takes it for none of its own."""

    def callback(message: sbus.Message) -> None:
        raise error

    client.subscribe("k", callback)
    with sbus.connect(client.address) as other:
        client.fence()
        other.publish("k")
        assert is_readable(client, TIMEOUT)
    with pytest.raises(type(error)) as raised:
        call(client)
    assert raised.value is error
    client.fence(TIMEOUT)
    assert client.get_ready() == []


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_of_a_new_connection_reach_the_caller(bus: StartBus, error: SbusError) -> None:
    """What ``on_gap`` or ``on_lost`` raises comes from the call that reconnects, as it is."""

    def on_gap(reason: Exception) -> None:
        raise error

    def on_lost(lost: Lost) -> None:
        raise error

    calls: list[Callable[[blocking.Bus], Any]] = [
        lambda client: client.publish("k", timeout=TIMEOUT),
        lambda client: client.publish("k"),
        lambda client: client.fence(TIMEOUT),
        list,
    ]
    server = bus()
    for call in calls:
        for callback in ({"on_gap": on_gap}, {"on_lost": on_lost}):
            with sbus.connect(str(server.address), reconnect=Backoff(longest=0.05), **callback) as client:
                client.subscribe("k", lambda message: None)
                client.fence()
                server.kill(signal.SIGKILL)
                server.wait()
                with pytest.raises(Disconnected):
                    client.fence()
                server = bus("--reuse")
                with pytest.raises(type(error)) as raised:
                    call(client)
                assert raised.value is error
                client.fence(TIMEOUT)


def test_callback_that_closes_the_bus_ends_its_loop(client: blocking.Bus) -> None:
    """A callback that closes the bus, and uses it nevertheless, ends a loop over the bus."""

    def callback(message: sbus.Message) -> None:
        client.close()
        client.publish("k")

    client.subscribe("k", callback)
    client.publish("k")
    assert list(client) == []
    assert list(client) == []


def test_what_callbacks_publish_keeps_its_order(bus: StartBus) -> None:
    """Messages of all sizes that ``on_lost`` publishes while the client reconnects arrive in their order."""
    got: list[bytes] = []
    connection: blocking.Bus

    def on_lost(lost: Lost) -> None:
        connection.publish("k/1", bytes(1_000_000))
        connection.publish("k/2", bytes(40_000))
        connection.publish("k/3")

    server = bus()
    options: Any = {"reconnect": Backoff(longest=0.05), "payloads": True, "on_lost": on_lost}
    with sbus.connect(str(server.address), **options) as connection:
        connection.subscribe("k/", lambda message: got.append(message.key))
        connection.fence()
        server.kill(signal.SIGKILL)
        server.wait()
        with pytest.raises(Disconnected):
            connection.fence()
        bus("--reuse")
        connection.fence(TIMEOUT)
        assert not connection.outbox.packets
        connection.fence(TIMEOUT)
    assert got == [b"k/1", b"k/2", b"k/3"]


@pytest.mark.parametrize("asks", ["fence", "a service of this connection"])
def test_callbacks_that_read_when_many_messages_have_come(client: blocking.Bus, shared: Bus, asks: str) -> None:
    """They begin in order and all of them end, however many messages came together."""
    begun: list[bytes] = []
    ended: list[bytes] = []

    def ask(message: sbus.Message) -> None:
        begun.append(message.payload)
        if asks == "fence":
            client.fence(TIMEOUT)
        else:
            assert client.request("double", message.payload, TIMEOUT) == message.payload * 2
        ended.append(message.payload)

    client.respond("double", lambda request: request.payload * 2)
    client.subscribe("many", ask)
    client.fence(TIMEOUT)
    expected = [b"%d" % number for number in range(300 if asks == "fence" else 16)]
    with sbus.connect(str(shared.address)) as publisher:
        publisher.publish_many([("many", payload) for payload in expected])
        publisher.fence(TIMEOUT)
    client.fence(TIMEOUT)
    assert begun == expected
    assert sorted(ended) == sorted(expected)


def test_question_after_an_error_that_interrupted_reconnecting(directory: Path) -> None:
    """What is asked after a callback has raised in the last batch of a reconnect is sent, and answered."""

    def callback(message: sbus.Message) -> None:
        raise ZeroDivisionError

    def serve() -> None:
        peer = server.accept_now()
        while peer.receive_now() != WHOAMI:
            pass
        peer.send(*pack([b"MSG k\0", WHOAMI + b"\0!/cred/1/2/3"], 65_536, 1)[0])
        if peer.receive_now() == WHOAMI:
            peer.send(WHOAMI + b"\0!/cred/4/5/6")

    with (
        FakeServer(directory / "fake") as server,
        sbus.connect(str(server.address), reconnect=Backoff(longest=0.05)) as client,
    ):
        client.subscribe("k", callback)
        server.accept_now().close()
        with pytest.raises(Disconnected):
            client.fence(TIMEOUT)
        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(ZeroDivisionError):
            client.receive(TIMEOUT)
        assert client.whoami(TIMEOUT) == b"!/cred/4/5/6"
        thread.join(TIMEOUT)


class InterruptedReader:
    """The reader of a client, interrupted by a signal's handler once it has taken packets from the socket."""

    def __init__(self, client: blocking.Bus, error: type[BaseException]) -> None:
        self._client = client
        self._error = error
        self._reader = client._reader
        client._reader = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def read(self, sock: Any, *limit: int) -> tuple[list[bytes], bool]:
        packets, _ = self._reader.read(sock, *limit)
        if packets:
            self._client._reader = self._reader
            raise self._error
        return packets, False


@pytest.mark.parametrize("reconnect", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_interrupted_read_ends_the_connection(shared: Bus, reconnect: bool, error: type[BaseException]) -> None:
    """The answer that it may have lost would be taken from the next question, and from each one after it."""
    with sbus.connect(str(shared.address), reconnect=reconnect) as client:
        client.fence(TIMEOUT)
        InterruptedReader(client, error)
        with pytest.raises(error):
            client.fence(TIMEOUT)
        if reconnect:
            assert client.whoami(TIMEOUT).startswith(b"!/cred/")
        else:
            with pytest.raises(ConnectionLost, match="a signal handler's exception interrupted the client"):
                client.fence(TIMEOUT)


@pytest.mark.parametrize("method", ["extend", "ack"])
@pytest.mark.parametrize("reconnect", [False, True])
@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.whoami(TIMEOUT),
        lambda client: client.has_subscribers("k", TIMEOUT),
        lambda client: client.watch_subscribers("k").get(TIMEOUT),
        lambda client: client.subscribe("k", last=True).get_ready(),
    ],
    ids=["whoami", "has_subscribers", "watch", "last"],
)
def test_an_interrupted_question_ends_the_connection(
    shared: Bus, monkeypatch: pytest.MonkeyPatch, ask: Callable[[blocking.Bus], object], reconnect: bool, method: str
) -> None:
    """If a signal handler raises before a question is in the outbox, or as it leaves, no question gets the answer to
    another one.
    """

    def interrupted(outbox: Outbox, packets: list[bytes], *_: int) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    with sbus.connect(str(shared.address), reconnect=reconnect) as client:
        client.fence(TIMEOUT)
        monkeypatch.setattr(Outbox, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            ask(client)
        if reconnect:
            ask(client)
            assert client.whoami(TIMEOUT).startswith(b"!/cred/")
        else:
            with pytest.raises(ConnectionLost, match="a signal handler's exception interrupted the client"):
                ask(client)


@pytest.mark.parametrize("reconnect", [False, True])
@pytest.mark.parametrize(
    ("place", "name"),
    [(PatternIndex, "subscribe"), (trie, "sorted"), (RouteCache, "forget"), (Outbox, "extend")],
    ids=["index", "trie", "cache", "outbox"],
)
def test_an_interrupted_subscription_is_forgotten(
    shared: Bus, monkeypatch: pytest.MonkeyPatch, place: Any, name: str, reconnect: bool
) -> None:
    """If a signal handler raises in the midst of `subscribe`, a later subscription to the same pattern gets messages
    nevertheless, and nobody gets those of the first one.
    """

    def interrupted(*_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    with sbus.connect(str(shared.address), reconnect=reconnect) as client:
        client.fence(TIMEOUT)
        monkeypatch.setattr(place, name, interrupted, raising=False)
        with pytest.raises(KeyboardInterrupt):
            client.subscribe("k*")
        if not reconnect:
            with pytest.raises(ConnectionLost, match="a signal handler's exception interrupted the client"):
                client.subscribe("k*")
            return
        with client.subscribe("k*") as sub:
            client.publish("key", b"1")
            assert sub.get(TIMEOUT).payload == b"1"
        client.publish("key", b"2")
        client.fence(TIMEOUT)
        assert client.get_ready() == []


@pytest.mark.parametrize("place", [PatternIndex, RouteCache], ids=["index", "cache"])
def test_an_interrupted_end_of_a_subscription(shared: Bus, monkeypatch: pytest.MonkeyPatch, place: type[Any]) -> None:
    """If a signal handler raises in the midst of `close`, others get all messages nevertheless."""

    def interrupted(*_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    with sbus.connect(str(shared.address), reconnect=True) as client:
        other, sub = client.subscribe("k/"), client.subscribe("k/*")
        client.publish("k/1")
        assert other.get(TIMEOUT).key == sub.get(TIMEOUT).key == b"k/1"
        monkeypatch.setattr(place, "unsubscribe" if place is PatternIndex else "forget", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sub.close()
        with client.subscribe("k/*") as again:
            client.publish("k/1")
            assert other.get(TIMEOUT).key == again.get(TIMEOUT).key == b"k/1"
        with sbus.connect(str(shared.address)) as asking:
            assert asking.has_subscribers("k/1")
        other.close()
        client.fence(TIMEOUT)
        with sbus.connect(str(shared.address)) as asking:
            assert not asking.has_subscribers("k/1")


def test_an_interrupted_end_of_a_secret_subscription(shared: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a signal handler raises in the midst of `close`, the other subscription still gets its messages."""

    def interrupted(*_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    with sbus.connect(str(shared.address), reconnect=True) as client:
        other, sub = client.subscribe("!/cred////s/"), client.subscribe("!/cred////s/a")
        client.fence(TIMEOUT)
        monkeypatch.setattr(RouteCache, "clear", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sub.close()
        client.fence(TIMEOUT)
        client.publish("!/cred////s/a", b"1")
        assert other.get(TIMEOUT).payload == b"1"


def test_an_interrupted_end_can_be_repeated(shared: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a signal handler raises before `close` has changed anything, a second call ends the subscription."""

    def interrupted(*_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    with sbus.connect(str(shared.address)) as client, sbus.connect(str(shared.address)) as other:
        sub = client.subscribe("k")
        client.fence(TIMEOUT)
        monkeypatch.setattr(blocking.Bus, "_check_whole", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sub.close()
        sub.close()
        client.fence(TIMEOUT)
        assert not other.has_subscribers("k")


def test_an_interrupted_end_of_a_watch(shared: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a signal handler raises before `close` has notified the server, no more reports on the key arrive."""

    def interrupted(*_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    reported: list[bytes] = []
    with sbus.connect(str(shared.address), reconnect=True) as client, sbus.connect(str(shared.address)) as other:
        watch = client.watch_subscribers("k")
        assert not watch.get(TIMEOUT)
        monkeypatch.setattr(Outbox, "extend", interrupted)
        with pytest.raises(KeyboardInterrupt):
            watch.close()
        monkeypatch.setattr(client.core.extensions.watches, "report", lambda key, _: reported.append(key))
        client.fence(TIMEOUT)
        other.subscribe("k")
        other.fence(TIMEOUT)
        client.fence(TIMEOUT)
        assert not reported


def test_an_interrupted_loss_is_noticed_again(bus: StartBus, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a signal handler raises while a client prepares for its next connection, the next call does so again."""

    def interrupted(*_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    server = bus()
    with sbus.connect(str(server.address), reconnect=True) as client:
        sub = client.subscribe("k")
        client.fence(TIMEOUT)
        server.stop()
        bus("--reuse")
        monkeypatch.setattr(PatternIndex, "subscribe", interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.publish("k", b"lost")
        client.fence(TIMEOUT)
        client.publish("k", b"new")
        assert sub.get(TIMEOUT).payload == b"new"


def test_an_interrupted_callback_does_no_harm(client: blocking.Bus, shared: Bus) -> None:
    """The connection stays, also if the callback was called inside of another one."""
    raised: list[bytes] = []

    def interrupted(message: sbus.Message) -> None:
        if message.payload == b"outer":
            client.fence(TIMEOUT)
        elif not raised:
            raised.append(message.payload)
            raise KeyboardInterrupt

    client.subscribe("k", interrupted)
    client.fence(TIMEOUT)
    with sbus.connect(str(shared.address)) as publisher:
        publisher.publish_many([("k", b"outer"), ("k", b"inner"), ("k", b"last")])
        assert is_readable(client.socket, TIMEOUT)
    with pytest.raises(KeyboardInterrupt):
        client.fence(TIMEOUT)
    assert raised == [b"inner"]
    client.fence(TIMEOUT)
    assert client.state == "connected"


def test_a_closed_subscription_gets_no_callback_that_has_waited(client: blocking.Bus, shared: Bus) -> None:
    """Also not if the callback had to wait for others to return."""
    got: list[bytes] = []

    def ask(message: sbus.Message) -> None:
        got.append(message.payload)
        client.fence(TIMEOUT)
        sub.close()

    sub = client.subscribe("many", ask)
    client.fence(TIMEOUT)
    with sbus.connect(str(shared.address)) as publisher:
        publisher.publish_many([("many", b"%d" % number) for number in range(DEEPEST + 20)])
        publisher.fence(TIMEOUT)
    client.fence(TIMEOUT)
    assert got == [b"%d" % number for number in range(DEEPEST)]


def test_a_callback_may_ask_while_the_client_reconnects(bus: StartBus) -> None:
    """Its question is sent at once, on the connection that is not ready yet."""
    server = bus()
    answers: list[bytes] = []
    connection: blocking.Bus

    def on_lost(lost: Lost) -> None:
        answers.append(connection.whoami(TIMEOUT))

    with sbus.connect(str(server.address), reconnect=Backoff(longest=0.05), on_lost=on_lost) as client:
        connection = client
        client.subscribe("k", lambda message: None)
        client.fence(TIMEOUT)
        server.kill(signal.SIGKILL)
        server.wait()
        with pytest.raises(Disconnected):
            client.fence(TIMEOUT)
        bus("--reuse")
        client.fence(TIMEOUT)
        assert len(answers) == 1
