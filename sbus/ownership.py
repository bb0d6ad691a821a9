"""Owner, group, permissions and ACL of what sbus writes.

Two rules apply to every file and directory:

* A replacement keeps the access of the file before it: `access_of`.
* A new file belongs to the owner and the group of the directory that it is in, and gets that directory's default ACL:
  `new_in`. So maintenance by root leaves nothing that the owner of a journal or a lake could not read and replace. A
  directory in which all users may write, such as ``/tmp``, says nothing about what is in it: there the kernel's rules
  hold, and what another user may have put there is nothing to keep (`is_planted`).

A process that is not root cannot give a file away, and can give it only to groups that it is in. If the group cannot be
kept, no other group gets the permissions that it had.

Root writes here into directories of other users. So what is given away is a descriptor of a file that this process has
made, or a plain file of this process's user that has one name: a link that the user has put there is never followed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import IO, NamedTuple

from sbus.errors import UsageError

__all__ = [
    "Access",
    "access_of",
    "adopt",
    "at",
    "check_file_mode",
    "check_replaceable",
    "create",
    "create_for",
    "directory_mode",
    "give",
    "growing",
    "is_planted",
    "make_directory",
    "new_in",
    "open_or_create",
    "replacing",
]

_ACL = "system.posix_acl_access"
_DEFAULT_ACL = "system.posix_acl_default"


class Access(NamedTuple):
    """The owner of a file, and the rights to use it.

    :ivar uid: the owner; -1: the user of the process.
    :ivar gid: the group; -1: the one that the kernel chooses.
    :ivar mode: the permissions.
    :ivar acl: the ACL, as the kernel has it; None: there is none.
    :ivar default_acl: the ACL for new files in a directory, likewise.
    """

    uid: int
    gid: int
    mode: int
    acl: bytes | None = None
    default_acl: bytes | None = None


def directory_mode(mode: int) -> int:
    """Return the permissions of a directory for files with these: users who may read the files may enter it."""
    return 0o700 | mode | (mode & 0o444) >> 2


def check_file_mode(mode: int) -> int:
    """Return the permissions of files, if their owner can work with them.

    :raises UsageError: if the owner could not.
    """
    if mode & 0o600 != 0o600:
        raise UsageError(f"--mode={mode:04o}: the owner must be able to read and write, as with 0600 and 0640")
    return mode


def access_of(path: str | os.PathLike[str]) -> Access:
    """Return what a file or a directory has; a link is not followed.

    :raises FileNotFoundError: if there is none.
    """
    status = os.lstat(path)
    if stat.S_ISDIR(status.st_mode):
        return Access(
            status.st_uid, status.st_gid, status.st_mode & 0o3777, _read(path, _ACL), _read(path, _DEFAULT_ACL)
        )
    return Access(status.st_uid, status.st_gid, status.st_mode & 0o777, _read(path, _ACL))


def new_in(directory: str | os.PathLike[str], mode: int) -> Access:
    """Return the access of a new file in a directory.

    :param mode: the permissions; a default ACL of the directory decides in their place.
    """
    status = os.stat(directory)
    acl = _read(directory, _DEFAULT_ACL)
    if acl is not None:
        mode |= 0o777 if mode & 0o111 else 0o666
    uid, gid = status.st_uid, status.st_gid
    if status.st_mode & stat.S_IWOTH:
        uid = gid = -1
    elif os.geteuid():
        uid = -1
        if gid not in (os.getegid(), *os.getgroups()):
            gid = -1
    return Access(uid, gid, mode, acl, acl)


def is_planted(path: str | os.PathLike[str]) -> bool:
    """Return whether just any user may have put a file or a directory there; a link is not followed.

    In a directory in which all users may write, only what is this user's, root's or its owner's says anything.

    :raises FileNotFoundError: if there is none.
    """
    above = os.stat(_parent(path))
    return os.lstat(path).st_uid not in (0, os.geteuid(), above.st_uid) and bool(above.st_mode & stat.S_IWOTH)


def give(fd: int, access: Access) -> None:
    """Make an open file or directory of this user have what `access` says, as far as this user may."""
    before = os.fstat(fd)
    mode, acl = access.mode, access.acl
    if access.gid not in (-1, before.st_gid) and not _chown(fd, -1, access.gid):
        mode, acl = mode & ~0o070 | (mode & 0o007) << 3 & mode, None
    _write(fd, _ACL, acl)
    if acl is not None:
        # The ACL has the permissions too; the mode takes away those to execute a plain file.
        mode &= os.fstat(fd).st_mode | ~0o777
    if stat.S_ISDIR(before.st_mode):
        _write(fd, _DEFAULT_ACL, access.default_acl)
    os.fchmod(fd, mode)
    if access.uid not in (-1, before.st_uid):
        _chown(fd, access.uid, -1)


def create(path: str | os.PathLike[str], mode: int) -> int:
    """Create a file, with the access of a new file in its directory.

    :param mode: exactly these permissions, whatever the umask; a default ACL of the directory decides in their place.
    :returns: its descriptor, for reading and writing.
    :raises FileExistsError: if there is such a file.
    """
    return _create(path, new_in(_parent(path), mode))


def create_for(target: str, path: str, mode: int) -> int:
    """Create a file that is to take the place of another one, and has what that has.

    :param target: the place.
    :param path: the new file.
    :param mode: the permissions if there is no file in that place.
    :returns: its descriptor, for reading and writing.
    """
    return _create(path, at(target, mode))


def _create(path: str | os.PathLike[str], access: Access) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        give(fd, access)
    except OSError:
        os.close(fd)
        os.unlink(path)
        raise
    return fd


def open_or_create(path: str | os.PathLike[str], flags: int, mode: int) -> int:
    """Open a file that is there as it is, or `create` it; a link is not followed.

    :param flags: how to open it, such as `os.O_RDWR`.
    """
    while True:
        try:
            return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                os.close(create(path, mode))


def make_directory(path: str | os.PathLike[str], mode: int) -> None:
    """Make a directory, with the access of a new one in the directory above.

    :param mode: exactly these permissions, as for `create`; the set-group-ID bit comes from above.
    :raises FileExistsError: if there is one.
    """
    os.mkdir(path, 0o700)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        give(fd, new_in(_parent(path), mode | os.fstat(fd).st_mode & stat.S_ISGID))
    finally:
        os.close(fd)


def at(path: str | os.PathLike[str], mode: int) -> Access:
    """Return the access for a file at a path: that of the file there, or that of a new file in that directory.

    A link there, and what just any user may have put there, counts as nothing.

    :param mode: the permissions of a new file.
    """
    try:
        found = access_of(path) if not (os.path.islink(path) or is_planted(path)) else None
    except FileNotFoundError:
        found = None
    return found or new_in(_parent(path), mode)


def adopt(path: str | os.PathLike[str], access: Access) -> None:
    """Make what this process, or a program that it runs, has just made have what `access` says.

    A file of another user, and a file with several names, is left as it is.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        is_plain = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
        if status.st_uid == os.geteuid() and (is_plain or stat.S_ISDIR(status.st_mode)):
            give(fd, access)
    finally:
        os.close(fd)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], mode: int | None = None) -> Iterator[IO[bytes]]:
    """Yield a file to write; at the end of the block it is in its place as a whole.

    If the block fails, the file that is there stays.

    A link leads to the file that is replaced. A device or a pipe, such as ``/dev/stdout``, is written as it is.

    :param mode: the permissions if there is no file yet; None: those that the umask leaves.
    :raises OSError: if it cannot be written.
    """
    target = _target(path)
    if target is None:
        with open(path, "wb") as stream:
            yield stream
        return
    temporary = f"{target}.{os.getpid()}.new"
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)  # of a killed process with the same number
        with open(create_for(target, temporary, 0o666 & ~_umask() if mode is None else mode), "wb") as file:
            yield file
        os.rename(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):  # it may not exist, and the first error is the one to report
            os.unlink(temporary)
        raise


def growing(path: str | os.PathLike[str]) -> IO[bytes]:
    """Open a file to append to it; a new one is as `replacing` makes it."""
    if not os.path.exists(path):
        os.close(create(path, 0o666 & ~_umask()))
    return open(path, "ab")


def check_replaceable(path: str | os.PathLike[str]) -> None:
    """Check that `replacing` can make its file.

    :raises OSError: if it cannot.
    """
    target = _target(path)
    if target is not None:
        temporary = f"{target}.{os.getpid()}.new"
        os.close(_create(temporary, Access(-1, -1, 0o600)))
        os.unlink(temporary)


def _target(path: str | os.PathLike[str]) -> str | None:
    """Return the file to replace, behind links of this user and of root; None: a device or a pipe."""
    path = os.path.abspath(path)
    with contextlib.suppress(FileNotFoundError):
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not stat.S_ISREG(mode):
            return None
    # Where another user may make links, they must not lead to a file that only this user may replace.
    while os.path.islink(path) and os.lstat(path).st_uid in (0, os.geteuid()):
        path = os.path.join(os.path.dirname(path), os.readlink(path))
    return path


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _parent(path: str | os.PathLike[str]) -> str:
    return os.path.dirname(os.path.abspath(path))


def _chown(fd: int, uid: int, gid: int) -> bool:
    """Return whether the file is now theirs; a user namespace or a network file system may not know them."""
    try:
        os.fchown(fd, uid, gid)
    except OSError as e:
        if e.errno not in (errno.EPERM, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        return False
    return True


def _read(path: str | os.PathLike[str], name: str) -> bytes | None:
    try:
        return os.getxattr(path, name)
    except OSError as e:
        if e.errno in (errno.ENODATA, errno.EOPNOTSUPP):
            return None  # there is none, or the file system has no ACLs
        raise


def _write(fd: int, name: str, value: bytes | None) -> None:
    try:
        if value is not None:
            os.setxattr(fd, name, value)
        else:
            os.removexattr(fd, name)
    except OSError as e:
        if e.errno not in (errno.ENODATA, errno.EOPNOTSUPP):
            raise
