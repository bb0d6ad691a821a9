"""Processes of the attacking user and of the bystander: forked, bounded in time, ended by their IDs."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, Self

__all__ = [
    "ATTACKER",
    "BYSTANDER",
    "ROOT",
    "Board",
    "Swarm",
    "User",
    "attackers",
    "bystanders",
    "connect_as",
    "die_with_parent",
    "fork",
    "spin",
]

_PR_SET_PDEATHSIG = 1
_SLOT = 2
"""Numbers for each process on a board: whether it is ready, and how often it has acted."""

_libc = ctypes.CDLL(None)
_context = multiprocessing.get_context("fork")


class User(NamedTuple):
    """A UID and a GID that belong to no account of the machine."""

    uid: int
    gid: int


ATTACKER = User(12001, 12001)
BYSTANDER = User(12002, 12002)
ROOT = User(0, 0)


def attackers(number: int) -> tuple[User, ...]:
    """Return several attacking users."""
    return tuple(User(uid, uid) for uid in range(12_100, 12_100 + number))


def bystanders(number: int) -> tuple[User, ...]:
    """Return several bystanders, of which `BYSTANDER` is the first."""
    return (BYSTANDER, *(User(uid, uid) for uid in range(12_200, 12_200 + number - 1)))


def connect_as(user: User, address: str) -> socket.socket:
    """Connect as another user; only root can."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        os.setegid(user.gid)
        os.seteuid(user.uid)
        sock.connect(address)
    except BaseException:
        sock.close()
        raise
    finally:
        os.seteuid(ROOT.uid)
        os.setegid(ROOT.gid)
    return sock


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends (prctl(2), PR_SET_PDEATHSIG)."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def fork(user: User, seconds: float, function: Callable[..., None], *args: Any) -> BaseProcess:
    """Run a function in a process of another user, which ends after `seconds` at the latest."""
    process = _context.Process(target=_run, args=(user, seconds, function, args), daemon=True)
    process.start()
    return process


def _run(user: User, seconds: float, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    limit = threading.Timer(seconds, os._exit, (1,))
    limit.daemon = True
    limit.start()
    os.setgroups([])
    os.setresgid(user.gid, user.gid, user.gid)
    os.setresuid(user.uid, user.uid, user.uid)
    die_with_parent()  # after setresuid, which clears it
    try:
        function(*args)
    except Exception:
        # multiprocessing prints it too, but imports what it needs only then, and this user may not read the library.
        traceback.print_exc()
        os._exit(1)


class Board:
    """Shared memory in which attacking processes report; it stays readable after they were killed."""

    def __init__(self, processes: int) -> None:
        self._cells = memoryview(mmap.mmap(-1, max(1, processes) * _SLOT * 8)).cast("Q")

    def mark_ready(self, index: int) -> None:
        self._cells[index * _SLOT] = 1

    def add(self, index: int, actions: int) -> None:
        self._cells[index * _SLOT + 1] += actions

    @property
    def ready(self) -> int:
        """Processes that have finished their set-up."""
        return sum(self._cells[::_SLOT])

    @property
    def actions(self) -> int:
        """Connections, packets or bundles, as each attack counts them."""
        return sum(self._cells[1::_SLOT])


class Swarm:
    """The processes of one attack, or the spinners; a context manager that kills them at its end.

    :param parts: one function for each process; it is called with the board and its index there.
    :param seconds: the alarm clock of each process.
    :param users: the users of the processes; by default all are the attacker's.
    """

    def __init__(
        self, parts: Sequence[Callable[[Board, int], None]], seconds: float, users: Sequence[User] = ()
    ) -> None:
        self._parts = parts
        self._users = users or (ATTACKER,) * len(parts)
        self._seconds = seconds
        self._processes: list[BaseProcess] = []
        self.board = Board(len(parts))

    def __enter__(self) -> Self:
        for index, (user, part) in enumerate(zip(self._users, self._parts, strict=True)):
            self._processes.append(fork(user, self._seconds, part, self.board, index))
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    @property
    def is_ready(self) -> bool:
        return self.board.ready == len(self._parts)

    @property
    def failed(self) -> int:
        """Processes that an error of their own has ended."""
        return sum(1 for process in self._processes if process.exitcode)


def spin(board: Board, index: int, deadline: float) -> None:
    """Use CPU time and nothing else until the deadline."""
    board.mark_ready(index)
    while time.monotonic() < deadline:
        for _ in range(10_000):
            pass
