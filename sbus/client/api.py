"""What clients do with a bus beyond sending and receiving, written once for all shells.

The coroutines here await nothing but what the shell's own `ClientApi.waiter` returns. So Twisted runs
them with Deferreds, asyncio with futures, and the blocking shell by reading its socket until the
waiter is served.

A *request* is a message whose payload begins with the key to answer to and a NUL. The answer is a
message to that key, whose payload begins with ``+``, or with ``-`` and the error's text. The key is
private to who asked and has a token that cannot be guessed, so only who could read the request can
answer it. That is also how two clients prove who they are: who can read what is sent to a private
key can send it back.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from sbus.client.core import ClientCore, Message, Sink, Waiter, as_bytes
from sbus.errors import RequestFailed, Violation

__all__ = ["ClientApi", "Inbox", "Request", "call_key"]

Sub = TypeVar("Sub", bound=Sink)

_REPLIES = b"/sbus/reply/"
_PROOF = b"/sbus/proof"
_LONGEST_ERROR = 1000
"""Characters of an error's text that are sent to who asked."""
_LONGEST_KEY = 1024
"""Bytes in the longest key that is answered to."""


class AwaitableWaiter(Waiter, Awaitable[bytes], Protocol):
    """A waiter that coroutines of the shell's can await."""


class Inbox(NamedTuple, Generic[Sub]):
    """A private key of our own: tell others the `key`, read the `subscription`."""

    key: bytes
    subscription: Sub


class Request(NamedTuple):
    """A request that somebody made: the key it was sent to, and what it says."""

    key: bytes
    payload: bytes


def call_key(me: bytes, name: bytes | str) -> bytes:
    """The private key of this name, for who is called `me` by ``whoami``."""
    return b"%b/%b" % (me, as_bytes(name))


class ClientApi(ABC, Generic[Sub]):
    """The vocabulary that all shells share; a shell gives it the three methods that follow."""

    core: ClientCore

    def __init__(self) -> None:
        self._me: bytes | None = None
        self._calls: dict[bytes, Waiter] = {}
        self._answers: Sub | None = None

    @abstractmethod
    def send(self, packets: list[bytes]) -> None:
        """Send packets, in order, behind what waits already."""

    @abstractmethod
    def waiter(self) -> AwaitableWaiter:
        """Something to wait for."""

    @abstractmethod
    def subscribe(self, pattern: bytes | str, callback: Callable[[Message], Any] | None = None) -> Sub:
        """Get what the pattern matches."""

    # --- settings ----------------------------------------------------------------------------

    def control(self, key: bytes | str, payload: bytes | None = None) -> None:
        """Send a control message. Settings are remembered, and sent again after a reconnect.

        :raises sbus.errors.UsageError: if there are none in this dialect, or the key is none.
        """
        self.send([self.core.control(key, payload)])

    def flood_control(self, *, soft: str | None = None, hard: str | None = None, order: str | None = None) -> None:
        """Choose what the server does when we do not keep up.

        :param soft: when our socket is full: ``queue``, ``discard``, ``block`` or ``error``.
        :param hard: when our queue at the server is full: ``discard``, ``block`` or ``error``.
        :param order: in which order it is sent: ``queue``, ``stack`` or ``random``.
        """
        for kind, choice in (("blocking/soft", soft), ("blocking/hard", hard), ("order", order)):
            if choice is not None:
                self.control(f"{kind}/{choice}")

    def echo(self, on: bool) -> None:
        """Choose whether our own messages are sent back to us, if they match (as they are at first)."""
        self.control("echo/on" if on else "echo/off")

    # --- what takes a round trip -------------------------------------------------------------

    async def _whoami(self) -> bytes:
        waiter = self.waiter()
        self.send(self.core.whoami(waiter))
        return await waiter

    async def _fence(self) -> None:
        waiter = self.waiter()
        self.send(self.core.fence(waiter))
        await waiter

    async def _inbox(self, name: bytes | str) -> Inbox[Sub]:
        key = call_key(await self._whoami(), name)
        return Inbox(key, self.subscribe(key))

    async def _request(self, key: bytes | str, payload: bytes) -> bytes:
        if self._me is None:
            self._me = await self._whoami()
        if self._answers is None:
            self._answers = self.subscribe(self._me + _REPLIES + b"*", self._answered)
        token = os.urandom(16).hex().encode()
        waiter = self._calls[token] = self.waiter()
        try:
            self.send([self.core.publish(key, b"%b%b%b\0%b" % (self._me, _REPLIES, token, payload))])
            answer = await waiter
        finally:
            del self._calls[token]
        if not answer.startswith(b"+"):
            raise RequestFailed(answer[1:].decode(errors="replace"))
        return answer[1:]

    def _answered(self, message: Message) -> None:
        waiter = self._calls.get(message.key.rpartition(b"/")[2])
        if waiter is not None:
            waiter.set_result(message.payload)

    def answer(self, request: Message, payload: bytes) -> None:
        """Answer a request with a payload; a message that is none, or asks for no answer, gets none.

        :param request: the message as it came.
        :raises sbus.errors.PacketTooLong: if the answer does not fit a packet.
        """
        self._answer(request, b"+" + payload)

    def fail(self, request: Message, error: str) -> None:
        """Answer a request with an error: the other side's call raises `sbus.errors.RequestFailed`."""
        self._answer(request, b"-" + error[:_LONGEST_ERROR].encode(errors="replace"))

    def _answer(self, request: Message, payload: bytes) -> None:
        reply_to, nul, _ = request.payload.partition(b"\0")
        if nul and self._is_private(reply_to):
            self.send([self.core.publish(reply_to, payload)])

    def _is_private(self, key: bytes) -> bool:
        """Whether this is a key to answer to: nobody's request may have us publish anything else."""
        try:
            return len(key) <= _LONGEST_KEY and _REPLIES in key and self.core.dialect.check(key) is not None
        except Violation:
            return False

    def respond(self, pattern: bytes | str, handler: Callable[[Request], bytes]) -> Sub:
        """Answer all requests that match the pattern with what the handler returns.

        An exception of the handler's becomes the error that the other side gets. For answers that
        take time, subscribe, and call `answer` or `fail` when they are there.

        :returns: the subscription; it is over when that is closed.
        """

        def respond(message: Message) -> None:
            try:
                self.answer(message, handler(Request(message.key, message.payload.partition(b"\0")[2])))
            except Exception as e:
                self.fail(message, f"{type(e).__name__}: {e}")

        return self.subscribe(pattern, respond)

    async def _answer_proofs(self) -> Sub:
        return self.respond(await self._whoami() + _PROOF, lambda request: request.payload)

    async def _verify(self, peer: bytes | str) -> bool:
        key, nonce = as_bytes(peer) + _PROOF, os.urandom(32)
        try:
            name = self.core.dialect.check(key)
            if self.core.dialect.control and (name is None or not all(name[:3])):
                return False  # others could read that too, and answer
            return await self._request(key, nonce) == nonce
        except (Violation, RequestFailed):
            return False

    # --- losing the connection ---------------------------------------------------------------

    def _lost(self) -> list[Waiter]:
        """The connection is gone, and with it our name and what was asked: the next one has its own.

        :returns: who waits for a reply or an answer; to be told when all else is in order.
        """
        self._me = None
        if self._answers is not None:
            self.core.unsubscribe(self._answers)
            self._answers = None
        return [*self.core.lost(), *self._calls.values()]
