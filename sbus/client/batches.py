"""Batches: several large messages in one memory, which is created, sealed, checked and mapped once.

The application makes its payloads in the memory of the batch. The end of the block seals the memory and sends the
messages; an exception in the block sends nothing.

A writable map forbids the seal. The batch therefore takes back the views that it has given out, and those that were
published. What the application has made of a view, such as a numpy array, it must delete itself. Rejected: to put a
private map in the place of the shared one, so that such an array could live on. Writing to it would then change a copy
without a word.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Generic, Self, TypeVar

from sbus.client.core import ClientCore
from sbus.client.payloads import Arena, Buffer, flat
from sbus.errors import UsageError
from sbus.syscalls.memfd import Memfd

__all__ = ["AsyncPayloadBatch", "BlockingPayloadBatch", "PayloadBatch"]

T = TypeVar("T")

_IN_USE = (
    "something still uses the memory of the batch, so it cannot be sealed: delete what was made of a view, such as a "
    "numpy array or a slice (del array), before the batch ends; nothing was sent"
)


class PayloadBatch(Generic[T]):
    """Several messages whose payloads are in one memory; made by the ``payloads`` of a bus.

    :param core: the client.
    :param publish: sends the packets of the batch; it is called once.
    """

    def __init__(self, core: ClientCore, publish: Callable[[PayloadBatch[T]], T]) -> None:
        self._core = core
        self._publish = publish
        self._arena = Arena(core.longest_payload)
        self._views: list[memoryview] = []
        self._messages: list[tuple[bytes, Memfd, int, int] | tuple[bytes]] = []
        self._is_over = False

    def allocate(self, size: int) -> memoryview:
        """Return a writable view of `size` bytes, all zero, at an address that is a multiple of 64.

        It is valid until the batch ends.

        :raises sbus.errors.PacketTooLong: if the server does not take payloads of that size (``--max-payload``).
        :raises sbus.errors.UsageError: if `size` is not positive, or the batch has ended.
        """
        self._check_open()
        if size < 1:
            raise UsageError(f"allocate({size}): a view has at least 1 byte")
        if not self._core.payloads.is_open:
            self._core.check_size(size)
        view = self._arena.allocate(size)
        self._views.append(view)
        return view

    def publish(self, key: bytes | str, payload: Buffer) -> None:
        """Publish a message when the batch ends, after those before it.

        :param payload: a view from `allocate`, a part of one, or another object with such memory (a numpy array):
            these are not copied. Any other bytes are copied into the memory of the batch now.
        :raises sbus.errors.InvalidKey: if the protocol does not allow the key.
        :raises sbus.errors.PacketTooLong: if the server does not take payloads of that size (``--max-payload``).
        :raises sbus.errors.UsageError: if the payload is not bytes, or the batch has ended.
        """
        self._check_open()
        key = self._core.check_key(key)
        try:
            view = flat(payload)
        except TypeError:
            raise UsageError(f"a payload is bytes or a view, not {type(payload).__name__}") from None
        if not view.nbytes:
            self._messages.append((key,))
            return
        if not self._core.payloads.is_open:
            self._core.check_size(view.nbytes)
        memory, offset = self._arena.find(view) or self._arena.write(view)
        self._messages.append((key, memory, offset, view.nbytes))
        view.release()
        if isinstance(payload, memoryview):
            self._views.append(payload)

    def packets(self) -> list[bytes]:
        """End the batch, and return the packets to send.

        :raises sbus.errors.UsageError: if something still uses the memory.
        :raises sbus.errors.PacketTooLong: if a message is too long for the server.
        """
        self._check_open()
        self._is_over = True
        try:
            for view in self._views:
                view.release()
            self._arena.seal()
        except BufferError:
            raise UsageError(_IN_USE) from None
        messages, self._messages, self._views = self._messages, [], []
        for message in messages:
            if len(message) > 1:
                self._core.check_size(message[3])
        return [
            self._core.build_range(*message) if len(message) > 1 else self._core.publish(message[0], b"")
            for message in messages
        ]

    def send(self) -> T:
        """End the batch: seal the memory, and send the messages in order; done when the kernel has them all.

        :raises sbus.errors.UsageError: if something still uses the memory; nothing is sent then.
        :raises: as ``publish_many``.
        """
        self._check_open()
        return self._publish(self)

    def discard(self) -> None:
        """End the batch and send nothing."""
        self._is_over = True
        self._messages.clear()
        self._views.clear()
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
