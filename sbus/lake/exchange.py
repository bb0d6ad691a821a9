"""Exchange two directories atomically: renameat2(2) with ``RENAME_EXCHANGE``, which Python does not have."""

from __future__ import annotations

import ctypes
import errno
import os

from sbus.errors import LakeError

__all__ = ["exchange"]

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def exchange(one: str, other: str) -> None:
    """Exchange the names of two directories of one file system; no moment is without either.

    :raises sbus.errors.LakeError: if the file system cannot do that (NFS cannot).
    :raises OSError: if it fails for another reason.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        raise LakeError(
            f"{other}: its file system cannot exchange two directories atomically, so readers could miss rows: "
            "keep the lake on a local file system, or use a lake of --format=delta, which needs no such call"
        )
    raise OSError(code, os.strerror(code), other)
