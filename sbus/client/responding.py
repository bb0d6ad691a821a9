"""Answering requests: what `respond` does with each message.

A handler gets a `Request`. It may return the reply, or be a coroutine function that does (asyncio, Twisted), or return
None and call `Request.answer` or `Request.fail` later. The first answer counts.

If a handler raises, its program has a bug or a problem, and both ends must learn of it: the program's own log gets the
traceback, and the requester the name of the exception. The requester does not get the exception's text, which may
contain paths, keys of a database and whatever else the requester has no right to see. The text of a `RequestFailed` is
meant for the requester, and reaches it. In three cases the handler is not at fault: the reply is too long; there is no
connection, and the client's buffer has no room; or the bus does not read the reply in time. Then the log gets one line
with the cause and the remedy. The requester learns only of a reply that is too long.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import lru_cache
from typing import Any, Protocol, Self, TypeAlias

from sbus.client.arguments import check_function, check_payload
from sbus.client.dispatch import Message
from sbus.client.identity import Sender
from sbus.errors import BufferFull, Disconnected, PacketTooLong, RequestFailed, TimedOut, UsageError, Violation
from sbus.protocol.keys import Dialect

__all__ = ["MOST_HANDLERS", "REPLY", "Handler", "Request", "Responder", "is_reply_key", "reply_key"]


class _Bus(Protocol):
    """The methods of a connection that a responder uses."""

    def answer(self, request: Message, payload: bytes) -> None:
        """Reply to a request."""

    def fail(self, request: Message, error: str) -> None:
        """Reply to a request with an error."""

    def handler_failed(self, error: Exception) -> None:
        """Log an exception that a handler has raised."""

    def _warn(self, text: str) -> None:
        """Log a line for the operator of the program."""

    def run_handler(self, handler: Coroutine[Any, Any, None], ended: Callable[[], None]) -> bool:
        """Run the rest of a handler in the background.

        :param ended: called once it has ended, unless that is so when this returns.
        :returns: whether it is still under way.
        """


REPLY = b"/sbus/reply/"
"""The part between a client's name and the token in the key of replies to that client."""
MOST_HANDLERS = 4096
"""Handlers of one subscription that are under way at once."""
_MAX_REPLY_KEY = 1024
"""Bytes in the longest key that a reply is published to."""


def reply_key(payload: bytes) -> bytes | None:
    """Return the key that the payload of a request begins with; None if there is none of a bearable length."""
    key, nul, _ = bytes(payload[: _MAX_REPLY_KEY + 1]).partition(b"\0")
    return key if nul else None


def is_reply_key(dialect: Dialect, key: bytes) -> bool:
    """Return whether a request may have another client publish to a key: only private ones for replies."""
    place, slash, rest = key.rpartition(b"/")
    return _is_private(dialect, key if b"!" in rest else place + slash)


@lru_cache(1024)
def _is_private(dialect: Dialect, key: bytes) -> bool:
    """Return the same for what the keys of many replies have in common."""
    try:
        return REPLY in key and dialect.check(key) is not None
    except Violation:
        return False


class Request(Message):
    """A received request: its key, and its payload without the reply key.

    :ivar sender: who sent the request, as the server knows; None unless this client asks for it (``sender=True``).
    """

    sender: Sender | None = None
    _bus: _Bus | None = None
    _message: Message
    _is_answered = False
    _unsent: PacketTooLong | BufferFull | TimedOut | None = None  # the error that prevented the sending of a reply

    @classmethod
    def received(cls, bus: _Bus, message: Message) -> Self:
        """Return the request in a message."""
        key = reply_key(message.payload)
        request = cls(message.key, b"" if key is None else message.payload[len(key) + 1 :])
        request._bus, request._message, request.sender = bus, message, message.sender
        return request

    def answer(self, payload: bytes = b"") -> None:
        """Reply; further replies to the same request are ignored.

        :raises sbus.errors.PacketTooLong: if the reply does not fit a packet.
        :raises sbus.errors.BufferFull: if nothing more can wait for a connection.
        :raises sbus.errors.TimedOut: in the blocking client, if a call's time is over before the bus reads the reply.
            The client's next call sends the reply.
        :raises sbus.errors.Disconnected: if the connection is lost and not made again.
        """
        check_payload(payload, "a reply")
        self._reply(lambda bus: bus.answer(self._message, bytes(payload)))

    def fail(self, error: str) -> None:
        """Reply with an error: `sbus.errors.RequestFailed` at the requester.

        :param error: its text, of which the first 1,000 characters are sent.
        :raises sbus.errors.BufferFull: as for `answer`.
        :raises sbus.errors.TimedOut: likewise.
        :raises sbus.errors.Disconnected: if the connection is lost and not made again.
        """
        self._reply(lambda bus: bus.fail(self._message, error))

    def _reply(self, send: Callable[[_Bus], object]) -> None:
        bus = self._requester()
        if self._is_answered:
            return
        try:
            send(bus)
        except (PacketTooLong, BufferFull, TimedOut) as error:
            self._unsent = error
            self._is_answered = isinstance(error, TimedOut)  # the next call sends it
            raise
        self._is_answered = True

    def _requester(self) -> _Bus:
        if self._bus is None:
            raise UsageError("this request was made here, not received: there is nobody to reply to")
        return self._bus


Handler: TypeAlias = Callable[[Request], bytes | Awaitable[bytes | None] | None]
"""Returns the reply, or None if it calls `Request.answer` or `Request.fail` itself."""


class Responder:
    """The callback of a subscription to requests.

    :param handler: the application's function.
    :ivar on_room: called when a handler has ended, so that there is room for another one.
    """

    def __init__(self, bus: _Bus, handler: Handler) -> None:
        check_function(handler, "a handler")
        self._bus = bus
        self._handler = handler
        self._under_way = 0
        self.on_room: Callable[[], object] = lambda: None

    @property
    def has_room(self) -> bool:
        """Whether another handler may begin."""
        return self._under_way < MOST_HANDLERS

    def __call__(self, message: Message) -> None:
        request = Request.received(self._bus, message)
        try:
            result = self._handler(request)
            if isinstance(result, Awaitable):
                self._run(self._finish(request, result), result)
            elif result is not None:
                request.answer(result)
        except Exception as error:
            self._failed(request, error)
        except BaseException as error:
            _give_up(request, error)
            raise

    def _run(self, rest: Coroutine[Any, Any, None], result: Awaitable[object]) -> None:
        try:
            self._under_way += self._bus.run_handler(rest, self._ended)
        except UsageError:
            for unused in (rest, result):
                if isinstance(unused, Coroutine):
                    unused.close()
            raise

    def _ended(self) -> None:
        self._under_way -= 1
        self.on_room()

    async def _finish(self, request: Request, result: Awaitable[bytes | None]) -> None:
        try:
            payload = await result
            if payload is not None:
                request.answer(payload)
        except Exception as error:
            self._failed(request, error)
        except GeneratorExit:
            raise  # nobody runs it any further
        except BaseException as error:
            _give_up(request, error)
            raise

    def _failed(self, request: Request, error: Exception) -> None:
        try:
            if isinstance(error, RequestFailed):
                request.fail(str(error))
                return
            if error is request._unsent:
                key = request.key.decode("utf-8", "backslashreplace")
                what = "waits for the next call" if isinstance(error, TimedOut) else "failed"
                self._bus._warn(f"a reply to a request for {key!r} {what}: {error}")
                if isinstance(error, PacketTooLong):
                    request.fail(f"the reply is too long: {error}")
                return
            if not isinstance(error, Disconnected):
                self._bus.handler_failed(error)
            request.fail(f"the responder failed ({type(error).__name__}): its log says why")
        except (Disconnected, BufferFull, TimedOut):
            pass  # the requester learns of it by its time-out


def _give_up(request: Request, error: BaseException) -> None:
    """Tell a requester that its handler is stopped, as by asyncio's cancellation."""
    with suppress(Disconnected, BufferFull, TimedOut):
        request.fail(f"the responder gave up ({type(error).__name__})")
