"""The consumers of a journal: how far each one has read.

Retention deletes no row that a consumer still needs.

A *consumer* is a program that moves rows elsewhere, such as ``sbus archive``, or a stream of Spark. It has a name, and
a file ``consumers/NAME.json`` in the directory of the journal, with the number of the first row that it still needs. If
rows go to a place with an identity, such as a lake, the file has that identity too. A stream has one in its checkpoint.

Invariants:

* A number is never larger than what the consumer has reached: retention that reads a file while it is written, or after
  a crash in the middle, may keep more than it must, but deletes nothing that is needed. `advance` ignores a number that
  is smaller than the one in the file.
* A name belongs to the identity that first used it: another one is refused, because the number of one lake would let
  retention delete rows that the other lacks. A file of an older version, without one, is taken over.
* `advance` works on a full disk once the file exists: only the progress of a consumer allows retention to free that
  disk. Therefore the file has the same length for every number of an identity. `disk.replace`
  needs space for a second file; if there is none, `_overwrite` writes the digits in place.
* Without any consumer, retention deletes nothing unless it is forced to.
"""

from __future__ import annotations

import errno
import json
import os
import re

from sbus.errors import JournalError, UsageError
from sbus.journal import disk
from sbus.journal.layout import read_identity, read_object

__all__ = ["advance", "check_consumer", "check_name", "consumers", "release"]

_DIRECTORY = "consumers"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")  # so that its file can have a name
_DIGITS = 19  # of the largest int64
_DIRECTORY_MODE = 0o755  # the recorder may run as another user; the mode of the journal's directory limits the access
_FILE_MODE = 0o644


def consumers(directory: str | os.PathLike[str]) -> dict[str, int]:
    """Return the consumers of a journal: by name, the first row that each still needs.

    :raises JournalError: if the file of a consumer is damaged.
    """
    return {name: _read_next_seq(os.path.join(directory, _DIRECTORY, f"{name}.json")) for name in _names(directory)}


def _names(directory: str | os.PathLike[str]) -> list[str]:
    try:
        files = sorted(os.listdir(os.path.join(directory, _DIRECTORY)))
    except FileNotFoundError:
        return []
    return [name for name, suffix in map(os.path.splitext, files) if suffix == ".json"]


def release(directory: str | os.PathLike[str], name: str) -> None:
    """Forget a consumer that is gone for good; one that still runs comes back when it advances.

    :raises UsageError: if no consumer can have this name.
    :raises JournalError: if there is no journal, or no such consumer.
    :raises OSError: if its file cannot be removed.
    """
    path = _path(directory, name)
    read_identity(os.fspath(directory))
    try:
        with disk.inside(os.path.dirname(path)) as home:
            os.unlink(os.path.join(home, os.path.basename(path)))
            disk.sync_directory(home)
    except FileNotFoundError:
        names = _names(directory)
        known = f"its consumers are {', '.join(names)}" if names else "it has no consumers"
        raise JournalError(f"{os.fspath(directory)}: there is no consumer {name!r}: {known}") from None


def _read_next_seq(path: str) -> int:
    next_seq = read_object(path).get("next")
    if not isinstance(next_seq, int):
        raise JournalError(
            f"{path}: it has no number of a next row: restore it, or run 'sbus journal release' to forget this consumer"
        )
    return next_seq


def check_consumer(directory: str | os.PathLike[str], name: str, identity: str, place: str = "") -> None:
    """Check that a consumer may use a name.

    :param identity: what the rows go to: the ID of a lake or of a stream.
    :param place: where that is, for the error.
    :raises UsageError: if the name has characters that it may not have.
    :raises JournalError: if the name belongs to another identity, with the remedy.
    :raises OSError: if the consumer's file is there, and cannot be read.
    """
    path = _path(directory, name)
    try:
        owner = read_object(path).get("identity")
    except (FileNotFoundError, JournalError):
        return
    if isinstance(owner, str) and owner != identity:
        raise JournalError(
            f"{os.fspath(directory)}: the consumer {name!r} is another lake or stream ({owner}), not "
            f"{place or identity}: with one name, retention would delete rows that one of the two lacks; choose "
            f"another name (--consumer=NAME; of a stream, the option consumer), or run 'sbus journal release "
            f"{os.fspath(directory)} {name}' if that one is gone for good"
        )


def check_name(name: str) -> None:
    """Check that a consumer can have a name.

    :raises UsageError: if it has other characters than letters, digits, ``_``, ``-`` and ``.``, begins with a dot, or
        has more than 200.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r:.210} is no name for a consumer: use letters, digits, '_', '-' and '.', at most 200 of them"
        )


def _path(directory: str | os.PathLike[str], name: str) -> str:
    check_name(name)
    return os.path.join(directory, _DIRECTORY, f"{name}.json")


def advance(directory: str | os.PathLike[str], name: str, next_seq: int, *, identity: str | None = None) -> None:
    """Record that a consumer needs no row before `next_seq`.

    A number that is not larger than the recorded one changes nothing.

    If the consumer's file exists, this works on a full disk too.

    :param name: the name of the consumer: letters, digits, ``_``, ``-`` and ``.``.
    :param identity: the identity of what the rows go to; None: the consumer has none.
    :raises UsageError: if the name has other characters, or begins with a dot.
    :raises JournalError: if the name belongs to another identity.
    :raises OSError: if the file cannot be read or written; the number from before still stands.
    """
    path = _path(directory, name)
    home = os.path.dirname(path)
    owner = None
    if identity is not None:
        check_consumer(directory, name, identity)
    try:
        owner = read_object(path).get("identity")
        if (recorded := _read_next_seq(path)) >= next_seq:
            if identity in (None, owner):
                return
            next_seq = recorded
    except (FileNotFoundError, JournalError):
        pass
    identity = identity or owner
    disk.make_directories(home, _DIRECTORY_MODE)
    tail = f', "identity": {json.dumps(identity)}' if identity else ""
    data = b'{"next": %*d%s}\n' % (_DIGITS, next_seq, tail.encode())
    with disk.inside(home) as found:
        path = os.path.join(found, os.path.basename(path))
        try:
            disk.replace(path, data, _FILE_MODE)
        except OSError as e:
            if e.errno not in (errno.ENOSPC, errno.EDQUOT) or not _has_length(path, len(data)):
                raise
            _overwrite(path, data)


def _has_length(path: str, length: int) -> bool:
    try:
        return os.stat(path).st_size == length
    except FileNotFoundError:
        return False


def _overwrite(path: str, data: bytes) -> None:
    """Write a larger number over the one in a file, without needing space on the disk.

    The last digit is written first. A concurrent reader, or a reader after a crash, then finds the first digits of the
    old number and the last ones of the new number. That is never more than the new number; if it is no number at all,
    the next `advance` corrects it.
    """
    fd = disk.open_existing(path)
    try:
        for at in reversed(range(len(data))):
            disk.write(fd, data[at : at + 1], at)
        disk.sync(fd)
    finally:
        os.close(fd)
