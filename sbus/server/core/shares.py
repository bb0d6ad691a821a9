"""Shares: the part of a bus that each user may take, and the source of each number.

.. rubric:: Theory of operation

A user has four limits: clients at one time, patterns, bytes of memory, and connections a second. Each comes from the
last of these that gives it:

=============================  =====================================================================================
source                         what it gives
=============================  =====================================================================================
``default``                    all four, for all users
``--user-clients`` etc.        one of them, for all users
``--user-clients=USER=N``      the clients of one user
``policy FILE:LINE``           the fields of a table ``[[limits]]``, for the users whom it names; of two tables, the
                               later one, field by field
=============================  =====================================================================================

`Shares` holds the result for the users who have their own numbers; all others have the same `Share`. Each `User` holds
its own, so that a limit costs an attribute where it is asked, and a reload replaces those of connected users
(`sbus.server.core.users.Users.set_limits`). A lower limit ends no client: it counts from the next connection, pattern
or byte on.

Root, the server's own user and services are no concern of this module: a table never makes an exempt user limited, and
the programs that serve a bus have UIDs that no table can name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from sbus.flood import UNLIMITED
from sbus.policy.rules import UserLimits
from sbus.server.core.limits import Limits

__all__ = ["UNBOUNDED", "Limit", "Share", "Shares", "limits_by_user"]

_POLICY = "policy "


class Limit(NamedTuple):
    """One limit of one user.

    :ivar most: the number that is allowed; one more is refused.
    :ivar source: the source of the number; see the table above.
    """

    most: int
    source: str


class Share(NamedTuple):
    """The limits of one user.

    :ivar clients: connections at one time.
    :ivar patterns: patterns of all its clients together.
    :ivar memory: bytes of memory.
    :ivar accepts: connections a second, and five times that at once.
    """

    clients: Limit
    patterns: Limit
    memory: Limit
    accepts: Limit

    def setting(self, name: str) -> str:
        """Return the source of one of these limits, with its value: the setting that the operator has to change."""
        most, source = getattr(self, name)
        if source.startswith(_POLICY):
            return f"{name} = {most}, {source}"
        return source if "=" in source else f"--user-{name}={most}"


UNBOUNDED = Share(*(Limit(UNLIMITED, "default") for _ in Share._fields))
"""The share of a receiver inside the program, such as the last values."""


def limits_by_user(tables: Iterable[UserLimits]) -> dict[int, dict[str, Limit]]:
    """Return the values that tables set for each user, by UID and by field; the last table with a field wins."""
    found: dict[int, dict[str, Limit]] = {}
    for table in tables:
        given = {name: getattr(table, name) for name in Share._fields}
        limits = {name: Limit(most, f"{_POLICY}{table.where}") for name, most in given.items() if most is not None}
        for uid in table.users:
            found.setdefault(uid, {}).update(limits)
    return found


class Shares:
    """The shares of all users of one bus.

    :param limits: the limits of the bus, as its options give them.
    :param memory: bytes of memory of a user, by `sbus.server.core.limits.Limits.memory_account`.
    :ivar of_most: the share of the users who have no separate number.
    :ivar of_some: the shares of those who have, by UID.
    """

    def __init__(self, limits: Limits, memory: int = UNLIMITED) -> None:
        self.of_most = Share(
            Limit(limits.user_clients, _source(limits, "user_clients")),
            Limit(limits.user_patterns, _source(limits, "user_patterns")),
            Limit(memory, _source(limits, "user_memory")),
            Limit(limits.user_accepts, _source(limits, "user_accepts")),
        )
        self._named = {
            uid: self.of_most._replace(clients=Limit(most, f"--user-clients={uid}={most}"))
            for uid, most in limits.user_clients_of.items()
        }
        self.of_some: Mapping[int, Share] = self._named

    def of(self, uid: int) -> Share:
        """Return the share of a user."""
        return self.of_some.get(uid, self.of_most)

    def override(self, tables: Iterable[UserLimits]) -> None:
        """Let tables of a policy override the options; those of an earlier call are forgotten."""
        found = dict(self._named)
        for uid, limits in limits_by_user(tables).items():
            found[uid] = found.get(uid, self.of_most)._replace(**limits)
        self.of_some = found


def _source(limits: Limits, name: str) -> str:
    is_default = getattr(limits, name) == Limits.__dataclass_fields__[name].default
    return "default" if is_default else f"--{name.replace('_', '-')}"
