"""Stop a long-running command at a signal: between two steps, or at once without leaving an unfinished file."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import NoReturn

__all__ = ["StopRequest", "Terminated", "end_by", "stop_on_signals", "unwinding"]


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


class Terminated(BaseException):
    """SIGTERM has arrived; `sbus.cli.main` ends the process by it."""


@contextlib.contextmanager
def unwinding() -> Iterator[None]:
    """Make SIGTERM unwind the block like an exception before it ends the process, to remove unfinished files."""

    def on_signal(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would stop the removal
        raise Terminated

    before = signal.signal(signal.SIGTERM, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def end_by(number: int) -> NoReturn:
    """End by a signal, so that a shell reports 128 plus its number and ends its loops.

    The first process of a container survives its own signals, and exits with that status.
    """
    signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})  # a mask is inherited
    os.kill(os.getpid(), number)
    os._exit(128 + number)
