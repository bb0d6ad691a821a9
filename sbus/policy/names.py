"""Users and groups by name or number, as the system knows them when a policy is read."""

from __future__ import annotations

import functools
import grp
import os
import pwd
from collections.abc import Sequence

from sbus.errors import UsageError
from sbus.policy.rules import UNNAMED, Identity
from sbus.syscalls.names import is_number
from sbus.syscalls.sockets import overflow_ids

__all__ = ["Names", "identity_of"]


class Names:
    """The IDs of users and groups; each name is looked up once.

    The overflow IDs are refused: the kernel reports them for every user and group that it cannot name.
    """

    def __init__(self) -> None:
        self._overflow_uid, self._overflow_gid = overflow_ids()
        self._user = functools.cache(lambda name: pwd.getpwnam(name).pw_uid)
        self._group = functools.cache(lambda name: grp.getgrnam(name).gr_gid)

    def user(self, name: str | int) -> int:
        """Return a UID.

        :param name: a name, or a number.
        :raises UsageError: if no client can prove to be this user, with the remedy.
        """
        uid = _number(name)
        try:
            uid = self._user(name) if uid is None else uid
        except (KeyError, ValueError):
            raise UsageError(
                f"there is no user {name!r}: create it first, or give a name from `getent passwd`, or a UID"
            ) from None
        return _checked(uid, self._overflow_uid, f"user {name!r}")

    def group(self, name: str | int) -> int:
        """Return a GID, as `user` does."""
        gid = _number(name)
        try:
            gid = self._group(name) if gid is None else gid
        except (KeyError, ValueError):
            raise UsageError(
                f"there is no group {name!r}: create it first, or give a name from `getent group`, or a GID"
            ) from None
        return _checked(gid, self._overflow_gid, f"group {name!r}")


def identity_of(user: str, groups: Sequence[str], listener: str) -> Identity:
    """Return a client as the kernel would report it.

    :param user: a name or a number.
    :param groups: the groups, the primary one first; none: those that the system gives the user.
    :raises UsageError: if there is no such user or group, with the remedy.
    """
    uid = _number(user)
    try:
        entry = pwd.getpwnam(user) if uid is None else pwd.getpwuid(uid)
    except (KeyError, ValueError, OverflowError):
        if uid is None:
            raise UsageError(f"there is no user {user!r}: give a name from `getent passwd`, or a UID") from None
        entry = None
    if entry is not None:
        uid = entry.pw_uid
    assert uid is not None
    gids: list[int] = []
    for group in groups:
        gid = _number(group)
        try:
            gids.append(grp.getgrnam(group).gr_gid if gid is None else gid)
        except (KeyError, ValueError):
            raise UsageError(f"there is no group {group!r}: give a name from `getent group`, or a GID") from None
    if not gids and entry is not None:
        gids = [entry.pw_gid, *os.getgrouplist(entry.pw_name, entry.pw_gid)]
    gid, *others = gids or [UNNAMED]
    overflow_uid, overflow_gid = overflow_ids()
    return Identity(uid, gid, frozenset(others), listener, uid != overflow_uid and gid != overflow_gid)


def _number(name: str | int) -> int | None:
    if isinstance(name, int):
        return name
    return int(name) if is_number(name) else None


def _checked(number: int, overflow: int, what: str) -> int:
    if not 0 <= number < UNNAMED:
        raise UsageError(f"there is no {what}: an ID is a number from 0 to {UNNAMED - 1}")
    if number == overflow:
        raise UsageError(
            f"{what} matches nobody: the kernel reports the ID {overflow} for all that it cannot name, so it proves "
            "nothing; take it out, and tell such clients apart by their socket (listeners)"
        )
    return number
