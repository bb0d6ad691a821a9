"""POSIX ACLs without the commands for them: as bytes, on files and directories."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

__all__ = ["acl", "acl_of", "set_acl", "with_acls"]

_NAMES = {False: "system.posix_acl_access", True: "system.posix_acl_default"}
_OWNER, _USER, _GROUP, _MASK, _OTHER = 1, 2, 4, 16, 32
_NOBODY = 0xFFFFFFFF


def acl(user: int, *, own: int = 7, other_user: int = 5, group: int = 5, mask: int = 7, others: int = 0) -> bytes:
    """An ACL that names one more user, as the kernel has it."""
    entries = [
        (_OWNER, own, _NOBODY),
        (_USER, other_user, user),
        (_GROUP, group, _NOBODY),
        (_MASK, mask, _NOBODY),
        (_OTHER, others, _NOBODY),
    ]
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


def set_acl(path: Path, value: bytes, *, default: bool = False) -> None:
    """Set the ACL of a file or a directory, or what is new in the directory gets."""
    os.setxattr(path, _NAMES[default], value)


def acl_of(path: Path, *, default: bool = False) -> bytes | None:
    """The ACL of a file or a directory; None if it has none."""
    try:
        return os.getxattr(path, _NAMES[default])
    except OSError:
        return None


@pytest.fixture
def with_acls(tmp_path: Path) -> Path:
    """A directory on a file system with ACLs."""
    try:
        set_acl(tmp_path, acl(1))
        os.removexattr(tmp_path, _NAMES[False])
    except OSError:
        pytest.skip(f"{tmp_path}: its file system has no ACLs: set TMPDIR to a directory on ext4, XFS or Btrfs")
    return tmp_path
