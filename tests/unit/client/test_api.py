"""Requests, answers, private keys and proofs, on a backend that only writes down what it is to send."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from sbus.client.api import Inbox, Request, inbox_key
from sbus.client.arguments import as_bytes
from sbus.client.connecting import check_address
from sbus.client.core import ClientCore, Message
from sbus.client.denials import Denial
from sbus.client.queues import check_queue
from sbus.errors import Disconnected, InvalidKey, NotAllowed, PacketTooLong, RequestFailed, UsageError, ViolationReason
from sbus.protocol.keys import CURRENT, EARLY, Dialect, find_dialect
from tests.unit.client.fakes import WithoutCalls
from tests.unit.client.sessions import Waiter

WHOAMI = b"CMSG !/cred/whoami"
ME = b"!/cred/1/2/3"
CHAINED = b"!/cred/1/2/3/!/cred/4/5/6"


class Sub:
    """A subscription that keeps its messages, or hands them to a callback."""

    pattern = b""

    def __init__(self, callback: Callable[[Message], Any] | None) -> None:
        self.messages: list[Message] = []
        self.callback = callback

    def begin(self) -> None:
        """Do nothing: no messages of others are kept."""

    def deliver(self, messages: list[Message]) -> None:
        for message in messages:
            (self.callback or self.messages.append)(message)


class Backend(WithoutCalls[Sub]):
    """The client API without a connection.

    :ivar sent: the packets sent since the last `take`.
    :ivar denials: what nobody else was told.
    """

    def __init__(self, dialect: Dialect = CURRENT, max_packet: int = 10_000) -> None:
        super().__init__()
        self.core = ClientCore(dialect, max_packet, on_denied=self._denied, refuse=self._refused)
        self.core.resync_packets()
        self.sent: list[bytes] = []
        self.denials: list[Denial] = []

    def send(self, packets: list[bytes]) -> None:
        self.sent += packets

    def waiter(self) -> Waiter:
        return Waiter()

    def subscribe(self, pattern: bytes | str, callback: Callable[[Message], Any] | None = None, **options: bool) -> Sub:
        sub = Sub(callback)
        self.send(self.core.subscribe(pattern, sub, **options))
        return sub

    def _denied(self, denial: Denial) -> None:
        self.denials.append(denial)

    def _refuse(self, subscription: Sub, error: NotAllowed) -> bool:
        self.send(self.core.unsubscribe(subscription))
        return subscription.callback is None

    def take(self) -> list[bytes]:
        sent, self.sent = self.sent, []
        return sent


class Running:
    """A running call; `result` is its value or its exception, once it is done."""

    def __init__(self, call: Coroutine[Any, None, Any]) -> None:
        self._call = call
        self.result: Any = None
        self.is_done = False
        self.resume()

    def resume(self) -> Running:
        try:
            self._call.send(None)
            return self
        except StopIteration as end:
            self.result = end.value
        except Exception as error:
            self.result = error
        self.is_done = True
        return self


def started(call: Coroutine[Any, None, Any], backend: Backend, me: bytes = ME) -> Running:
    """Start a call, and answer its ``whoami``; one that keeps the name asks for its changes as well."""
    running = Running(call)
    assert backend.take() in ([WHOAMI], [b"CMSG chain/on", WHOAMI])
    backend.core.receive([WHOAMI + b"\0" + me])
    return running.resume()


def reply_to(packet: bytes) -> bytes:
    """Return the reply key of a request's packet."""
    return packet.split(b"\0")[1]


@pytest.mark.parametrize("me", [ME, CHAINED])
def test_request_asks_for_an_answer_to_a_private_key(me: bytes) -> None:
    """The first request asks for the name and subscribes to replies; each has a random reply key of its own."""
    backend = Backend()
    first = started(backend._request("ask/me", b"x\0y"), backend, me)
    subscription, packet, *questions = backend.take()
    assert questions == [b"CMSG probe\0ask/me", WHOAMI]
    assert subscription == b"SUB " + me + b"/sbus/reply/*"
    key, to, payload = packet.split(b"\0", 2)
    assert (key, payload) == (b"MSG ask/me", b"x\0y")
    prefix, _, token = to.rpartition(b"/")
    assert (prefix, len(bytes.fromhex(token.decode()))) == (me + b"/sbus/reply", 16)
    second = Running(backend._request(b"ask/me", b""))
    packet, *questions = backend.take()
    assert questions == [b"CMSG probe\0ask/me", WHOAMI]
    assert reply_to(packet) != to
    backend.core.receive([b"MSG %b\0+two" % reply_to(packet), b"MSG %b\0-no" % to, b"MSG %b\0+late" % to])
    assert second.resume().result == b"two"
    assert isinstance(first.resume().result, RequestFailed)
    assert str(first.result) == "no"
    assert backend._requests == {}


def test_a_request_goes_by_the_newest_name() -> None:
    """After the server has reported another name, requests ask for replies to that one; replies to the name before are
    taken, too, and those to older ones are not subscribed to any more. The application does not see it."""
    backend, seen = Backend(), []
    backend.core.extensions.answered.add("probe")
    backend.core.on_control = lambda key, payload: seen.append(key)
    names = [b"!/cred/1/2/%d/!/cred/4/5/6" % number for number in (7, 8, 9)]
    requests, replies = [], []
    for at, name in enumerate(names):
        if at:
            backend.core.receive([b"CMSG chain\0" + name])
        requests.append(started(backend._request("k", b""), backend, name))
        subscription, *more, packet = [p for p in backend.take() if not p.startswith(b"CMSG")]
        assert subscription == b"SUB %b/sbus/reply/*" % name
        assert more == ([b"UNSUB %b/sbus/reply/*" % names[0]] if at == 2 else [])
        assert reply_to(packet).startswith(name)
        replies.append(reply_to(packet))
    backend.core.receive([b"MSG %b\0+late" % reply for reply in replies])
    assert [request.resume().result for request in requests[1:]] == [b"late", b"late"]
    assert not requests[0].is_done
    backend.core.receive([b"CMSG chain/on\0"])
    assert seen == []
    backend.control("chain/on")
    backend.core.receive([b"CMSG chain/on\0", b"CMSG chain\0" + ME])
    assert seen == [b"chain/on", b"chain"]


def test_a_name_that_changes_while_it_is_asked_for() -> None:
    """A name that the server has replaced before the call could go on is asked for again."""
    backend = Backend()
    running = Running(backend._request("k", b""))
    backend.take()
    backend.core.receive([WHOAMI + b"\0" + ME, b"CMSG chain\0" + CHAINED])
    running.resume()
    assert backend.take() == [b"CMSG chain/on", WHOAMI]
    backend.core.receive([WHOAMI + b"\0" + CHAINED])
    running.resume()
    assert backend.take()[0] == b"SUB %b/sbus/reply/*" % CHAINED


def test_replies_without_a_request_are_ignored() -> None:
    """A reply to a request that is over, or was never made, is ignored."""
    backend = Backend()
    running = started(backend._request("k", b""), backend)
    to = reply_to(backend.take()[1])
    running._call.close()
    assert backend._requests == {}
    backend.core.receive([b"MSG %b\0+x" % to, b"MSG " + ME + b"/sbus/reply/guess\0+x"])


@pytest.mark.parametrize(("key", "payload", "error"), [("!", b"", InvalidKey), ("k", bytes(10_000), PacketTooLong)])
def test_request_that_cannot_be_sent_is_forgotten(key: str, payload: bytes, error: type[Exception]) -> None:
    """A request that cannot be sent leaves no waiter behind."""
    backend = Backend()
    assert isinstance(started(backend._request(key, payload), backend).result, error)
    assert backend._requests == {}


def test_lost_connection_is_a_new_name() -> None:
    """A loss returns the waiters; the next request asks for the name and subscribes again."""
    backend = Backend()
    running = started(backend._request("k", b""), backend)
    backend.take()
    asking = Running(backend._whoami())
    error = Disconnected("gone")
    waiting = backend._forget_connection()
    assert len(waiting) == 4  # with those for the question of who listens
    assert backend.core.resync_packets() == [b"CMSG denied/on"]
    for waiter in waiting:
        waiter.set_exception(error)
    assert (running.resume().result, asking.resume().result) == (error, error)
    backend.take()
    started(backend._request("k", b""), backend, CHAINED)
    assert backend.take()[0] == b"SUB " + CHAINED + b"/sbus/reply/*"


def test_responding(caplog: pytest.LogCaptureFixture) -> None:
    """The handler gets key and payload; its result is the reply; an exception is logged here and named there."""
    backend = Backend()
    requests: list[Request] = []

    def handler(request: Request) -> bytes:
        requests.append(request)
        return b"%d" % (12 // int(request.payload))

    backend.respond("div/*", handler)
    assert backend.take() == [b"SUB div/*"]
    to = ME + b"/sbus/reply/token"
    backend.core.receive([b"MSG div/x\0%b\0%b" % (to, payload) for payload in (b"3", b"0", b"x")])
    first, second, third = backend.take()
    assert first == b"MSG %b\0+4" % to
    assert second == b"MSG %b\0-the responder failed (ZeroDivisionError): its log says why" % to
    assert third.startswith(b"MSG %b\0-the responder failed (ValueError)" % to)
    assert requests[0] == (b"div/x", b"3")
    assert [record.name for record in caplog.records] == ["sbus.client"] * 2
    assert [record.exc_info and record.exc_info[0] for record in caplog.records] == [ZeroDivisionError, ValueError]


def test_what_a_handler_may_do(caplog: pytest.LogCaptureFixture) -> None:
    """A handler may answer itself, later or not at all; the first answer counts; a `RequestFailed` is for the other."""
    backend = Backend()
    kept: list[Request] = []

    def handler(request: Request) -> Any:
        if request.payload == b"fail":
            raise RequestFailed("no such thing")
        if request.payload == b"twice":
            request.answer(b"first")
            return b"second"
        if request.payload == b"text":
            return "text"
        kept.append(request)
        return None

    backend.respond("k", handler)
    backend.take()
    to = ME + b"/sbus/reply/token"
    ask = b"MSG k\0" + to + b"\0"
    backend.core.receive([ask + payload for payload in (b"fail", b"twice", b"text")])
    assert backend.take() == [
        b"MSG %b\0%b" % (to, reply)
        for reply in (b"-no such thing", b"+first", b"-the responder failed (UsageError): its log says why")
    ]
    assert "a reply is bytes, not str" in caplog.text
    backend.core.receive([ask + b"later", ask + b"never"])
    assert backend.take() == []
    kept[0].answer(b"now")
    kept[0].fail("too late")
    kept[1].fail("no time")
    assert backend.take() == [b"MSG %b\0+now" % to, b"MSG %b\0-no time" % to]


def test_async_handler_without_an_event_loop(caplog: pytest.LogCaptureFixture) -> None:
    """Where there is no event loop, an async handler fails the request, and the log says what to use."""
    backend = Backend()

    async def handler(request: Request) -> bytes:
        raise AssertionError("it does not run")

    backend.respond("k", handler)
    backend.take()
    backend.core.receive([b"MSG k\0" + ME + b"/sbus/reply/token\0"])
    assert b"-the responder failed (UsageError)" in backend.take()[0]
    assert "the blocking client has no event loop" in caplog.text


def test_a_request_of_ones_own_cannot_be_answered() -> None:
    """A request that a test makes has a key and a payload; there is nobody to reply to."""
    request = Request(b"k", b"p")
    assert request == (b"k", b"p")
    with pytest.raises(UsageError, match="not received"):
        request.answer(b"")


@pytest.mark.parametrize("request_", [None, b"payload", (b"k", b"payload")])
def test_what_is_no_request_cannot_be_answered(request_: Any) -> None:
    """Both calls name the mistake."""
    for call in (lambda: Backend().answer(request_, b"x"), lambda: Backend().fail(request_, "x")):
        with pytest.raises(UsageError, match=r"^a request is a received message, not (NoneType|bytes|tuple)$"):
            call()


LONG: Any = "!" * 1_000_000


@pytest.mark.parametrize(
    "call",
    [
        lambda bus: as_bytes("\udc80" + LONG),
        lambda bus: find_dialect(LONG),
        lambda bus: check_queue(LONG),
        lambda bus: check_address(LONG),
        lambda bus: check_address("@" + LONG),
        lambda bus: check_address("systemd:" + LONG),
        lambda bus: check_address("/dev/unix/abstract/" + LONG),
        lambda bus: bus.core.publish(LONG, b""),
        lambda bus: bus.core.control("a\0" + LONG),
        lambda bus: bus.core.control("bye/" + LONG),
        lambda bus: bus.flood_control(soft=LONG),
    ],
)
def test_errors_do_not_repeat_megabytes(call: Callable[[Backend], object]) -> None:
    """Of an argument that is much too long, an error shows the beginning."""
    with pytest.raises(UsageError) as caught:
        call(Backend())
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "to",
    [
        b"",
        b"open/sbus/reply/x",
        b"!/sbus/reply/x",
        b"!/cred/1/2/sbus/reply/x",
        b"!/cred/1/2/x/sbus/reply/x",
        b"!/cred/1/2/3/!/sbus/reply/x",
        ME + b"/sbus/other",
        ME + b"/sbus/reply/" + b"x" * 1024,
    ],
)
def test_only_private_keys_for_answers_are_answered_to(to: bytes) -> None:
    """A request cannot make a responder publish to other keys than reply keys, or fail."""
    backend = Backend()
    message = Message(b"k", to + b"\0payload")
    backend.answer(message, b"x")
    backend.fail(message, "x")
    backend.answer(Message(b"k", to), b"x")  # no NUL: no request
    assert backend.sent == []


@pytest.mark.parametrize("how", ["returns it", "answers"])
def test_reply_that_is_too_long(caplog: pytest.LogCaptureFixture, how: str) -> None:
    """Both ends learn in one line that a reply is too long: the limit, and what to do."""
    backend = Backend()

    def handler(request: Request) -> bytes | None:
        if how == "returns it":
            return bytes(10_000)
        request.answer(bytes(10_000))
        return None

    backend.respond("k/é", handler)
    backend.take()
    to = ME + b"/sbus/reply/x"
    backend.core.receive(["MSG k/é".encode() + b"\0" + to + b"\0"])
    why = f"the packet is longer than the limit: {len(to) + 10_006} bytes, and the limit is 10000; "
    (packet,) = backend.take()
    assert packet.startswith(b"MSG %b\0-the reply is too long: %b" % (to, why.encode()))
    (record,) = caplog.records
    assert record.getMessage().startswith(f"a reply to a request for 'k/é' failed: {why}")
    assert not record.exc_info


def test_errors_are_cut_and_made_text() -> None:
    """An error's text is truncated, and encoded whatever it contains."""
    backend = Backend()
    request = Message(b"k", ME + b"/sbus/reply/x\0")
    backend.fail(request, "é" * 5000)
    backend.fail(request, "\udc80")
    prefix = b"MSG " + ME + b"/sbus/reply/x\0-"
    assert backend.take() == [prefix + "é".encode() * 1000, prefix + b"?"]
    with pytest.raises(PacketTooLong):
        backend.answer(request, bytes(10_000))


@pytest.mark.parametrize("me", [b"!/cred/0/0/0", b"!/cred/1/65534/7", b"!/cred/65534/1/7", ME + b"/!/cred/1/2/0"])
def test_a_name_that_is_shared_is_explained(me: bytes) -> None:
    """A client whose IDs prove nothing is not disconnected by the server: calls that need a secret key say why not."""
    backend = Backend()
    for call in (backend._request("k", b""), backend._inbox("x"), backend._answer_proofs()):
        error = started(call, backend, me).result
        assert isinstance(error, InvalidKey)
        assert error.reason is ViolationReason.UNPROVEN_IDENTITY
        assert re.search(r"namespace.*: (run both in one|run both in one user).*containers: --", str(error))
        assert me.decode() in str(error)
        assert backend.take() == []


def test_inbox_is_below_our_name() -> None:
    """An inbox's key is the reply to whoami, byte for byte, and the name."""
    backend = Backend()
    running = started(backend._inbox("lettres/ä"), backend, CHAINED)
    assert isinstance(running.result, Inbox)
    assert running.result.key == running.result.subscription.pattern == CHAINED + "/lettres/ä".encode()
    assert backend.take() == [b"SUB " + running.result.key]
    assert inbox_key(ME, b"x") == ME + b"/x"


@pytest.mark.parametrize(("answer", "proved"), [(b"+%b", True), (b"+", False), (b"%b", False), (b"-%b", False)])
def test_only_what_was_sent_proves_who_answers(answer: bytes, proved: bool) -> None:
    """Only the random payload, sent back, is a proof."""
    backend = Backend()
    running = started(backend._verify(CHAINED.decode()), backend)
    packet = backend.take()[1]
    key, to, nonce = packet.split(b"\0", 2)
    assert (key, len(nonce)) == (b"MSG " + CHAINED + b"/sbus/proof", 32)
    backend.core.receive([b"MSG %b\0%b" % (to, answer.replace(b"%b", nonce))])
    assert running.resume().result is proved


def test_proofs_are_answered() -> None:
    """Requests to the key for proofs are answered with their own payload."""
    backend = Backend()
    assert isinstance(started(backend._answer_proofs(), backend).result, Sub)
    assert backend.take() == [b"SUB " + ME + b"/sbus/proof"]
    to = CHAINED + b"/sbus/reply/x"
    backend.core.receive([b"MSG %b/sbus/proof\0%b\0no\0nce" % (ME, to)])
    assert backend.take() == [b"MSG %b\0+no\0nce" % to]


def test_settings() -> None:
    """Each choice is one control message, and only choices are sent."""
    backend = Backend()
    backend.flood_control(soft="block", order="stack")
    backend.flood_control(hard="error")
    backend.flood_control()
    backend.echo(True)
    backend.echo(False)
    backend.control("a/b", b"x")
    assert [packet.removeprefix(b"CMSG ") for packet in backend.take()] == [
        b"blocking/soft/block",
        b"order/stack",
        b"blocking/hard/error",
        b"echo/on",
        b"echo/off",
        b"a/b\0x",
    ]


@pytest.mark.parametrize("choice", [{"soft": "drop"}, {"hard": "queue"}, {"order": "random/"}, {"soft": ""}])
def test_unknown_choices_are_refused(choice: dict[str, Any]) -> None:
    """A strategy or an order that does not exist is an error that lists those that do, and nothing is sent."""
    backend = Backend()
    with pytest.raises(UsageError, match=r"there is no .*: use 'queue'|use 'discard'"):
        backend.flood_control(**{"soft": "error", "hard": "error", **choice})
    assert backend.take() == []


def test_early_dialect_has_fences_only() -> None:
    """In the early dialect, calls that need the client's name raise, and a fence does not."""
    backend = Backend(EARLY)
    calls = (
        backend._whoami(),
        backend._inbox("x"),
        backend._request("k", b""),
        backend._verify("x"),
        backend._answer_proofs(),
    )
    for call in calls:
        assert isinstance(Running(call).result, UsageError)
    running = Running(backend._fence())
    backend.core.receive([packet for packet in backend.take() if packet.startswith(b"MSG")])
    assert not running.is_done
    assert running.resume().is_done
    assert running.result is None
