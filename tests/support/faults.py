"""A disk that fails on demand, and that tells what would be left of its files after a power cut."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from sbus.journal import disk

__all__ = ["Crash", "FaultyDisk", "let_go"]


class Crash(BaseException):
    """The process has died here."""


class _File:
    """What is known of one file.

    :ivar durable: what is on the disk for good.
    :ivar dirty: 0xff for each byte of the file that will be written by the next sync, else 0.
    :ivar is_named: whether its name is there for good.
    """

    def __init__(self, durable: bytes = b"", is_named: bool = False) -> None:
        self.durable = bytearray(durable)
        self.dirty = bytearray(len(durable))
        self.is_named = is_named

    def synced(self, content: bytes) -> bytearray:
        """What is on the disk after all dirty pages were written; what a failed sync has forgotten stays forgotten."""
        old = self.durable[: len(content)].ljust(len(content), b"\0")
        new, was, dirty = (int.from_bytes(each) for each in (content, old, self.dirty))
        return bytearray((was ^ ((was ^ new) & dirty)).to_bytes(len(content)))


class FaultyDisk:
    """Stands for `os` in `sbus.journal.disk`; what it is not told to do wrong it does, except that it never waits.

    :ivar steps: how many calls have changed something, or synced something, so far.
    :ivar fails: called with the number and name of each such step; raises what is to go wrong in it.
    :ivar part: of 256, how much of the bytes is written by a write that fails.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.fails: Callable[[int, str], None] = lambda step, name: None
        self.part = 128
        self.is_dead = False
        self._files: dict[str, _File] = {}

    @contextmanager
    def __call__(self) -> Iterator[FaultyDisk]:
        with mock.patch.object(disk, "os", self):
            yield self

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def fail_from(self, first: int, count: int, *names: str, error: int = errno.ENOSPC) -> None:
        """Let so many steps from this one on fail; only those of these names count (all without names)."""
        steps = itertools.count()

        def fails(step: int, name: str) -> None:
            if (not names or name in names) and first <= next(steps) < first + count:
                raise OSError(error, os.strerror(error))

        self.fails = fails

    def crash_at(self, at: int) -> None:
        """Let the process die in this step."""
        at += self.steps

        def fails(step: int, name: str) -> None:
            if step >= at:
                self.is_dead = True
            if self.is_dead:
                raise Crash

        self.fails = fails

    def work_again(self) -> None:
        """Let nothing fail any more."""
        self.is_dead = False
        self.fails = lambda step, name: None

    def _step(self, name: str) -> None:
        self.steps += 1
        self.fails(self.steps - 1, name)

    def _file(self, fd: int) -> _File:
        path = os.readlink(f"/proc/self/fd/{fd}")
        if path not in self._files:
            with open(path, "rb") as opened:
                self._files[path] = _File(opened.read(), is_named=True)
        return self._files[path]

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT:
            self._step("open")
        fd = os.open(path, flags, mode)
        if flags & os.O_CREAT:
            self._files[os.path.realpath(path)] = _File()
        return fd

    def pwrite(self, fd: int, data: memoryview, at: int) -> int:
        file = self._file(fd)
        try:
            self._step("pwrite")
        except BaseException:
            data = data[: len(data) * self.part // 256]
            raise
        else:
            if self.steps % 4 == 0:  # the kernel may always write less than it was given
                data = data[: max(1, len(data) * 2 // 3)]
            return len(data)
        finally:
            os.pwrite(fd, data, at)
            end = at + len(data)
            file.dirty = file.dirty.ljust(end, b"\xff")
            file.dirty[at:end] = b"\xff" * len(data)

    def ftruncate(self, fd: int, length: int) -> None:
        self._step("ftruncate")
        os.ftruncate(fd, length)
        file = self._file(fd)
        file.dirty = file.dirty[:length].ljust(length, b"\xff")

    def fdatasync(self, fd: int) -> None:
        file = self._file(fd)
        content = os.pread(fd, os.fstat(fd).st_size, 0)
        try:
            self._step("fdatasync")
            file.durable = file.synced(content)
        finally:
            # After a failure too: the kernel takes what it failed to write for written.
            file.dirty = bytearray(len(content))

    def fsync(self, fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        if os.path.isdir(path):
            self._step("fsync")
            for name, file in self._files.items():
                if os.path.dirname(name) == path:
                    file.is_named = True
        else:
            self.fdatasync(fd)

    def rename(self, old: str, new: str) -> None:
        self._step("rename")
        os.rename(old, new)
        self._files[os.path.realpath(new)] = self._files.pop(os.path.realpath(old))

    def unlink(self, path: str) -> None:
        if os.path.exists(path):
            self._step("unlink")
        os.unlink(path)
        self._files.pop(os.path.realpath(path), None)

    def cut_power(self, choose: Callable[[int], int]) -> None:
        """Leave of every file what a power cut could.

        :param choose: of so many possibilities.
        """
        for path in sorted(self._files):
            file = self._files.pop(path)
            if not os.path.exists(path):
                continue
            if not file.is_named and choose(2):
                os.unlink(path)
                continue
            with open(path, "r+b") as opened:
                content = opened.read()
                left = self._left(file, content, choose)
                opened.seek(0)
                opened.truncate()
                opened.write(left)

    def _left(self, file: _File, content: bytes, choose: Callable[[int], int]) -> bytes:
        if len(content) < len(file.durable):
            return [content, bytes(file.durable)][choose(2)]
        left = file.synced(content)
        # What was written over itself is on the disk already, before and after.
        old = file.durable
        pending = [at for at, dirty in enumerate(file.dirty) if dirty and (at >= len(old) or content[at] != old[at])]
        how = choose(5)
        if how == 0 or not pending:
            return bytes(left)  # all of it came onto the disk
        if how == 1:
            return bytes(file.durable)  # nothing did
        at = pending[choose(len(pending))]
        if how == 2:
            return bytes(left[: max(at, len(file.durable))])
        for place in pending[pending.index(at) :] if how == 3 else [at]:
            left[place] = 0 if how == 3 else left[place] ^ (1 << choose(8))
        return bytes(left)


def let_go(directory: Any) -> None:
    """Close every file in a directory that this process has open, as if it had died."""
    for fd in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith(os.path.realpath(directory) + "/"):
                os.close(int(fd))
        except FileNotFoundError:  # the one that lists
            pass
