"""Closing a peer's descriptors in other threads: close(2) can wait for as long as the peer likes.

It waits for a TCP socket with SO_LINGER whose other end does not read, and for the program that serves a file of FUSE.
A peer that passes such a descriptor could stop this process for hours. The kernel closes unreceived descriptors, too:
those for which recvmsg(2) had no room, and those in a socket that is closed unread.

The calls that wait for one user are a `Closing`. They are made one by one, so a user delays only itself. All users
share 64 threads that peers can keep busy, and one for sealed memory, which takes CPU time alone: peers who keep all 64
busy delay only the closing of descriptors other than sealed memory.
"""

from __future__ import annotations

import _thread
import contextlib
import os
from collections import deque
from collections.abc import Callable

__all__ = ["NOBODY", "Closing"]

_FEW = 16
"""Calls that wait, beyond which the thread for memory is slower than those who call it."""
_MANY = 256
"""Calls of one user that wait, each with a descriptor: the next read brings up to 2,024 more (8 packets of 253), and a
user must not take all that the process may have (20,000 in our units)."""
_MOST_HELD_UP = 64
"""Threads that peers can keep busy: with one for each user, a user with 65,536 subordinate UIDs had as many."""


class _Threads:
    """Threads that make the calls of all lines, in turn; they end when no line waits.

    There is no lock, as a destructor may need them. At worst, a line has two threads for a while.

    :ivar lines: the lines that wait for a thread.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.reset()

    def reset(self) -> None:
        """Begin anew, without threads."""
        self.lines: deque[_Line] = deque()
        self._places = deque(range(self._most))

    def start(self) -> None:
        """Have one more thread, if a line waits and there may be one more."""
        if not self.lines:
            return
        try:
            place = self._places.pop()
        except IndexError:
            return
        try:
            _thread.start_new_thread(self._run, (place,))
        except RuntimeError:  # the kernel has no thread left, or Python ends
            self._places.append(place)

    def _run(self, place: int) -> None:
        try:
            while True:
                self.lines.popleft().make_one()
        except IndexError:
            pass
        finally:
            self._places.append(place)
            self.start()  # a line came before the place was free, or a call has failed


class _Line:
    """Calls of which each waits for the one before it."""

    __slots__ = ("_among", "_threads", "calls")

    def __init__(self, threads: _Threads) -> None:
        self.calls: deque[tuple[Callable[[], object], Closing]] = deque()
        self._threads = threads
        self._among: object = None  # the lines among which this one waits, or has a thread

    def add(self, call: Callable[[], object], closing: Closing) -> None:
        """Have a thread make a call.

        :param closing: the owner of the line, which the call keeps.
        """
        if self._among is not None and self._among is not self._threads.lines:
            self.calls.clear()  # this is a child of fork(2): they are those of its parent
        self.calls.append((call, closing))
        self._go_on()

    def _go_on(self) -> None:
        lines = self._threads.lines
        if self._among is not lines:
            self._among = lines
            lines.append(self)
            self._threads.start()

    def make_one(self) -> None:
        """Make the first call."""
        try:
            call, closing = self.calls.popleft()
            with contextlib.suppress(OSError, MemoryError):
                call()
            del call, closing
        finally:
            self._among = None
            if self.calls:
                self._go_on()

    def has_many(self) -> bool:
        """Return whether more calls wait than the limit allows."""
        if len(self.calls) <= _MANY:
            return False
        self._threads.start()  # there may have been none, and no packet that is read will ask for one
        return True


_held_up = _Threads(_MOST_HELD_UP)
_freeing = _Threads(1)


def _forget() -> None:
    _held_up.reset()
    _freeing.reset()


os.register_at_fork(after_in_child=_forget)


class Closing:
    """The waiting calls for all that one user has passed; it exists at least as long as a call waits.

    An `OSError` or `MemoryError` of a call is ignored. A destructor may call these methods.
    """

    __slots__ = ("_closing", "_freeing")

    def __init__(self) -> None:
        self._closing: _Line | None = None  # most users pass nothing, and a line takes 0.7 kB
        self._freeing: _Line | None = None

    def close(self, call: Callable[[], object]) -> None:
        """Have something closed by a thread that nothing waits for: the user decides how long it takes."""
        line = self._closing = self._closing or _Line(_held_up)
        line.add(call, self)

    def free(self, call: Callable[[], object]) -> None:
        """Have sealed memory freed in the same way: it takes CPU time alone."""
        line = self._freeing = self._freeing or _Line(_freeing)
        line.add(call, self)

    def is_behind(self) -> bool:
        """Return whether memory waits, which nobody delays, so that the next is better freed at once."""
        return self._freeing is not None and len(self._freeing.calls) > _FEW

    def is_overrun(self) -> bool:
        """Return whether the waiting calls are so numerous that nothing more should be read from the user."""
        lines = self._closing, self._freeing
        return any(line is not None and line.has_many() for line in lines)


NOBODY = Closing()
"""The waiting calls for descriptors that no user of a server has passed."""
