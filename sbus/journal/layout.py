"""The files of a journal, and what their names and ``journal.json`` state.

The names alone give the order of the segments, and the first row of each with its time and its epoch: `list_segments`
opens no file.

A pattern of directories names those of other users, too, who can put anything in the place of a file. So every file is
read through `open_plain`.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

from sbus.errors import JournalError, JournalMissing, JournalUnreadable
from sbus.journal.schema import Format, find_format

__all__ = [
    "ARROWS",
    "BAD_DISK",
    "IDENTITY",
    "INDEX",
    "LATEST",
    "LOCK",
    "SUMMARY",
    "Identity",
    "Segment",
    "is_journal",
    "link_error",
    "list_segments",
    "open_plain",
    "read_blocks",
    "read_identity",
    "read_object",
]

IDENTITY = "journal.json"
"""The file that makes a directory a journal."""
LOCK = "lock"
"""The file that the writer holds with flock(2)."""
ARROWS, INDEX, SUMMARY = ".arrows", ".idx", ".json"
"""The suffixes of the three files of a segment. Only a closed segment has a summary."""

LATEST = 10**16 - 1
"""The latest time of a row, in µs since the epoch: names of segments have 16 digits for it. It is in November 2286."""

BAD_DISK = frozenset({errno.EIO, errno.EUCLEAN, errno.EBADMSG})
"""The errors of a disk that has damaged what was on it. After any other one, another try may read it."""

_LONGEST_OBJECT = 16 << 20
"""Bytes in the longest JSON file: a summary with many long keys, or the manifest of a batch with many files."""

_BLOCK = 1 << 20
"""Bytes of a file that are read at once."""
_ALIGNED = 64
"""Bytes that no block divides: those of a record of an index."""
_MOST = 1 << 63
"""Bytes that no file has."""

_ID = re.compile("[0-9a-f]{32}")
_BASE = re.compile(r"(\d{16})-(\d{16})(?:-(\d{4,16}))?")


class Segment(NamedTuple):
    """A segment, as the names of its files describe it.

    :ivar directory: the directory of the journal.
    :ivar first_seq: the number of the first row, whether or not readers may see that row yet.
    :ivar first_time: the time of the first row, in µs since the epoch.
    :ivar closed: whether the segment is closed; a closed segment never changes.
    :ivar epoch: the number of the epoch of its times. Within an epoch times never fall; those of two epochs cannot be
        compared.
    """

    directory: str
    first_seq: int
    first_time: int
    closed: bool
    epoch: int = 0

    @property
    def name(self) -> str:
        """The name of the files, without a suffix."""
        name = f"{self.first_seq:016}-{self.first_time:016}"
        return f"{name}-{self.epoch:04}" if self.epoch else name

    def path(self, suffix: str = ARROWS) -> str:
        """Return the path of one of the files."""
        return os.path.join(self.directory, self.name + suffix)

    @classmethod
    def named(cls, directory: str, name: str, *, closed: bool) -> Segment | None:
        """Return the segment with this name, or None if no segment can have it."""
        match = _BASE.fullmatch(name)
        return cls(directory, int(match[1]), int(match[2]), closed, int(match[3] or 0)) if match else None


def list_segments(directory: str) -> list[Segment]:
    """List the segments of a journal, the oldest first; only the directory is read.

    :raises JournalMissing: if there is no such directory.
    :raises JournalUnreadable: if this user may not read it.
    """
    # While a segment is being closed, this listing may miss its summary, but never its .arrows.
    names = _names(directory)
    present = set(names)
    found = [
        segment
        for name in names
        if name.endswith(ARROWS)
        and (base := name.removesuffix(ARROWS))
        and (segment := Segment.named(directory, base, closed=base + SUMMARY in present))
    ]
    found.sort()
    return found


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except PermissionError as e:
        raise _may_not_read(directory) from e
    except (FileNotFoundError, NotADirectoryError):
        raise JournalMissing(
            f"{directory}: there is no such journal: name the directory that the recorder writes"
        ) from None


def is_journal(directory: str) -> bool:
    """Return whether a directory holds a journal."""
    return os.path.exists(os.path.join(directory, IDENTITY))


class Identity(NamedTuple):
    """The content of ``journal.json``.

    :ivar id: the ID of the journal, 32 hexadecimal digits.
    :ivar format: the newest format that the journal has segments of.
    :ivar host: the name of the machine that the journal was begun on; None if the file does not say.
    :ivar fields: the whole object.
    """

    id: str
    format: Format
    host: str | None
    fields: dict[str, Any]


def read_identity(directory: str) -> Identity:
    """Read the ``journal.json`` of a journal.

    :raises JournalMissing: if there is no journal.
    :raises JournalError: if this package cannot read its format.
    """
    path = os.path.join(directory, IDENTITY)
    try:
        fields = read_object(path)
    except (FileNotFoundError, NotADirectoryError):
        raise JournalMissing(
            f"{directory}: this is no journal (it has no {IDENTITY}): name the directory that the recorder writes"
        ) from None
    format_ = find_format(fields.get("format"), path)
    id_ = fields.get("id")
    if not (isinstance(id_, str) and _ID.fullmatch(id_)):
        raise JournalError(f"{path}: it has no journal ID: restore it from a copy")
    host = fields.get("host")
    return Identity(id_, format_, host if isinstance(host, str) and host else None, fields)


def link_error(path: str) -> JournalError:
    """Return the error for a link in the place of a file: in a journal, no link is followed."""
    return JournalError(
        f"{path}: it is a symbolic link, which is not followed: put the journal's file itself in its place"
    )


def open_plain(path: str) -> IO[bytes]:
    """Open a plain file to read it. A link is not followed, and a pipe is not waited for.

    :raises FileNotFoundError: if there is none.
    :raises JournalUnreadable: if this user may not read it.
    :raises JournalError: if it is anything else.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except PermissionError as e:
        raise _may_not_read(path) from e
    except OSError as e:
        if e.errno == errno.ELOOP:
            raise link_error(path) from None
        if e.errno != errno.ENXIO:  # a socket
            raise
    else:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return open(fd, "rb")
        os.close(fd)
    raise JournalError(f"{path}: it is damaged (no plain file): restore it from a copy")


def _may_not_read(path: str) -> JournalUnreadable:
    return JournalUnreadable(f"{path}: this user may not read it: let it, or use the user of the recorder")


def read_blocks(fd: int, start: int = 0, end: int = _MOST) -> Iterator[tuple[int, bytes]]:
    """Yield the content of a file, block by block, each with its offset.

    Blocks of zeros are left out: a file of any size, which is a hole, takes neither memory nor time.

    :param start: the offset to begin at; all blocks but the last one have a multiple of 64 bytes.
    :param end: the offset to end at.
    :raises JournalError: if the disk cannot read it.
    """
    at = start
    while at < end and (data := _read(fd, min(_BLOCK, end - at), at)):
        if data.count(0) < len(data):
            yield at, data
            at += len(data)
        else:
            at = _next_data(fd, at + len(data), end)


def _read(fd: int, size: int, at: int) -> bytes:
    try:
        return os.pread(fd, size, at)
    except OSError as e:
        if e.errno not in BAD_DISK:
            raise
        raise _unreadable(os.readlink(f"/proc/self/fd/{fd}"), e) from None


def _unreadable(path: str, error: OSError) -> JournalError:
    """Return the error for a file on a bad sector."""
    return JournalError(f"{path}: it cannot be read ({error.strerror}): restore it from a copy, or repair the journal")


def _next_data(fd: int, at: int, end: int) -> int:
    """Return the offset of the next data in a file, from `at` on; `at` itself if the file system does not know."""
    try:
        return os.lseek(fd, at, os.SEEK_DATA) // _ALIGNED * _ALIGNED
    except OSError as e:
        return end if e.errno == errno.ENXIO else at  # no data follow; or this file system does not know


def read_object(path: str) -> dict[str, Any]:
    """Read the JSON object in a file.

    :raises FileNotFoundError: if there is no such file.
    :raises JournalError: if the file holds anything else.
    """
    with open_plain(path) as file:
        try:
            data = file.read(_LONGEST_OBJECT + 1)
        except OSError as e:
            if e.errno not in BAD_DISK:
                raise
            raise _unreadable(path, e) from None
    try:
        fields = json.loads(data) if len(data) <= _LONGEST_OBJECT else None
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise JournalError(f"{path}: it is damaged (no JSON object): restore it from a copy")
    return fields
