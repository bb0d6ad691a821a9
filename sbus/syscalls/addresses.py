"""Addresses of a bus: parse them, write them, and connect to them.

Theory of operation
-------------------

==========================  ===================================================================
``/run/sbus.sock``          a path
``@name``                   an abstract address, exactly this name
``/dev/unix/abstract/HEX``  an abstract address as the original writes it: the whole ``sun_path``
                            in hexadecimal, padded with NULs to its full length
``/dev/unix/abstract``      a random address of that kind (listening only)
``/dev/fd/N``               an inherited descriptor (listening only)
``systemd[:NAME]``          socket activation, see systemd.socket(5) (listening only)
==========================  ===================================================================

`parse` turns the text into an `Address` without asking the kernel anything, so a wrong address is an error at the start
and not at the first connection. Two spellings of an abstract address are two names: the kernel compares all bytes of
the name, so ``@name`` and the same name padded with NULs are different sockets.

Listening on an address is `sbus.syscalls.listening`.
"""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass, replace

from sbus.errors import AddressError

__all__ = [
    "Address",
    "absolute",
    "connect",
    "connectable_text",
    "default_address",
    "parse",
]

_SUN_PATH = 108
"""Bytes in ``sun_path`` (unix(7))."""
_ABSTRACT = "/dev/unix/abstract"


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed address: a name for the kernel, or a descriptor, or a name for systemd.

    :ivar text: the address in writing; parsed again, it means the same.
    :ivar name: the name for bind(2) and connect(2); an abstract one begins with a NUL.
    :ivar descriptor: the inherited descriptor, if it is one.
    :ivar systemd: the name of a socket that systemd passes, which can be empty.
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
    """Return the default address.

    It is ``/run/sbus.sock`` for root, else ``sbus.sock`` in ``$XDG_RUNTIME_DIR``.

    :raises AddressError: if ``XDG_RUNTIME_DIR`` is not set.
    """
    if (os.getuid() if uid is None else uid) == 0:
        return "/run/sbus.sock"
    directory = environ.get("XDG_RUNTIME_DIR")
    if not directory:
        raise AddressError("XDG_RUNTIME_DIR is not set: give an address, such as --socket=/some/path/sbus.sock")
    return os.path.join(directory, "sbus.sock")


def parse(text: str) -> Address:
    """Parse an address as a user writes it (see this module's table).

    :raises AddressError: if it is not an address.
    """
    if text == _ABSTRACT:
        return _abstract(b"\0" + os.urandom(_SUN_PATH - 1))
    if text.startswith(_ABSTRACT + "/"):
        digits = text[len(_ABSTRACT) + 1 :]
        if len(digits) % 2 or not re.fullmatch("[0-9a-fA-F]+", digits) or len(digits) > 2 * _SUN_PATH:
            raise AddressError(
                f"{text:.200}: after {_ABSTRACT}/ come hexadecimal digits, an even number and at most {2 * _SUN_PATH}"
            )
        name = bytes.fromhex(digits)
        return _abstract(name if name.startswith(b"\0") else b"\0" + name)
    if text.startswith("@"):
        name = b"\0" + os.fsencode(text[1:])
        if len(name) < 2 or len(name) > _SUN_PATH:
            raise AddressError(f"{text:.200}: an abstract name has 1 to {_SUN_PATH - 1} bytes")
        return Address(text, name)
    if text == "systemd" or text.startswith("systemd:"):
        return Address(text, systemd=text[len("systemd:") :])
    if match := re.fullmatch(r"/dev/fd/(\d{1,9})", text):
        return Address(text, descriptor=int(match[1]))
    name = os.fsencode(text)
    if not name or b"\0" in name:
        raise AddressError(
            "an address must not be empty or contain a NUL: give a path, or @name for an abstract address"
        )
    if len(name) >= _SUN_PATH:
        raise AddressError(f"{text:.200}: the path has {len(name)} bytes, but a socket's has at most {_SUN_PATH - 1}")
    return Address(text, name)


def _abstract(name: bytes) -> Address:
    if len(name) > _SUN_PATH:
        raise AddressError(f"an abstract name has at most {_SUN_PATH - 1} bytes")
    name = name.ljust(_SUN_PATH, b"\0")
    return Address(f"{_ABSTRACT}/{name.hex()}", name)


def absolute(address: Address) -> Address:
    """Return an address to listen on with an absolute path, which means the same in any working directory.

    A server may change its directory, and the kernel shows all clients the name that its socket was bound by. Other
    addresses stay as they are, and so does a path that would become too long for a socket.
    """
    if not address.is_path or address.descriptor is not None:
        return address
    name = _absolute(address.name)
    return replace(address, text=os.fsdecode(name), name=name)


def _absolute(path: bytes) -> bytes:
    absolute = os.path.join(os.getcwdb(), path)
    if b".." not in path.split(b"/"):  # the parent of a link's target is not that of the link
        absolute = os.path.normpath(absolute)
    return absolute if len(absolute) < _SUN_PATH else path


def connectable_text(address: Address) -> str:
    """Return the address as a child process in any working directory must write it.

    :param address: where a server listens; an inherited one must be resolved, so that its name is known.
    :raises AddressError: if there is no way to write its name.
    """
    if address.is_path:
        return os.fsdecode(_absolute(address.name))
    name = address.name[1:]
    if name and b"\0" not in name:
        return "@" + os.fsdecode(name)
    if len(address.name) != _SUN_PATH:
        raise AddressError(
            f"{address.text}: it is bound to a name that cannot be written as an address: bind it to another"
        )
    return _abstract(address.name).text


def connect(address: Address, *, stream: bool = False) -> socket.socket:
    """Connect to a bus without waiting.

    :param stream: connect a stream socket instead of a SEQPACKET one.
    :returns: a connected, non-blocking socket.
    :raises BlockingIOError: if the server's backlog is full: try again soon.
    :raises OSError: as connect(2).
    :raises AddressError: if it is an address for listening only.
    """
    if not address.name:
        raise AddressError(f"{address.text}: for listening only, clients cannot connect: give a path or @name")
    kind = socket.SOCK_STREAM if stream else socket.SOCK_SEQPACKET
    sock = socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        sock.connect(address.name)
    except BaseException:
        sock.close()
        raise
    return sock
