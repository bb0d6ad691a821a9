"""Waiting in a blocking client: deadlines, and waiters to ask."""

from __future__ import annotations

import time
from collections.abc import Generator

from sbus.client.arguments import check_seconds
from sbus.routing.runs import total_size

__all__ = ["PolledWaiter", "buffer_bytes", "deadline_in"]

_PACKET_OVERHEAD = 512
"""Bytes of a socket's buffer that the kernel charges for a packet besides its own, at least."""


class PolledWaiter:
    """A waiter (`sbus.client.core.Waiter`) whose owner reads until `is_done`."""

    __slots__ = ("_error", "_value")

    def __init__(self) -> None:
        self._value: bytes | None = None
        self._error: Exception | None = None

    def set_result(self, value: bytes) -> None:
        """Complete with a value."""
        if self._error is None and self._value is None:
            self._value = value

    def set_exception(self, error: Exception) -> None:
        """Complete with an error."""
        if not self.is_done():
            self._error = error

    def has_succeeded(self) -> bool:
        """Return whether it has a value."""
        return self._value is not None

    def is_done(self) -> bool:
        """Return whether it has a value or an error."""
        return self._value is not None or self._error is not None

    def __await__(self) -> Generator[PolledWaiter, None, bytes]:
        if not self.is_done():
            yield self
        if self._error is not None:
            raise self._error
        assert self._value is not None
        return self._value


def deadline_in(timeout: float | None) -> float | None:
    """Return the `time.monotonic` in `timeout` seconds; None for never.

    :raises sbus.errors.UsageError: if it is no number.
    """
    return None if timeout is None else time.monotonic() + check_seconds(timeout)


def buffer_bytes(packets: list[bytes]) -> int:
    """Return roughly how many bytes of a socket's buffer these packets took up."""
    return total_size(packets) + len(packets) * _PACKET_OVERHEAD
