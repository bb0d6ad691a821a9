"""A disk that fails on demand, and that can leave of the files what a power cut could."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from sbus import ownership
from sbus.journal import disk

__all__ = ["Crash", "FaultyDisk", "let_go"]


class Crash(BaseException):
    """Ends the "process" at this step."""


class _File:
    """The state of one file.

    :ivar durable: the content that survives a power cut.
    :ivar dirty: for each byte of the file, 0xff if the next sync writes it, else 0.
    :ivar is_named: whether the name survives a power cut.
    """

    def __init__(self, durable: bytes = b"", is_named: bool = False) -> None:
        self.durable = bytearray(durable)
        self.dirty = bytearray(len(durable))
        self.is_named = is_named

    def synced(self, content: bytes) -> bytearray:
        """Return the durable content after a sync; bytes that a failed sync marked clean are not written."""
        old = self.durable[: len(content)].ljust(len(content), b"\0")
        new, was, dirty = (int.from_bytes(each) for each in (content, old, self.dirty))
        return bytearray((was ^ ((was ^ new) & dirty)).to_bytes(len(content)))


class FaultyDisk:
    """Replaces `os` in `sbus.journal.disk` and below: calls the real functions, but never waits for a real sync.

    :ivar steps: the number of calls so far that changed or synced something.
    :ivar fails: called with the number and the name of each such step; raises the error of that step.
    :ivar part: the part of the bytes that a failing write still writes, in 1/256.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.fails: Callable[[int, str], None] = lambda step, name: None
        self.part = 128
        self.is_dead = False
        self._files: dict[str, _File] = {}

    @contextmanager
    def __call__(self) -> Iterator[FaultyDisk]:
        with mock.patch.object(disk, "os", self), mock.patch.object(ownership, "os", self):
            yield self

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def fail_from(self, first: int, count: int, *names: str, error: int = errno.ENOSPC) -> None:
        """Make `count` steps fail from step `first` on; without `names` every step counts, else only those."""
        steps = itertools.count()

        def fails(step: int, name: str) -> None:
            if (not names or name in names) and first <= next(steps) < first + count:
                raise OSError(error, os.strerror(error))

        self.fails = fails

    def crash_at(self, at: int) -> None:
        """End the process `at` steps from now."""
        at += self.steps

        def fails(step: int, name: str) -> None:
            if step >= at:
                self.is_dead = True
            if self.is_dead:
                raise Crash

        self.fails = fails

    def work_again(self) -> None:
        """Stop failing."""
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
            if self.steps % 4 == 0:  # a write may always be short
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
            # Also after a failure: the kernel marks pages clean that it failed to write.
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
        """Leave of every file what a power cut could leave.

        :param choose: returns one of the numbers below its argument.
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
        # Bytes that were overwritten by the same bytes are on the disk in any case.
        old = file.durable
        pending = [at for at, dirty in enumerate(file.dirty) if dirty and (at >= len(old) or content[at] != old[at])]
        how = choose(5)
        if how == 0 or not pending:
            return bytes(left)  # everything was written
        if how == 1:
            return bytes(file.durable)  # nothing was
        at = pending[choose(len(pending))]
        if how == 2:
            return bytes(left[: max(at, len(file.durable))])
        for place in pending[pending.index(at) :] if how == 3 else [at]:
            left[place] = 0 if how == 3 else left[place] ^ (1 << choose(8))
        return bytes(left)


def let_go(directory: Any) -> None:
    """Close all files below a directory that this process has open, as its death would."""
    for fd in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith(os.path.realpath(directory) + "/"):
                os.close(int(fd))
        except FileNotFoundError:  # the descriptor of the listing itself
            pass
