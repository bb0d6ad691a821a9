"""How a command that runs for long stops: between two steps, at a signal."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

__all__ = ["StopRequest", "stop_on_signals"]


class StopRequest:
    """Whether a signal has asked this process to stop.

    :ivar is_made: true from the first signal on.
    """

    def __init__(self) -> None:
        self.is_made = False
        self._batches_done = 0

    def is_due(self, *, is_busy: bool, done: int) -> bool:
        """Return whether to stop now, between two batches.

        That is when no batch is running, or when the batch that ran at the request is done.

        Call this regularly from the start on. Under load one batch follows another at once, and a caller hardly ever
        sees a moment between two of them; therefore it counts.

        :param is_busy: whether a batch is running.
        :param done: batches done so far.
        """
        if not self.is_made:
            self._batches_done = done
            return False
        return not is_busy or done > self._batches_done


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Make SIGINT and SIGTERM request an orderly stop.

    A second signal stops at once (KeyboardInterrupt).
    """
    stop = StopRequest()

    def on_signal(*_: object) -> None:
        if stop.is_made:
            raise KeyboardInterrupt
        stop.is_made = True

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
