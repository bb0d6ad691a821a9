"""Addresses of a bus: what a user writes, and sockets that listen on it or connect to it.

==========================  ===================================================================
``/run/sbus.sock``          a path
``@name``                   an abstract address, exactly this name
``/dev/unix/abstract/HEX``  an abstract address as the original writes it: the whole ``sun_path``
                            in hexadecimal, padded with NULs to its full length
``/dev/unix/abstract``      a random one of that kind (listening only)
``/dev/fd/N``               an inherited descriptor (listening only)
``systemd[:NAME]``          socket activation, see systemd.socket(5) (listening only)
==========================  ===================================================================
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from sbus.errors import AddressError, ListenError
from sbus.syscalls.sockets import disable_fd_passing, is_seqpacket

__all__ = [
    "Address",
    "ListeningSocket",
    "adopt",
    "connect",
    "connectable_text",
    "default_address",
    "inherited_name",
    "listen",
    "parse",
]

_SUN_PATH = 108
_LOCK_PATIENCE = 1.0
"""Seconds to wait for another server that is being started in the same directory."""
_ABSTRACT = "/dev/unix/abstract"


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed address: a name for the kernel, or a descriptor, or a name for systemd.

    :ivar text: how to write it so that it means the same.
    :ivar name: what bind(2) and connect(2) take; abstract ones begin with a NUL.
    """

    text: str
    name: bytes = b""
    descriptor: int | None = None
    systemd: str | None = None

    @property
    def is_abstract(self) -> bool:
        return self.name.startswith(b"\0")

    @property
    def is_path(self) -> bool:
        return bool(self.name) and not self.is_abstract


def default_address(environ: os._Environ[str] | dict[str, str] = os.environ, uid: int | None = None) -> str:
    """Where a bus listens if it is not told: ``/run/sbus.sock`` for root, else in ``$XDG_RUNTIME_DIR``.

    :raises AddressError: if there is no such directory.
    """
    if (os.getuid() if uid is None else uid) == 0:
        return "/run/sbus.sock"
    directory = environ.get("XDG_RUNTIME_DIR")
    if not directory:
        raise AddressError("XDG_RUNTIME_DIR is not set: say where the socket is, as --socket=/some/path/sbus.sock")
    return os.path.join(directory, "sbus.sock")


def parse(text: str) -> Address:
    """Understand an address as a user writes it (see this module's table).

    :raises AddressError: if it is none.
    """
    if text == _ABSTRACT:
        return _abstract(b"\0" + secrets.token_bytes(_SUN_PATH - 1))
    if text.startswith(_ABSTRACT + "/"):
        digits = text[len(_ABSTRACT) + 1 :]
        if len(digits) % 2 or not re.fullmatch("[0-9a-fA-F]+", digits) or len(digits) > 2 * _SUN_PATH:
            raise AddressError(
                f"{text}: after {_ABSTRACT}/ come hexadecimal digits, an even number and at most {2 * _SUN_PATH}"
            )
        name = bytes.fromhex(digits)
        return _abstract(name if name.startswith(b"\0") else b"\0" + name)
    if text.startswith("@"):
        name = b"\0" + os.fsencode(text[1:])
        if len(name) < 2 or len(name) > _SUN_PATH:
            raise AddressError(f"{text}: an abstract name has 1 to {_SUN_PATH - 1} bytes")
        return Address(text, name)
    if text == "systemd" or text.startswith("systemd:"):
        return Address(text, systemd=text[len("systemd:") :])
    if match := re.fullmatch(r"/dev/fd/(\d{1,9})", text):
        return Address(text, descriptor=int(match[1]))
    name = os.fsencode(text)
    if not name or b"\0" in name:
        raise AddressError("an address must not be empty or hold a NUL: give a path, or @name for an abstract address")
    if len(name) >= _SUN_PATH:
        raise AddressError(f"{text}: the path has {len(name)} bytes, but a socket's has at most {_SUN_PATH - 1}")
    return Address(text, name)


def _abstract(name: bytes) -> Address:
    if len(name) > _SUN_PATH:
        raise AddressError(f"an abstract name has at most {_SUN_PATH - 1} bytes")
    name = name.ljust(_SUN_PATH, b"\0")
    return Address(f"{_ABSTRACT}/{name.hex()}", name)


def connectable_text(address: Address) -> str:
    """How a process that is started from here, in whatever directory, is to write the address to connect to it.

    :param address: where somebody listens; one that was inherited must be resolved, so that its name is known.
    :raises AddressError: if one cannot write it.
    """
    if address.is_path:
        path = os.path.abspath(address.name)
        return os.fsdecode(path if len(path) < _SUN_PATH else address.name)
    name = address.name[1:]
    if name and b"\0" not in name:
        return "@" + os.fsdecode(name)
    if len(address.name) != _SUN_PATH:
        raise AddressError(f"{address.text}: one cannot write the name that it is bound to: bind it to another")
    return _abstract(address.name).text


def connect(address: Address) -> socket.socket:
    """Connect, without waiting, to a bus.

    :returns: a connected, non-blocking socket.
    :raises BlockingIOError: if the server is there but its backlog is full: try again soon.
    :raises OSError: as connect(2).
    :raises AddressError: if one cannot connect to this kind of address.
    """
    if not address.name:
        raise AddressError(f"{address.text}: one can listen there, but not connect to it: give a path or @name")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        sock.connect(address.name)
    except BaseException:
        sock.close()
        raise
    return sock


@dataclass(slots=True)
class ListeningSocket:
    """A listening socket, and what is to be removed when it closes.

    :ivar path: the absolute path that was made for it, if one was.
    :ivar inode: (device, inode) of that path.
    """

    sock: socket.socket
    address: Address
    path: bytes | None = None
    inode: tuple[int, int] | None = None

    def close(self) -> None:
        """Stop listening; the path goes too, if it is still ours. May be called again."""
        if self.path is not None:
            with contextlib.suppress(OSError):
                found = os.lstat(self.path)
                if (found.st_dev, found.st_ino) == self.inode:
                    os.unlink(self.path)
        self.path = None
        self.sock.close()


def listen(
    address: Address,
    *,
    mode: int = 0o700,
    group: str | int | None = None,
    reuse: bool = False,
    replace_empty: bool = False,
    backlog: int = socket.SOMAXCONN,
) -> ListeningSocket:
    """Listen on a path or an abstract address, or on an inherited descriptor.

    The path never has more permissions than `mode`, not even for a moment: it is made without any,
    gets its group, then its mode, and only then the socket listens.

    :param mode: permissions of the path; who may write to it may connect.
    :param group: name or number of the group that the path is given to.
    :param reuse: replace a socket that nobody listens on any more (never one that is alive, nor
        anything that is not a socket).
    :param replace_empty: replace an empty regular file too.
    :raises ListenError: with the reason and the remedy in one line.
    """
    if address.systemd is not None:
        raise ListenError(f"{address.text}: sockets from systemd are handed over as descriptors")
    if address.descriptor is not None:
        return adopt(address, backlog)
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    except OSError as error:
        raise ListenError(_remedy(address, error)) from error
    bound = ListeningSocket(sock, address)
    try:
        disable_fd_passing(sock)
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


def _listen_on_path(
    bound: ListeningSocket, mode: int, group: str | int | None, reuse: bool, replace_empty: bool, backlog: int
) -> None:
    path = bound.address.name
    os.fchmod(bound.sock.fileno(), 0)
    # The lock is kept until it listens: before that it looks like a stale one.
    with _directory_lock(os.path.dirname(path) or b"."):
        if os.path.lexists(path):
            _check_stale(bound.address, reuse, replace_empty)
            os.unlink(path)
        bound.sock.bind(path)
        made = os.lstat(path)
        bound.path, bound.inode = os.path.abspath(path), (made.st_dev, made.st_ino)
        if group is not None:
            os.chown(path, -1, _gid(group))
        os.chmod(path, mode)
        bound.sock.listen(backlog)


def _gid(group: str | int) -> int:
    if isinstance(group, str) and not (group.isascii() and group.isdigit()):
        try:
            return grp.getgrnam(group).gr_gid
        except KeyError:
            raise ListenError(f"no group is called {group!r}: name one of getent group") from None
    gid = int(group)
    if not 0 <= gid < 2**32 - 1:  # which chown(2) would take for none at all
        raise ListenError(f"{gid} is no group: a GID is less than 2^32 - 1")
    return gid


@contextlib.contextmanager
def _directory_lock(directory: bytes) -> Iterator[None]:
    """Keep two servers from replacing each other's fresh socket in the belief that it is the stale one.

    Anybody who may read the directory may lock it, so nobody waits for long; some directories
    cannot be read, and some file systems cannot lock: then it is done without.
    """
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield  # bind(2) will say what is wrong with the directory, if anything is
        return
    try:
        deadline = time.monotonic() + _LOCK_PATIENCE
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.005)
            except OSError:
                break
        yield
    finally:
        os.close(fd)


def _check_stale(address: Address, reuse: bool, replace_empty: bool) -> None:
    """Refuse unless what stands at the path is a socket that nobody listens on, and may be replaced."""
    text = address.text
    found = os.lstat(address.name)
    if replace_empty and stat.S_ISREG(found.st_mode) and not found.st_size:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise ListenError(f"{text} exists and is not a socket: remove it yourself, or choose another --socket")
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as probe:
            probe.connect(address.name)  # of another type: whoever lives there does not notice
    except ConnectionRefusedError:
        if not reuse:
            raise ListenError(
                f"{text} is left over from a server that is gone: start with --reuse to replace it, or remove it"
            ) from None
        return
    except PermissionError:
        raise ListenError(
            f"{text} is there already, and as you may not connect to it nobody knows whether a server is running: "
            "make sure of that and remove it yourself, or choose another --socket"
        ) from None
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EPROTOTYPE):
            raise
    raise ListenError(f"{text} is in use by a server that is running: stop that one, or choose another --socket")


def inherited_name(address: Address) -> bytes:
    """The name that an inherited socket is bound to; abstract ones begin with a NUL.

    :raises ListenError: if it is no Unix-domain SEQPACKET socket.
    """
    sock = _inherited(address)
    try:
        name = sock.getsockname()
        return name if isinstance(name, bytes) else os.fsencode(name)
    finally:
        sock.detach()


def adopt(address: Address, backlog: int = socket.SOMAXCONN) -> ListeningSocket:
    """Listen on an inherited socket; its path, mode and removal stay with whoever made it.

    :raises ListenError: if it is no Unix-domain SEQPACKET socket, or is not bound.
    """
    sock = _inherited(address)
    sock.setblocking(False)
    os.set_inheritable(sock.fileno(), False)
    disable_fd_passing(sock)
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


def _inherited(address: Address) -> socket.socket:
    """The socket that was passed to this process; `detach` it if it is not to be closed."""
    assert address.descriptor is not None
    try:
        sock = socket.socket(fileno=address.descriptor)
    except OSError as error:
        raise ListenError(
            f"{address.text}: descriptor {address.descriptor} is not an open socket ({error.strerror}): "
            "have the parent process pass one"
        ) from None
    if not is_seqpacket(sock):
        sock.detach()
        raise ListenError(
            f"{address.text}: descriptor {address.descriptor} is not a Unix SOCK_SEQPACKET socket: "
            "pass one (for systemd: ListenSequentialPacket=)"
        )
    return sock


def _remedy(address: Address, error: OSError) -> str:
    text, why = address.text, error.strerror or str(error)
    directory = os.path.dirname(text) or "."
    remedies = {
        errno.EADDRINUSE: "another server is running there: stop that one, or choose another --socket",
        errno.ENOENT: f"make the directory {directory} first, or choose another --socket",
        errno.ENOTDIR: f"{directory} is not a directory: choose another --socket",
        errno.EACCES: f"you may not make a socket in {directory}: choose another --socket, or start as a user who may",
        errno.EPERM: "only a member of the group (or root) may give it the socket: choose another --group or user",
        errno.EROFS: f"{directory} is read-only: choose another --socket",
        errno.ENOSPC: f"the file system of {directory} is full: make room, or choose another --socket",
        errno.EMFILE: "raise the limit of open files (ulimit -n)",
    }
    return f"cannot listen on {text}: {why}: {remedies.get(error.errno or 0, 'choose another --socket')}"
