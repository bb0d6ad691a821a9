"""What the consumers of a journal have taken for good, so that nothing is deleted that somebody still needs.

A consumer is whoever moves rows elsewhere, such as the archive; it has a name, and a small file in ``consumers/``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re

from sbus.errors import JournalError, UsageError
from sbus.journal import disk
from sbus.journal.layout import read_object

__all__ = ["advance", "consumers"]

_DIRECTORY = "consumers"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_WIDTH = 19  # digits of the largest number that there is: the file always has the same length
_DIRECTORY_MODE = 0o755  # for the same reason; the directory of the journal says who gets here at all
_MODE = 0o644  # a number that is no secret, and that another user's recorder must be able to read


def consumers(directory: str | os.PathLike[str]) -> dict[str, int]:
    """The consumers of the journal in a directory, and of each the first seq that it still needs.

    :raises JournalError: if what one has taken cannot be told.
    """
    home = os.path.join(directory, _DIRECTORY)
    try:
        names = sorted(os.listdir(home))
    except FileNotFoundError:
        return {}
    found = {}
    for name, suffix in map(os.path.splitext, names):
        if suffix == ".json":
            found[name] = _taken(os.path.join(home, name + suffix))
    return found


def _taken(path: str) -> int:
    following = read_object(path).get("next")
    if not isinstance(following, int):
        raise JournalError(f"{path}: it does not tell the next row: restore it, or remove it to forget this consumer")
    return following


def advance(directory: str | os.PathLike[str], name: str, next_seq: int) -> None:
    """Write down that a consumer needs nothing before this seq; one that is less than before changes nothing.

    What is written down once can be raised on a full disk too, as that is how rows can be deleted there.

    :param name: of letters, digits, ``_``, ``-`` and ``.``.
    :raises UsageError: if it is no such name.
    :raises OSError: if it cannot be written; what was written before still stands.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} is no name for a consumer: use letters, digits, '_', '-' and '.'")
    home = os.path.join(directory, _DIRECTORY)
    path = os.path.join(home, f"{name}.json")
    try:
        if _taken(path) >= next_seq:
            return
    except (FileNotFoundError, JournalError):
        pass
    if not os.path.isdir(home):
        os.makedirs(home, exist_ok=True)
        os.chmod(home, _DIRECTORY_MODE)
        disk.sync_directory(os.fspath(directory))
    data = b'{"next": %*d}\n' % (_WIDTH, next_seq)
    try:
        disk.replace(path, data, _MODE)
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.EDQUOT) or not _has_place(path, data):
            raise
        _overwrite(path, data)
    if os.geteuid() == 0:
        with contextlib.suppress(PermissionError):  # root of another machine
            _hand_over(home, f"{name}.json", os.stat(directory))


def _hand_over(home: str, name: str, journal: os.stat_result) -> None:
    """Give what root has made to the owner of the journal, who is to be able to write and remove it.

    No link is followed: that owner could let one lead to a file of somebody else.
    """
    fd = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.chown(fd, journal.st_uid, journal.st_gid)
        os.chown(name, journal.st_uid, journal.st_gid, dir_fd=fd, follow_symlinks=False)
    finally:
        os.close(fd)


def _has_place(path: str, data: bytes) -> bool:
    try:
        return os.stat(path).st_size == len(data)
    except FileNotFoundError:
        return False


def _overwrite(path: str, data: bytes) -> None:
    """Write a larger number over the one in a file, which needs no space.

    The last digit comes first: who reads meanwhile, or after a crash in between, finds the first digits of the old
    number and the last ones of the new, which is never more than the new; or no number at all, which is put right by
    the next who writes.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        for at in reversed(range(len(data))):
            disk.write(fd, data[at : at + 1], at)
        disk.sync(fd)
    finally:
        os.close(fd)
