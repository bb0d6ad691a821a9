"""Sockets that listen on a path, an abstract name or an inherited descriptor.

Theory of operation
-------------------

A path is made in steps, so that at no moment more users can connect than `listen` has to admit:

====  ==============================================================  =================================================
step  what `listen` does                                              why
====  ==============================================================  =================================================
1     lock the directory (flock(2)), until step 4 is done             a socket that is bound and does not listen yet
                                                                      looks like a stale one to another server
2     if something stands at the path, check that it is a socket on   only a dead socket is replaced
      which no server listens, and remove it
3     bind(2) a socket with permissions 0                             the path is made without any
4     give it its group, then its mode, then call listen(2)           nobody connects earlier
====  ==============================================================  =================================================

The directory may belong to another user, who can put anything else in the path's place at any moment, such as a
symbolic link to one of the server's files. Step 4 therefore never names the path again: it opens it once, without
following a link (``O_PATH | O_NOFOLLOW``), checks that this is a socket as only step 3 makes them, and changes the file
of that descriptor through /proc/self/fd. chmod(2) and chown(2) have no other form for such a descriptor that all
kernels know.

Any process that can read the directory can hold the lock, so `listen` waits 1 s for it and then continues without.

The check of step 2 connects a datagram socket. The kernel answers "connection refused" if no server listens, and "wrong
type" if one does, and the server does not notice.

An inherited socket (`adopt`) keeps its path and its mode, which belong to the process that made it.

Rejected: connecting a SEQPACKET socket in step 2. A bus with ``--auto-close`` took the end of that visit for its last
client's and stopped.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import os
import socket
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from sbus.errors import ListenError
from sbus.syscalls.addresses import Address, absolute
from sbus.syscalls.descriptors import above_standard
from sbus.syscalls.names import is_number
from sbus.syscalls.sockets import is_unix, pass_descriptors

__all__ = ["BACKLOG", "ListeningSocket", "adopt", "inherited_name", "listen", "rehearse", "unit_setting"]

BACKLOG = 128
"""Connections that wait to be accepted at most (listen(2)).

A user who connects in a loop keeps the backlog full, whatever its length, and the connections of others wait until all
of it is accepted: 350 ms if it has 4,096.
"""

_LOCK_TIMEOUT = 1.0
"""Seconds to wait for another server that is starting in the same directory."""
_LOCK_POLL = 0.005
"""Seconds between two attempts to lock the directory."""


@dataclass(slots=True)
class ListeningSocket:
    """A listening socket, and the path to remove when it closes.

    :ivar path: the absolute path that was made for it, if there is one.
    :ivar inode: (device, inode) of that path.
    """

    sock: socket.socket
    address: Address
    path: bytes | None = None
    inode: tuple[int, int] | None = None

    def close(self) -> None:
        """Stop listening, and remove the path unless another server has replaced it.

        A second call does nothing.
        """
        if self.path is not None:
            with contextlib.suppress(OSError):
                found = os.lstat(self.path)
                if (found.st_dev, found.st_ino) == self.inode:
                    os.unlink(self.path)
        self.path = None
        self.sock.close()

    def give_to(self, uid: int) -> None:
        """Make a user the owner of the path; nothing that has replaced it is changed.

        :raises ListenError: if the path was replaced.
        """
        if self.path is not None:
            with _held(self.path) as (fd, found):
                if (found.st_dev, found.st_ino) != self.inode:
                    raise _replaced(self.address)
                os.chown(_proc(fd), uid, -1)


def listen(
    address: Address,
    *,
    mode: int = 0o700,
    group: str | int | None = None,
    reuse: bool = False,
    replace_empty: bool = False,
    backlog: int = BACKLOG,
    stream: bool = False,
) -> ListeningSocket:
    """Listen on a path or an abstract address, or on an inherited descriptor.

    The path never has more permissions than `mode`, not even for a moment.

    :param mode: permissions of the path; to connect, a user needs permission to write.
    :param group: name or number of the group that the path is given to.
    :param reuse: replace a socket whose server no longer listens; never a live one, and nothing but a socket.
    :param replace_empty: replace an empty regular file too.
    :param backlog: connections that wait to be accepted at most (listen(2)).
    :param stream: make a stream socket instead of a SEQPACKET one.
    :raises ListenError: with the reason and the remedy in one line.
    """
    if address.systemd is not None:
        raise ListenError(f"{address.text}: sockets from systemd are handed over as descriptors")
    if address.descriptor is not None:
        return adopt(address, backlog, stream)
    address = absolute(address)
    try:
        sock = socket.socket(socket.AF_UNIX, _type(stream) | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    except OSError as error:
        raise ListenError(_remedy(address, error)) from error
    bound = ListeningSocket(sock, address)
    try:
        pass_descriptors(sock, False)
        if address.is_abstract:
            sock.bind(address.name)
            sock.listen(backlog)
        else:
            _listen_on_path(bound, mode, group, reuse, replace_empty, backlog)
    except BaseException as error:
        bound.close()
        if isinstance(error, OSError):
            raise ListenError(_remedy(address, error)) from error
        raise
    return bound


def rehearse(address: Address, *, group: str | int | None = None, stream: bool = False) -> bool:
    """Check whether `listen` could succeed once no other server listens there; change nothing.

    :param group: as for `listen`.
    :param stream: as for `listen`.
    :returns: whether a server listens there now; False for an inherited socket.
    :raises ListenError: as `listen` would.
    """
    if address.descriptor is not None:
        inherited_name(address, stream)
        return False
    try:
        if address.is_abstract:
            return _is_bound(address)
        return _rehearse_path(absolute(address), group)
    except OSError as error:
        raise ListenError(_remedy(address, error)) from error


def _is_bound(address: Address) -> bool:
    """Return whether an abstract name is in use; no probe could find out without connecting to its server."""
    shown = b" " + address.name.replace(b"\0", b"@")  # as in proc(5)
    with open("/proc/net/unix", "rb") as sockets:
        return any(line.rstrip(b"\n").endswith(shown) for line in sockets)


def _rehearse_path(address: Address, group: str | int | None) -> bool:
    directory = os.path.dirname(address.name) or b"."
    if not stat.S_ISDIR(os.stat(directory).st_mode):
        raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    if not os.access(directory, os.W_OK | os.X_OK, effective_ids=True):
        why = errno.EROFS if os.statvfs(directory).f_flag & os.ST_RDONLY else errno.EACCES
        raise OSError(why, os.strerror(why))
    if group is not None:
        gid = _gid(group)
        if os.geteuid() != 0 and gid not in (os.getegid(), *os.getgroups()):
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
    return os.path.lexists(address.name) and _is_served(address, os.lstat(address.name))


def _listen_on_path(
    bound: ListeningSocket, mode: int, group: str | int | None, reuse: bool, replace_empty: bool, backlog: int
) -> None:
    path = bound.address.name
    os.fchmod(bound.sock.fileno(), 0)
    # Until the socket listens it looks like a stale one.
    with _directory_lock(os.path.dirname(path) or b"."):
        if os.path.lexists(path):
            _check_stale(bound.address, reuse, replace_empty)
            _remove_stale(bound.address)
        bound.sock.bind(path)
        with _held(path) as (fd, made):
            if not _is_fresh(made):
                raise _replaced(bound.address)
            bound.path, bound.inode = os.path.abspath(path), (made.st_dev, made.st_ino)
            if group is not None:
                os.chown(_proc(fd), -1, _gid(group))
            os.chmod(_proc(fd), mode)
        bound.sock.listen(backlog)


@contextlib.contextmanager
def _held(path: bytes) -> Iterator[tuple[int, os.stat_result]]:
    """Hold the file that the path names at this moment, or a symbolic link itself; give a descriptor and its state."""
    fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield fd, os.fstat(fd)
    finally:
        os.close(fd)


def _proc(fd: int) -> str:
    """Return a path that leads to the file of a descriptor, wherever it was moved."""
    return f"/proc/self/fd/{fd}"


def _is_fresh(found: os.stat_result) -> bool:
    """Return whether this is a socket as `listen` has just bound one: the user's own, mode 0, one name."""
    return (
        stat.S_ISSOCK(found.st_mode)
        and not stat.S_IMODE(found.st_mode)
        and found.st_uid == os.geteuid()
        and found.st_nlink == 1
    )


def _replaced(address: Address) -> ListenError:
    return ListenError(
        f"{address.text} was replaced by another process while the socket was made: choose a directory that only the "
        "server's user can write to"
    )


def _gid(group: str | int) -> int:
    if isinstance(group, str) and not is_number(group):
        try:
            return grp.getgrnam(group).gr_gid
        except KeyError:
            raise ListenError(f"there is no group {group!r}: name one that `getent group` lists") from None
    gid = int(group)
    if not 0 <= gid < 2**32 - 1:  # chown(2) takes 2^32 - 1 for "leave it as it is"
        raise ListenError(f"{gid} is not a group: a GID is less than 2^32 - 1")
    return gid


@contextlib.contextmanager
def _directory_lock(directory: bytes) -> Iterator[None]:
    """Keep two servers from replacing each other's fresh socket as a stale one.

    Continues without the lock after `_LOCK_TIMEOUT`, and where a directory cannot be read or a file system cannot lock.
    """
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield  # bind(2) reports what is wrong with the directory
        return
    try:
        deadline = time.monotonic() + _LOCK_TIMEOUT
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    break
                time.sleep(_LOCK_POLL)
            except OSError:
                break
        yield
    finally:
        os.close(fd)


def _check_stale(address: Address, reuse: bool, replace_empty: bool) -> None:
    """Raise `ListenError` unless the path is a replaceable socket without a server."""
    text = address.text
    found = os.lstat(address.name)
    if replace_empty and stat.S_ISREG(found.st_mode) and not found.st_size:
        return
    if _is_served(address, found):
        raise ListenError(f"{text} is in use by a server that is running: stop that one, or choose another --socket")
    if not reuse:
        raise ListenError(
            f"{text} is left over from a server that is gone: start with --reuse to replace it, or remove it"
        )


def _is_served(address: Address, found: os.stat_result) -> bool:
    """Return whether a server listens on a path.

    :param found: the state of the path.
    :raises ListenError: if it is no socket, or the kernel does not say.
    """
    text = address.text
    if not stat.S_ISSOCK(found.st_mode):
        raise ListenError(f"{text} exists and is not a socket: remove it yourself, or choose another --socket")
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as probe:
            probe.connect(address.name)  # of another type: a server does not notice
    except ConnectionRefusedError:
        return False
    except PermissionError:
        raise ListenError(
            f"{text} exists already, and you have no permission to find out whether a server listens there: "
            "check that, and remove it yourself, or choose another --socket"
        ) from None
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EPROTOTYPE):
            raise
    return True


def _remove_stale(address: Address) -> None:
    try:
        os.unlink(address.name)
    except PermissionError:
        raise ListenError(
            f"{address.text} is left over from a server that is gone, and you may not remove it: have its owner do "
            "that, or root, or choose another --socket"
        ) from None


def unit_setting(stream: bool) -> str:
    """Return the setting of a .socket unit that makes such a socket (systemd.socket(5))."""
    return "ListenStream=" if stream else "ListenSequentialPacket="


def inherited_name(address: Address, stream: bool = False) -> bytes:
    """Return the name that an inherited socket is bound to.

    An abstract name begins with a NUL.

    :param stream: expect a stream socket instead of a SEQPACKET one.
    :raises ListenError: if it is not a Unix-domain socket of this type.
    """
    sock = _inherited(address, stream)
    try:
        name = sock.getsockname()
        return name if isinstance(name, bytes) else os.fsencode(name)
    finally:
        sock.detach()


def adopt(address: Address, backlog: int = BACKLOG, stream: bool = False) -> ListeningSocket:
    """Listen on an inherited socket.

    Its path, mode and removal stay with the process that made it.

    :param stream: expect a stream socket instead of a SEQPACKET one.
    :raises ListenError: if it is not a Unix-domain socket of this type, or is not bound.
    """
    sock = _inherited(address, stream)
    if sock.fileno() != (moved := above_standard(sock.fileno())):
        # A daemon connects the standard descriptors to /dev/null.
        sock.detach()
        sock = socket.socket(fileno=moved)
    sock.setblocking(False)
    os.set_inheritable(sock.fileno(), False)
    pass_descriptors(sock, False)
    try:
        name = sock.getsockname()
        if not name:
            raise ListenError(f"{address.text} is not bound to an address: bind it before passing it")
        if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            sock.listen(backlog)
    except BaseException as error:
        sock.detach()
        if isinstance(error, OSError):
            raise ListenError(f"{address.text} cannot listen ({error.strerror}): pass a socket that is bound") from None
        raise
    return ListeningSocket(sock, replace(address, name=os.fsencode(name)))


def _inherited(address: Address, stream: bool) -> socket.socket:
    """Return the socket that was passed to this process.

    The caller detaches it to keep the descriptor open.
    """
    assert address.descriptor is not None
    try:
        sock = socket.socket(fileno=address.descriptor)
    except OSError as error:
        raise ListenError(
            f"{address.text}: descriptor {address.descriptor} is not an open socket ({error.strerror}): "
            "have the parent process pass one"
        ) from None
    if not is_unix(sock, _type(stream)):
        sock.detach()
        raise ListenError(
            f"{address.text}: descriptor {address.descriptor} is not a Unix socket of type {_type(stream).name}: "
            f"pass one (for systemd: {unit_setting(stream)})"
        )
    return sock


def _type(stream: bool) -> socket.SocketKind:
    return socket.SOCK_STREAM if stream else socket.SOCK_SEQPACKET


def _remedy(address: Address, error: OSError) -> str:
    text, why = address.text, error.strerror or str(error)
    directory = os.path.dirname(text) or "."
    remedies = {
        errno.EADDRINUSE: "another server is running there: stop that one, or choose another --socket",
        errno.ENOENT: f"make the directory {directory} first, or choose another --socket",
        errno.ENOTDIR: f"{directory} is not a directory: choose another --socket",
        errno.EACCES: f"you may not make a socket in {directory}: choose another --socket, or start as another user",
        errno.EPERM: "only a member of the group (or root) may give it the socket: choose another --group or user",
        errno.EROFS: f"{directory} is read-only: choose another --socket",
        errno.ENOSPC: f"the file system of {directory} is full: make room, or choose another --socket",
        errno.EMFILE: "raise the limit of open files (ulimit -n)",
    }
    return f"cannot listen on {text}: {why}: {remedies.get(error.errno or 0, 'choose another --socket')}"
