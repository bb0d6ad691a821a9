"""The policy of a running bus, and the clients that it judges."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

from sbus.cli.admin.connection import Admin
from sbus.cli.policy.options import load_policy
from sbus.errors import UsageError
from sbus.journal.keytext import from_text
from sbus.policy import Identity, Policy, Verdict

__all__ = ["Lost", "RunningBus"]


class Lost(NamedTuple):
    """A subscription that a policy would end.

    :ivar client: the number of the connection.
    """

    client: int
    pid: int
    who: Identity
    pattern: bytes
    verdict: Verdict


class RunningBus:
    """The answers of a bus about its policy and its clients.

    :param admin: its admin socket.
    """

    def __init__(self, admin: Admin) -> None:
        self._admin = admin

    def policy(self) -> Policy:
        """Return the policy in force, from its files.

        :raises UsageError: if the files are not those that the bus has read.
        """
        found = self._admin.get("/v1/policy")
        policy = load_policy(found["path"])
        if policy.digest != found["digest"]:
            raise UsageError(
                f"{found['path']} has changed since the bus has read it, so no file has the policy in force: run `sbus "
                "policy reload`, or name the files to compare or to explain; next time, edit a copy"
            )
        return policy

    @cached_property
    def _clients(self) -> list[tuple[dict[str, Any], Identity]]:
        return [
            (
                row,
                Identity(row["uid"], row["gid"], frozenset(row["groups"]), row["listener"], row["is_proven"]),
            )
            for row in self._admin.get("/v1/policy/clients")["clients"]
        ]

    @property
    def identities(self) -> set[Identity]:
        """The clients, as a policy tells them apart."""
        return {who for _, who in self._clients}

    def lost(self, policy: Policy) -> Iterator[Lost]:
        """Yield the subscriptions that a policy would end."""
        for row, who in self._clients:
            rights = policy.rights_of(who)
            for text in row["patterns"]:
                pattern = from_text(text)
                verdict = rights.subscription(pattern)
                if not verdict.is_allowed and not policy.is_audit:
                    yield Lost(row["client"], row["pid"], who, pattern, verdict)
