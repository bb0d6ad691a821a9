"""Calls that all clients share: requests, fences, inboxes, proofs of identity.

Theory of operation
-------------------

All three backends share these coroutines, which await nothing but the backend's own waiters (`ClientApi.waiter`).
Twisted runs them with Deferreds and asyncio with futures. The blocking client reads its socket until the waiter is
done, and resumes the coroutine. A coroutine here may be abandoned at any ``await`` (a timeout, a cancellation), and
must clean up in ``finally``.

*Fence.* The server answers ``whoami`` in order with a client's other packets. The reply therefore proves that
everything sent before it is in force.

*Request.* The payload of a request begins with the key to reply to and a NUL. The reply is a message to that key, whose
payload begins with ``+``, or with ``-`` and the text of an error. The reply key is a secret key of the requester,
``!/cred/<gid>/<uid>/<pid>/sbus/reply/<token>``, and the token is 16 random bytes. Only a peer that could read the
request knows it, so nobody else can reply. One subscription, ending in ``*``, serves all requests of a connection.
A request that the server refuses fails at once; so do all if it refuses that subscription (`sbus.client.denials`).

*What a request may cause.* A request makes the responder publish to a key that its author chose. The responder only
does so for secret keys with ``/sbus/reply/`` in them, of at most 1,024 bytes. Otherwise any client could have others
publish in their own name.

After a lost connection pending requests fail.
"""

from __future__ import annotations

import os
import sys
import warnings
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar, cast

from sbus.client.arguments import as_bytes, check_payload, check_text
from sbus.client.batches import PayloadBatch
from sbus.client.core import ClientCore, Message, Sink, Waiter
from sbus.client.dispatch import AwaitableWaiter, OwnCallback, Result
from sbus.client.identity import check_name
from sbus.client.payloads import Buffer
from sbus.client.questions import CallingWaiter
from sbus.client.queues import build_put, check_job, no_service, queue_key
from sbus.client.responding import REPLY, Handler, Request, Responder, is_reply_key, reply_key
from sbus.client.watches import Watch
from sbus.client.workers import QueueCalls, WorkCore
from sbus.errors import NobodyListens, NotAllowed, PatternWarning, RequestFailed, UsageError, Violation
from sbus.protocol.controls import (
    ECHO_OFF,
    ECHO_ON,
    HARD,
    ORDER,
    SOFT,
    HardChoice,
    OrderChoice,
    SoftChoice,
    choices,
)
from sbus.protocol.packets import MSG, build

__all__ = ["CLOSED_HERE", "LOGGER", "ClientApi", "Inbox", "Request", "State", "inbox_key"]

Sub = TypeVar("Sub", bound=Sink)
State: TypeAlias = Literal["connected", "reconnecting", "closed"]

CLOSED_HERE = "the connection to the bus was closed here: connect again before any other call"
"""The text of `sbus.errors.Closed` after the ``close`` of a bus."""
LOGGER = "sbus.client"
"""The name of the logger (`logging`) of the blocking and the asyncio client."""
_WILDCARDS = frozenset(b"*#>+")
"""Bytes of wildcards here and in other systems."""
_PROOF = b"/sbus/proof"
_MOST_NAMES = 2
"""Names for which replies are received: the client's own, and the one before."""
_MAX_ERROR = 1000
"""Characters of an error's text that are sent to the requester."""


class Inbox(NamedTuple, Generic[Sub]):
    """A secret key of this client: give others the `key`, and read the `subscription`."""

    key: bytes
    subscription: Sub


def inbox_key(me: bytes, name: bytes | str) -> bytes:
    """Return the secret key with this name of the client that ``whoami`` calls `me`."""
    return b"%b/%b" % (me, as_bytes(name))


def _fail_if_none(count: bytes, key: bytes | str, waiter: Waiter) -> None:
    """Fail a request that nobody has got.

    The question follows the request, and asks how many clients get messages with its key. Asked first, it would cost
    a second round trip, and its answer could be out of date when the server handles the request.
    """
    if int(count) == 0:
        name = as_bytes(key).decode(errors="backslashreplace")
        waiter.set_exception(NobodyListens(f"nobody subscribes to '{name:.200}': start the program that answers"))


class ClientApi(QueueCalls, Generic[Sub]):
    """The calls that the three clients share.

    A call that needs a round trip, or that may wait for the socket, returns its result in the library's own way: the
    value itself, a coroutine, or a Deferred, which fails with the errors listed here as raised.
    """

    core: ClientCore

    def __init__(self) -> None:
        self.works: list[WorkCore] = []
        self._me: bytes | None = None
        self._requests: dict[bytes, Waiter] = {}
        self._name_changes = 0
        self._replies: list[Sub] = []  # the newest last; replies to the name before it may be on their way
        self._replies_to: bytes | None = None
        self._lost = 0

    # --- what a backend implements -----------------------------------------------------------

    @abstractmethod
    def send(self, packets: list[bytes]) -> None:
        """Send packets, in order, after those that are already waiting."""

    def _take_back(self, packet: bytes) -> None:
        """Do not send a packet that was handed to `send`, if it has not left yet."""

    @abstractmethod
    def waiter(self) -> AwaitableWaiter:
        """Return a new waiter."""

    @abstractmethod
    def publish(self, key: bytes | str, payload: Buffer = b"") -> Result[None]:
        """Publish a message; done when it has been handed to the kernel.

        If the server refuses it, ``on_denied`` is called; that happens before a later `fence` returns.

        With ``payloads=True`` a large payload, of any type with the buffer interface, is sent in sealed memory.

        :raises sbus.errors.InvalidKey: if the protocol does not allow the key.
        :raises sbus.errors.PacketTooLong: if the message does not fit a packet, or exceeds ``--max-payload``.
        :raises OSError: if the kernel has no memory or descriptor for a large payload.
        :raises sbus.errors.Disconnected: if the connection is lost and not made again.
        """

    @abstractmethod
    def publish_many(self, messages: Iterable[tuple[bytes | str, Buffer]]) -> Result[None]:
        """Publish messages, (key, payload) each, in order.

        It is done when all have been handed to the kernel.

        :raises: as `publish`; if one message cannot be published, none is.
        """

    @abstractmethod
    def payloads(self) -> PayloadBatch[Any]:
        """Begin a batch of large messages, which share one memory (:doc:`/payloads`).

        The batch is a context manager, whose end sends the messages; as ordinary ones without ``payloads=True``, or to
        a server that takes no payloads.
        """

    @abstractmethod
    def subscribe(
        self,
        pattern: bytes | str,
        callback: Callable[[Message], object] | None = None,
        *,
        last: bool = False,
        sender: bool = False,
    ) -> Sub:
        """Subscribe to a pattern.

        If the server refuses it, now or later, the subscription ends: reading it raises `sbus.errors.NotAllowed`, or
        with a callback ``on_denied`` is called.

        :param callback: called with each message; without one, read the messages from the result.
        :param last: get the last values of matching keys first, as far as the server keeps them
            (`sbus.client.core.Message.is_last_value`).
        :param sender: get only messages whose sender is known (`sbus.client.core.Message.sender`). From now on the
            client asks for the sender of every message, on later connections too. If the server does not name senders,
            the client ends the connection: waiting and later calls raise `sbus.errors.UsageError`.
        :raises sbus.errors.InvalidKey: if the protocol does not allow the pattern.
        :raises sbus.errors.UsageError: for `last` and `sender`, in a dialect without control messages.
        """

    @abstractmethod
    def whoami(self, timeout: float | None = None) -> Result[bytes]:
        """Return this client's name at the server, the prefix of its secret keys.

        It looks like ``!/cred/<gid>/<uid>/<pid>``. Across containers it may end in ``/0``: then many processes have
        this name, and none of them gets secret messages (:doc:`/containers`).

        :raises sbus.errors.TimedOut: if the server has not replied within `timeout` seconds.
        """

    @abstractmethod
    def fence(self, timeout: float | None = None) -> Result[None]:
        """Wait until the server has handled everything that this client sent before.

        :raises sbus.errors.TimedOut: if that took longer than `timeout` seconds.
        """

    @abstractmethod
    def has_subscribers(self, key: bytes | str, timeout: float | None = 10.0) -> Result[bool]:
        """Return whether anybody would get a message that this client published now.

        One's own subscriptions count, unless echo is off. For secret keys it is always true.

        :raises sbus.errors.InvalidKey: if the protocol does not allow the key.
        :raises sbus.errors.UsageError: if the server does not know.
        :raises sbus.errors.TimedOut: if the server has not replied within `timeout` seconds.
        """

    @abstractmethod
    def watch_subscribers(self, key: bytes | str) -> Watch:
        """Watch whether anybody subscribes to a key: read the state, and then each change, from the result.

        A change from subscribers to none is reported after 100 ms, so that one that reconnects does not count.

        :raises sbus.errors.InvalidKey: if the protocol does not allow the key.
        :raises sbus.errors.UsageError: in a dialect without control messages, for a key of more than 1,024 bytes, and
            for more than 1,024 keys. Reading raises it if the server does not report this.
        """

    @abstractmethod
    def inbox(self, name: bytes | str) -> Result[Inbox[Sub]]:
        """Subscribe to a secret key that only this process can read.

        :raises sbus.errors.InvalidKey: if the server cannot tell this process from others, as across containers.
        """

    @abstractmethod
    def request(self, key: bytes | str, payload: bytes = b"", timeout: float | None = 10.0) -> Result[bytes]:
        """Send a request and return the payload of the first reply.

        :raises sbus.errors.TimedOut: if there is no reply within `timeout` seconds.
        :raises sbus.errors.NobodyListens: if nobody subscribes to the key, and the server says so.
        :raises sbus.errors.NotAllowed: if the server refuses the request.
        :raises sbus.errors.RequestFailed: if the reply is an error; the text is the responder's.
        :raises sbus.errors.InvalidKey: if the server cannot tell this process from others, as across containers.
        """

    @abstractmethod
    def answer_proofs(self) -> Result[Sub]:
        """Answer the `verify` calls of others, until the returned subscription closes."""

    @abstractmethod
    def verify(self, peer: bytes | str, timeout: float | None = 10.0) -> Result[bool]:
        """Return whether a client with the name `peer` is connected and proves it.

        This takes a round trip. For the publisher of a message, `sbus.client.core.Message.sender` needs none. Use
        `verify` for a peer that has not sent you a message, and where the server does not name senders. Across a bridge
        neither works: the sender is the bridge, and secret keys, which carry the proofs, do not cross it.

        False if there is no proof within `timeout` seconds.

        :raises sbus.errors.NotAllowed: if this client may not publish to the peer.
        """

    @property
    @abstractmethod
    def state(self) -> State:
        """``connected``; ``reconnecting`` after a loss, until everything is in force again; or ``closed``.

        It changes when the client notices: the blocking one in its calls.
        """

    @property
    def extensions(self) -> frozenset[str]:
        """Extensions of the protocol that the server has confirmed on this connection.

        Names such as ``bundle``, ``bye``, ``denied``, ``receipts``, ``sender``, ``payload``, ``interest``, ``probe``
        and ``last``. The client finds out when it asks for one; call `fence` first for the first six.
        """
        return frozenset(self.core.extensions.answered)

    # --- patterns ----------------------------------------------------------------------------

    def _hint(self, pattern: bytes | str) -> None:
        """Warn of a pattern that most likely means something else than its author believes."""
        pattern = as_bytes(pattern, "pattern")
        if not _WILDCARDS.isdisjoint(pattern):
            from sbus.protocol.explain import hints

            for line in hints([pattern], self.core.dialect):
                self._advise(line)

    def _advise(self, text: str) -> None:
        """Warn the author of the program, at the line that called the library."""
        frame, level = sys._getframe(), 1
        while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("sbus.client."):
            frame, level = frame.f_back, level + 1
        warnings.warn(text, PatternWarning, stacklevel=level)

    # --- settings ----------------------------------------------------------------------------

    def control(self, key: bytes | str, payload: bytes | None = None) -> None:
        """Send a control message. Settings are sent again after a reconnect.

        :raises sbus.errors.InvalidKey: if the key contains a NUL.
        :raises sbus.errors.UsageError: in a dialect without control messages, and for those that the library sends
            itself: ``bundle``, ``bye``, ``denied``, ``interest``, ``payload``, ``probe``, ``last`` and ``sender``.
        """
        self.send([self.core.control(key, payload)])

    def flood_control(
        self, *, soft: SoftChoice | None = None, hard: HardChoice | None = None, order: OrderChoice | None = None
    ) -> None:
        """Choose what the server does when this client falls behind.

        Besides the names given here, a server may have others, of plugins.

        :param soft: when its socket is full: ``queue``, ``discard``, ``block``, ``error`` or ``latest``.
        :param hard: when its queue at the server is full: ``discard``, ``block`` or ``error``.
        :param order: the order in which its queue is sent: ``queue``, ``stack`` or ``random``.
        :raises sbus.errors.UsageError: for any other word; nothing is sent then. `control` chooses a plugin's.
        """
        wanted = [
            (group, choice) for group, choice in ((SOFT, soft), (HARD, hard), (ORDER, order)) if choice is not None
        ]
        for group, choice in wanted:
            if choice not in choices(group):
                key = f"{group.decode()}/{choice!s:.80}"
                raise UsageError(
                    f"there is no {key}: use {', '.join(map(repr, choices(group)))}; "
                    f"for a strategy or an order of a plugin, call control({key!r})"
                )
        for group, choice in wanted:
            self.control(b"%b/%b" % (group, choice.encode()))

    def echo(self, on: bool) -> None:
        """Choose whether the server sends this client's own messages back (default: yes)."""
        self.control(ECHO_ON if on else ECHO_OFF)

    # --- round trips -------------------------------------------------------------------------

    async def _whoami(self) -> bytes:
        waiter = self.waiter()
        self.send(self.core.whoami(waiter))
        return await waiter

    async def _fence(self) -> None:
        waiter = self.waiter()
        self.send(self.core.fence(waiter))
        await waiter

    async def _has_subscribers(self, key: bytes | str) -> bool:
        waiter = self.waiter()
        self.send(self.core.probe(key, waiter))
        return int(await waiter) > 0

    async def _own_name(self) -> bytes:
        """Return this client's name, which secret keys can begin with.

        :raises sbus.errors.InvalidKey: if the server will refuse them, as it does across PID namespaces.
        """
        me = await self._whoami()
        check_name(me)
        return me

    async def _inbox(self, name: bytes | str) -> Inbox[Sub]:
        key = inbox_key(await self._own_name(), name)
        return Inbox(key, self.subscribe(key))

    async def _request(self, key: bytes | str, payload: bytes) -> bytes:
        check_payload(payload)
        me = await self._observed_name()
        if self._replies_to != me:
            self._replies.append(self.subscribe(me + REPLY + b"*", OwnCallback(self._reply_received)))
            self._replies_to = me
            while len(self._replies) > _MOST_NAMES:
                self.send(self.core.unsubscribe(self._replies.pop(0)))
        token = os.urandom(16).hex().encode()
        waiter = self._requests[token] = self.waiter()
        denials = self.core.extensions.denials
        packet = b""

        def handled(count: bytes) -> None:
            denials.settle(waiter)
            _fail_if_none(count, key, waiter)

        try:
            self._check_time()
            packet = self.core.publish(key, b"%b%b%b\0%b" % (me, REPLY, token, payload))
            denials.expect(as_bytes(key), waiter)
            self.send([packet, *self.core.probe_request(key, CallingWaiter(handled))])
            reply = await waiter
        except BaseException:
            self._take_back(packet)  # given up means not sent, if it has not left yet
            raise
        finally:
            del self._requests[token]
            denials.settle(waiter)
        if reply[:1] != b"+":
            raise RequestFailed(bytes(reply[1:]).decode(errors="replace"))
        return reply[1:]

    def _check_time(self) -> None:
        """Raise `TimedOut` if the time of the call under way is over, unless that ends the call by itself."""

    async def _enqueue(self, queue: str, key: bytes | str, payload: bytes, id: bytes | str | None, delay: float) -> int:
        check_payload(payload)
        place, put = queue_key(queue, b"put/") + as_bytes(key), build_put(payload, id, delay)
        await self._observed_name()  # by then the server's limit is known
        check_job(len(place) + len(put), self.core.max_packet)
        try:
            answer = bytes(await self._request(place, put))
        except NobodyListens:
            raise no_service(queue) from None
        try:
            return int(answer)
        except ValueError:
            raise RequestFailed(f"the answer to enqueue is no number of a job, but {answer!r:.80}") from None

    async def _observed_name(self) -> bytes:
        """Return this client's name, as `_own_name` does; it is asked for again only when it has changed."""
        while self._me is None:
            changes = self._name_changes
            self.send(self.core.observe_name(self._name_changed))
            me = await self._own_name()
            if changes == self._name_changes:
                self._me = me
        return self._me

    def _name_changed(self) -> None:
        self._name_changes += 1
        self._me = None

    def _reply_received(self, message: Message) -> None:
        waiter = self._requests.get(message.key.rpartition(b"/")[2])
        if waiter is not None:
            waiter.set_result(message.payload)

    def answer(self, request: Message, payload: bytes) -> None:
        """Reply to a request; a message that asks for no reply is ignored.

        :param request: the message as received.
        :raises sbus.errors.PacketTooLong: if the reply does not fit a packet.
        """
        check_payload(payload, "a reply")
        self._reply([(request, b"+" + payload)])

    def fail(self, request: Message, error: str) -> None:
        """Reply to a request with an error: `sbus.errors.RequestFailed` at the requester.

        :param error: its text; the first 1,000 characters are sent, or fewer if they do not fit a packet.
        """
        check_text(error, "the text of an error")
        self._reply([(request, b"-" + error[:_MAX_ERROR].encode(errors="replace"))])

    def _reply(self, replies: list[tuple[Message, bytes]]) -> None:
        """Send answers, which begin with a plus, and failures, which begin with a minus."""
        packets = []
        key, is_allowed = b"", False
        for request, payload in replies:
            if not isinstance(request, Message):
                raise UsageError(f"a request is a received message, not {type(request).__name__}")
            last, key = key, reply_key(request.payload) or b""
            if key != last:  # requests that are sent together may have one in common
                is_allowed = is_reply_key(self.core.dialect, key)
            if is_allowed:
                packet = build(MSG, key, payload)
                packets.append(packet if len(packet) <= self.core.longest_plain else self._long_reply(key, payload))
        self.send(packets)

    def _long_reply(self, key: bytes, payload: bytes) -> bytes:
        if self.core.packet_limit.is_open:
            self.core.learn_limit()  # an answer to this client's first question would have come before any request
        if payload.startswith(b"-"):
            payload = payload[: self.core.max_packet - len(build(MSG, key, b""))]  # as much of the text as fits
        return self.core.publish(key, payload)

    def respond(self, pattern: bytes | str, handler: Handler, *, sender: bool = False) -> Sub:
        """Answer every request that matches a pattern with the handler's result.

        The handler may be a coroutine function, except with the blocking client. If it returns None, it has answered
        itself, or will: `Request.answer`, `Request.fail`. If it raises `sbus.errors.RequestFailed`, the requester gets
        that text. Any other exception is logged here, and the requester gets its name.

        :param sender: answer only requests whose sender is known; it is ``request.sender`` (see `subscribe`).
        :returns: the subscription; close it to stop.
        """
        return self.subscribe(pattern, Responder(self, handler), sender=sender)

    def handler_failed(self, error: Exception) -> None:
        """Log an exception that a handler of `respond` has raised."""
        from logging import getLogger  # a command that logs nothing does not wait for its import

        getLogger(LOGGER).error("a handler of requests failed", exc_info=error)

    def run_handler(self, handler: Coroutine[Any, Any, None], ended: Callable[[], None]) -> bool:
        """Run the rest of a handler that is a coroutine; see `sbus.client.responding`.

        :raises sbus.errors.UsageError: in the blocking client, which has no event loop.
        """
        raise UsageError("the blocking client has no event loop for an async handler: use the asyncio client")

    async def _answer_proofs(self) -> Sub:
        return self.respond(await self._own_name() + _PROOF, lambda request: request.payload)

    async def _verify(self, peer: bytes | str) -> bool:
        """Send a random token as a request to a key that only the peer can read, and compare the reply with it."""
        key, nonce = as_bytes(peer) + _PROOF, os.urandom(32)
        try:
            name = self.core.dialect.check(key)
            if self.core.dialect.control and (name is None or not all(name[:3])):
                return False  # other processes could read the nonce, and return it
            return await self._request(key, nonce) == nonce
        except (Violation, RequestFailed):
            return False

    # --- losses ------------------------------------------------------------------------------

    @property
    def lost(self) -> int:
        """Messages that the server has reported as lost, on all connections (see ``on_lost``).

        Losses of unknown number are not in it.
        """
        return self._lost

    def _warn(self, text: str) -> None:
        """Log a warning for the operator of this program."""
        from logging import getLogger

        getLogger(LOGGER).warning(text)

    # --- denials -----------------------------------------------------------------------------

    @abstractmethod
    def _refuse(self, subscription: Sub, error: NotAllowed) -> bool:
        """End a subscription with an error; return whether it has a reader to raise it."""

    def _refused(self, sink: Sink, error: NotAllowed) -> bool:
        """End a subscription that the server has refused; return whether a reader or a caller gets the error."""
        subscription = cast(Sub, sink)
        is_read = self._refuse(subscription, error)
        if subscription not in self._replies:
            return self._end_work_with(subscription, error) or is_read
        self._replies.remove(subscription)
        self._replies_to = None
        for waiter in list(self._requests.values()):
            waiter.set_exception(error)
        return True

    # --- losing the connection ---------------------------------------------------------------

    def _forget_connection(self) -> list[Waiter]:
        """Forget the name, which may have changed, the subscription to replies, and the core's connection.

        :returns: the waiters to fail once the caller's own state is consistent.
        """
        self._me = None
        self._replies_to = None
        for replies in self._replies:
            self.core.unsubscribe(replies)
        self._replies.clear()
        return [*self.core.disconnected(), *self._requests.values()]
