"""Batches: several large messages in one memfd, which is created, sealed, checked and mapped once.

Each message is copied into the memory when it is published. The end of the block seals the memory and sends the
messages; an exception in the block sends nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from types import TracebackType
from typing import Generic, Self, TypeVar

from sbus.client.arguments import check_count
from sbus.client.core import ClientCore
from sbus.client.payloads import Arena, Buffer, flat
from sbus.errors import UsageError

__all__ = ["AsyncPayloadBatch", "BlockingPayloadBatch", "PayloadBatch"]

T = TypeVar("T")


class PayloadBatch(Generic[T]):
    """Several large messages in one memfd; made by the ``payloads`` of a bus.

    :param core: the client.
    :param publish: sends the packets of the batch; it is called once.
    """

    def __init__(self, core: ClientCore, publish: Callable[[PayloadBatch[T]], T]) -> None:
        self._core = core
        self._publish = publish
        self._arena = Arena(core.longest_payload)
        self._messages: list[Callable[[], bytes]] = []  # each returns its packet
        self._is_over = False

    def allocate(self, size: int) -> memoryview:
        """Return a writable view of `size` zeros, to make a payload in.

        It is ordinary memory, as good as any that you have.

        :raises sbus.errors.PacketTooLong: if the server does not take payloads of that size (``--max-payload``).
        :raises sbus.errors.UsageError: if `size` is not positive, or the batch has ended.
        """
        self._check_open()
        size = check_count(size, "size", "give a whole number of bytes: a view has at least 1 byte")
        if not self._core.payloads.is_open:
            self._core.check_size(size)
        return memoryview(bytearray(size))

    def publish(self, key: bytes | str, payload: Buffer) -> None:
        """Publish a message when the batch ends, after those before it.

        :param payload: is copied now, so you may change it as soon as the call returns.
        :raises sbus.errors.InvalidKey: if the protocol does not allow the key.
        :raises sbus.errors.PacketTooLong: if the server does not take payloads of that size (``--max-payload``).
        :raises sbus.errors.UsageError: if the payload is not bytes, or the batch has ended.
        :raises OSError: if the kernel has no memory or descriptor.
        """
        self._check_open()
        key = self._core.check_key(key)
        try:
            view = flat(payload)
        except TypeError:
            raise UsageError(f"a payload is bytes or a view, not {type(payload).__name__}") from None
        if not view.nbytes:
            self._messages.append(partial(self._core.publish, key, b""))
            return
        if not self._core.payloads.is_open:
            self._core.check_size(view.nbytes)
        memory, offset = self._arena.write(view)
        self._messages.append(partial(self._core.build_range, key, memory, offset, view.nbytes))

    def packets(self) -> list[bytes]:
        """End the batch, and return the packets to send.

        :raises sbus.errors.PacketTooLong: if a message is too long for the server.
        """
        self._check_open()
        self._is_over = True
        self._arena.seal()
        messages, self._messages = self._messages, []
        return [build() for build in messages]

    def send(self) -> T:
        """End the batch: seal the memory, and send the messages in order; done when the kernel has them all.

        :raises: as ``publish_many``.
        """
        self._check_open()
        return self._publish(self)

    def discard(self) -> None:
        """End the batch and send nothing."""
        self._is_over = True
        self._messages.clear()
        self._arena = Arena(0)

    def _check_open(self) -> None:
        if self._is_over:
            raise UsageError("this batch has ended: begin another one with payloads()")


class BlockingPayloadBatch(PayloadBatch[None]):
    """A batch of the blocking client: the end of ``with`` sends it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is not None:
            self.discard()
        elif not self._is_over:
            self.send()


class AsyncPayloadBatch(PayloadBatch[Awaitable[None]]):
    """A batch of the asyncio or the Twisted client: the end of ``async with`` sends it."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if kind is not None:
            self.discard()
        elif not self._is_over:
            await self.send()
