"""The file that makes a bridge the only one of its bus, and that survives the bridge.

It is locked (flock(2)) for as long as the bridge runs, so a second bridge finds the first, and a server can find out
whether a bus has one (`has_bridge`). Two bridges of one bus would carry each other's messages round for ever.

The bridge maps the file into memory and counts in it the messages that it has taken over and handled. The kernel keeps
these pages when the process is killed. So the next bridge knows how many messages died with the last one: at most those
that were taken over, and not dealt with. (It does not survive the machine.)

The file also holds the bridge's own identity, for a bus that has none (``link/path``), and the last run that messages
were counted with: a bridge that starts after the clock was set back would be taken for an old one.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import secrets
import stat
import struct

from sbus.errors import UsageError
from sbus.syscalls.addresses import parse
from sbus.syscalls.locks import is_locked

__all__ = ["State", "has_bridge", "state_path"]

_MAGIC = b"SBUSNAT1"
_COUNTS = struct.Struct("<QQQQ")
_RUN = struct.Struct("<Q")
_ID, _COUNTS_AT, _RUN_AT, _SIZE = slice(8, 40), 40, 72, 128
_RUN_STEP = 1_000_000_000
"""More than a bridge may add to its run while it counts (`sbus.link.nats.sequence.Numbering`)."""


def state_path(address: str) -> str:
    """Return the path of the file for the bus at an address: beside its socket.

    For an abstract address it is in ``/run`` (root), or in ``$XDG_RUNTIME_DIR``.

    :raises UsageError: if there is no such directory.
    """
    parsed = parse(address)
    if parsed.is_path:
        return os.path.abspath(os.fsdecode(parsed.name)) + ".nats"
    directory = "/run" if os.geteuid() == 0 else os.environ.get("XDG_RUNTIME_DIR")
    if not directory:
        raise UsageError("XDG_RUNTIME_DIR is not set: say where to keep the bridge's state, with --state=FILE")
    return os.path.join(directory, f"sbus-{hashlib.sha256(parsed.name).hexdigest()[:16]}.nats")


def has_bridge(address: str) -> bool:
    """Return whether a bridge to NATS runs for the bus at an address.

    :raises OSError: if the file is there and cannot be opened.
    """
    try:
        return is_locked(state_path(address))
    except UsageError:
        return False


class State:
    """The locked file of one bridge.

    :ivar bridge_id: 32 hexadecimal digits, the same for all bridges that use this file.
    :ivar lost: messages that the bridge before this one may have lost when it was killed: outwards and inwards.
    :raises UsageError: if another bridge runs, or if the file cannot be used.
    """

    def __init__(self, path: str) -> None:
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as e:
            raise UsageError(f"{path}: {e.strerror}: name another file with --state=FILE") from e
        try:
            self._lock(path)
            self._map = mmap.mmap(self._descriptor, _SIZE)
        except BaseException:
            os.close(self._descriptor)
            raise
        if self._map[:8] != _MAGIC:
            self._map[:] = bytes(_SIZE)
            self._map[_ID] = secrets.token_hex(16).encode()
            self._map[:8] = _MAGIC
        self.bridge_id = bytes(self._map[_ID])
        taken, settled, received, published = _COUNTS.unpack_from(self._map, _COUNTS_AT)
        self.lost = max(0, taken - settled), max(0, received - published)

    def _lock(self, path: str) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"another bridge to NATS serves this bus (it has locked {path}): stop it first; a bus has one bridge"
            ) from None
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise UsageError(f"{path}: not a file of this user: name another one with --state=FILE")
        found = os.pread(self._descriptor, _SIZE + 1, 0)
        if not found.startswith(_MAGIC) and found not in (b"", bytes(_SIZE)):  # a crash can leave these
            raise UsageError(f"{path}: this is no state of a bridge: name another file with --state=FILE, or remove it")
        if status.st_size != _SIZE:
            os.ftruncate(self._descriptor, 0)
        try:
            os.posix_fallocate(self._descriptor, 0, _SIZE)  # on a full disk, a write to the map would be a SIGBUS
        except OSError as e:
            raise UsageError(f"{path}: {e.strerror}: name another file with --state=FILE, or free some space") from e

    def note(self, taken: int, settled: int, received: int, published: int) -> None:
        """Write the counts: messages taken over and dealt with, outwards and inwards."""
        _COUNTS.pack_into(self._map, _COUNTS_AT, taken, settled, received, published)

    def next_run(self, now: int) -> int:
        """Return the run for a bridge to count with: above all earlier ones.

        :param now: the time in ns.
        """
        (last,) = _RUN.unpack_from(self._map, _RUN_AT)
        run = max(now, last + _RUN_STEP)
        _RUN.pack_into(self._map, _RUN_AT, run)
        return int(run)

    def close(self) -> None:
        """Give up the lock."""
        self._map.close()
        os.close(self._descriptor)
