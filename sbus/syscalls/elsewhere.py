"""Closing what a peer has passed to us, in other threads: close(2) can wait for as long as the peer likes.

It waits for a TCP socket with SO_LINGER whose other end does not read, and for the program behind a file of FUSE. A
peer that passes such a descriptor could stop this process for hours. The kernel closes what nobody has received, too:
the descriptors for which recvmsg(2) had no room, and those in a socket that is closed unread.

Calls wait in *lines*, each with a thread as long as it has calls. The calls of one user wait for each other only.
"""

from __future__ import annotations

import _thread
import contextlib
import os
from collections import deque
from collections.abc import Callable

__all__ = ["do_elsewhere", "is_behind", "is_overrun"]

_FEW = 16
"""Calls that wait, beyond which a thread is slower than those who call it."""
_MANY = 256
"""Calls of one user that wait, each with a descriptor: the next read brings up to 2,024 more (8 packets of 253), and a
user must not take all that the process may have (20,000 in our units)."""


class _Line:
    """Calls of which each waits for the one before it."""

    __slots__ = ("calls", "is_running")

    def __init__(self) -> None:
        self.calls: deque[Callable[[], object]] = deque()
        self.is_running = False

    def start(self) -> None:
        """Have a thread make the calls, if none does."""
        if not self.is_running:
            self.is_running = True
            try:
                _thread.start_new_thread(self._run, ())
            except RuntimeError:  # the kernel has no thread left, or Python ends
                self.is_running = False

    def _run(self) -> None:
        """Make the calls; return when there is none left."""
        while True:
            try:
                call = self.calls.popleft()
            except IndexError:
                self.is_running = False
                if not self.calls or self.is_running:  # else one came between these two lines, and no other thread
                    return
                self.is_running = True
                continue
            with contextlib.suppress(OSError, MemoryError):
                call()
            del call


_lines: dict[int | None, _Line] = {}
os.register_at_fork(after_in_child=_lines.clear)


def do_elsewhere(call: Callable[[], object], user: int | None) -> None:
    """Call something in a thread that nothing waits for; an `OSError` or `MemoryError` is ignored.

    It may be called by a destructor, so it takes no lock: at worst, a line has two threads for a while.

    :param user: the user who decides how long it takes; None: nobody does.
    """
    line = _lines.get(user) or _lines.setdefault(user, _Line())
    line.calls.append(call)
    line.start()


def is_behind() -> bool:
    """Return whether calls that nobody delays wait all the same; the next one is better made at once."""
    line = _lines.get(None)
    return line is not None and len(line.calls) > _FEW


def is_overrun(user: int) -> bool:
    """Return whether so many calls of a user wait that nothing more should be read from it."""
    line = _lines.get(user)
    if line is None or len(line.calls) <= _MANY:
        return False
    line.start()  # there may have been no thread, and nothing that is read will ask for one
    return True
