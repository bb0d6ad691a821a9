"""The standard streams of a command: writing is complete or fails, and reading has a deadline.

Theory of operation
-------------------

Python's own standard output depends on the surroundings. With ``PYTHONUNBUFFERED`` a write that the kernel takes in
part ends there, and nobody looks at the result. If another program has made the pipe or the terminal non-blocking,
which is a property that all of its holders share, a full pipe is an exception. And the first error may come after the
command has decided that it succeeded, when the interpreter flushes its buffers.

So `open_streams` replaces both outputs by buffers in front of a `_Sink`, whose ``write`` repeats write(2) until all is
written. It waits where the descriptor would block, and keeps the first error. `Streams.finish` flushes, and asks
close(2) too, because network file systems and quotas report some errors only there. After an error further output is
dropped: it would be after a hole. Output to standard error must not change the result of a command, so an error there
is ignored.

Commands write to ``sys.stdout`` or its ``buffer`` as usual. They read standard input, or a file that the user names,
through `open_input`: reading waits with poll(2), whether the descriptor is non-blocking or not, until a deadline.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import TYPE_CHECKING, BinaryIO

from sbus.cli.unread import unread
from sbus.syscalls.polling import is_readable, is_writable

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

    from sbus.cli.deadline import Deadline

__all__ = ["Streams", "name_of", "occupy_closed", "open_input", "open_streams", "write_whole"]

_BUFFER = 65536
"""Bytes that are collected before they are written."""


def write_whole(fd: int, data: ReadableBuffer) -> None:
    """Write all of it, however often the descriptor takes only a part or would block.

    :raises OSError: as write(2) does.
    """
    rest = memoryview(data).cast("B")
    while rest:
        try:
            written = os.write(fd, rest)
        except BlockingIOError:
            is_writable(fd, None)
            continue
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        rest = rest[written:]


class _Sink(io.RawIOBase):
    """A descriptor that takes everything, until a write has failed.

    :param name: its name in errors.
    :param is_vital: whether an error is raised.
    :ivar error: the first error.
    """

    def __init__(self, fd: int, name: str, *, is_vital: bool) -> None:
        self.name = name
        self.error: OSError | None = None
        self._fd = fd
        self._is_vital = is_vital

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def writable(self) -> bool:
        return True

    def write(self, data: ReadableBuffer) -> int:
        if self.error is None:
            try:
                write_whole(self._fd, data)
            except ConnectionResetError:  # a socket whose reader has gone, as EPIPE is
                self.error = BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE), self.name)
            except OSError as e:
                self.error = OSError(e.errno, e.strerror, self.name)
            if self.error is not None and self._is_vital:
                raise self.error
        return memoryview(data).nbytes

    def check_close(self) -> None:
        """Ask close(2) for errors that write(2) has not reported."""
        try:
            os.close(os.dup(self._fd))  # each close reports them, also that of a copy
        except OSError as e:
            self.error = self.error or OSError(e.errno, e.strerror, self.name)


class Streams:
    """The standard outputs of this process; `open_streams` makes them."""

    def __init__(self, sink: _Sink, output: io.TextIOWrapper) -> None:
        self._sink = sink
        self._output = output

    def finish(self) -> None:
        """Write the rest.

        :raises OSError: if standard output is incomplete, now or since an earlier error.
        """
        self._output.flush()
        self._sink.check_close()
        if self._sink.error is not None:
            raise self._sink.error


def open_streams() -> Streams:
    """Replace ``sys.stdout`` and ``sys.stderr``, and open those of 0 to 2 that the caller has closed.

    Closed standard input is empty. Writing to a closed standard output must fail, as it does for other programs. Output
    to a closed standard error is lost.
    """
    occupy_closed()
    sink = _Sink(1, "standard output", is_vital=True)
    output = sys.stdout = _text(sink, sys.stdout, line_buffering=sink.isatty())
    sys.stderr = _text(_Sink(2, "standard error", is_vital=False), sys.stderr, line_buffering=True)
    return Streams(sink, output)


def occupy_closed() -> None:
    """Open closed ones of the descriptors 0 to 2, so that nothing else gets their numbers, such as a connection."""
    for fd, flags in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, flags | os.O_CLOEXEC)


def _text(sink: _Sink, before: object, *, line_buffering: bool) -> io.TextIOWrapper:
    """Return a text stream with the encoding of another one; of UTF-8 if that is None."""
    return io.TextIOWrapper(
        io.BufferedWriter(sink, _BUFFER),
        encoding=getattr(before, "encoding", None) or "utf-8",
        errors=getattr(before, "errors", None) or "backslashreplace",
        newline="\n",
        line_buffering=line_buffering,
    )


class _Source(io.RawIOBase):
    """A descriptor to read from until a deadline."""

    def __init__(self, fd: int, name: str, deadline: Deadline) -> None:
        self.name = name
        self._fd = fd
        self._deadline = deadline

    def fileno(self) -> int:
        return self._fd

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        if self._fd == 0 and unread:
            view = memoryview(buffer).cast("B")
            part = bytes(unread[: len(view)])
            view[: len(part)] = part
            del unread[: len(part)]
            return len(part)
        while True:
            while not is_readable(self._fd, self._deadline.left):
                self._deadline.check()
            try:
                return os.readv(self._fd, [buffer])
            except BlockingIOError:  # another program was faster
                continue
            except OSError as e:
                raise OSError(e.errno, e.strerror, self.name) from None


def open_input(file: BinaryIO | None, deadline: Deadline) -> io.BufferedReader:
    """Return a reader of a file, or of standard input, that raises `TimedOut` when the deadline has passed.

    :param file: a file that was just opened; None for standard input.
    """
    fd = 0 if file is None else file.fileno()
    return io.BufferedReader(_Source(fd, "standard input" if fd == 0 else str(file and file.name), deadline), _BUFFER)


def name_of(stream: io.BufferedReader) -> str:
    """Return what errors call the input."""
    return str(stream.name)
