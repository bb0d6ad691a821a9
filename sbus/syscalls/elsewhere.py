"""Closing what a peer has passed to us, in threads of its own: close(2) can wait for as long as the peer likes.

It waits for a TCP socket with SO_LINGER whose other end does not read, and for the program behind a file of FUSE. A
peer that passes such a descriptor could stop this process for hours. The kernel closes what nobody has received, too:
the descriptors for which recvmsg(2) had no room, and those in a socket that is closed unread.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread

__all__ = ["do_elsewhere", "is_behind", "is_overrun"]

_MOST = 16
"""Threads: so many calls may wait for ever before others wait behind them."""
_MANY = 1024
"""Calls that wait, each with a descriptor: a peer must not take all that the process may have (20,000 in our units)."""
_calls: SimpleQueue[Callable[[], object]] = SimpleQueue()
_threads: list[Thread] = []
_idle: list[None] = []  # one for each thread that waits for a call; a destructor may come between any two steps
os.register_at_fork(after_in_child=_threads.clear)
os.register_at_fork(after_in_child=_idle.clear)


def do_elsewhere(call: Callable[[], object]) -> None:
    """Call something in a thread that nothing waits for; an `OSError` is ignored.

    It may be called by a destructor.
    """
    _calls.put(call)
    if _idle:
        with contextlib.suppress(IndexError):  # another thread was faster
            _idle.pop()
            return
    if len(_threads) < _MOST:
        thread = Thread(target=_work, name="sbus-closer", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the kernel has no thread left, or Python ends
            return
        _threads.append(thread)


def is_behind() -> bool:
    """Return whether calls wait for a thread; what does not take for ever is then better done at once."""
    return _calls.qsize() > _MOST


def is_overrun() -> bool:
    """Return whether so many calls wait that nobody else should be allowed to pass descriptors."""
    return _calls.qsize() > _MANY


def _work() -> None:
    while True:
        _idle.append(None)
        call = _calls.get()
        try:
            call()
        except OSError:
            pass
        del call
