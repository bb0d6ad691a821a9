"""The policy of a running bus: read again from its files, at SIGHUP or when an operator asks."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from twisted.internet import defer
from twisted.internet.threads import deferToThread
from twisted.logger import Logger

import sbus.policy
from sbus.errors import PolicyError, UsageError
from sbus.server.bus.registry import SubscriptionRegistry
from sbus.server.core.permissions import is_judged

if TYPE_CHECKING:
    from sbus.policy import Identity, Policy, Rights

__all__ = ["PolicyFiles", "describe", "log_in_force"]


class PolicyFiles:
    """Loads the policy of a bus again.

    The files are read in a thread, since ten thousand rules take a second.

    :param path: the file or the directory.
    :param listeners: the labels of the bus's sockets.
    :param on_loaded: called when a new policy is in force.
    :param on_change: called with whether a reload has begun or ended.
    """

    log = Logger(namespace="sbus.server")

    def __init__(
        self,
        registry: SubscriptionRegistry,
        path: str,
        listeners: Collection[str],
        on_loaded: Callable[[], None] = lambda: None,
        on_change: Callable[[bool], None] = lambda is_reloading: None,
    ) -> None:
        self.path = path
        self._registry = registry
        self._listeners = listeners
        self._on_loaded = on_loaded
        self._on_change = on_change
        self._lock = defer.DeferredLock()
        self._callers: list[defer.Deferred[int]] = []  # of the reload that has not begun yet

    async def reload(self) -> int:
        """Load the policy, and put it into force; return its generation.

        All calls during a reload share the next one.

        :raises PolicyError: if it is wrong, naming file, line and remedy; the one before stays in force.
        """
        caller: defer.Deferred[int] = defer.Deferred()
        self._callers.append(caller)
        if len(self._callers) == 1:
            self._lock.run(lambda: defer.Deferred.fromCoroutine(self._reload_for_callers()))
        return await caller

    async def _reload_for_callers(self) -> None:
        callers, self._callers = self._callers, []
        try:
            generation = await self._reload()
        except Exception as e:
            for caller in callers:
                caller.errback(e)
        else:
            for caller in callers:
                caller.callback(generation)

    async def _reload(self) -> int:
        self._on_change(True)
        try:
            registry = self._registry
            clients = {client.identity for client in registry.clients.values() if is_judged(client)}
            policy, _classes = await deferToThread(self._load, clients)
            generation = await registry.guard.adopt(policy)
        except PolicyError as e:
            self.log.error("the policy is not reloaded, and the one before stays in force: {error}", error=str(e))
            raise
        except Exception as e:
            self.log.failure("the policy is not reloaded, and the one before stays in force")
            raise PolicyError(f"{self.path}: {e!r} in the server: see its log, and try again") from e
        finally:
            self._on_change(False)
        log_in_force(self.log, policy)
        self._on_loaded()
        return generation

    def _load(self, clients: Collection[Identity]) -> tuple[Policy, list[Rights]]:
        """Load the policy, and make the rights of the clients that are there: many rules take half a second.

        :returns: the policy, and these rights, which it forgets if nobody holds them.
        """
        policy = sbus.policy.load(self.path, listeners=self._listeners)
        classes = [policy.rights_of(client) for client in clients]
        for rights in classes:
            rights.subscription(b"*/*")  # the first pattern with a wildcard has an index made
        return policy, classes

    def reload_at_signal(self) -> None:
        """Reload; mistakes are in the log."""
        defer.Deferred.fromCoroutine(self.reload()).addErrback(lambda failure: failure.trap(UsageError))


def log_in_force(log: Logger, policy: Policy) -> None:
    """Log which policy is in force: at the start, and after each reload."""
    log.info(
        "policy of generation {generation} is in force: {what}", generation=policy.generation, what=describe(policy)
    )


def describe(policy: Policy) -> str:
    """Return a policy in a few words, for the log."""
    files = policy.files[0] if len(policy.files) == 1 else f"{len(policy.files)} files"
    rules = f"{len(policy.rules)} rule{'' if len(policy.rules) == 1 else 's'}"
    mode = ", mode audit" if policy.is_audit else ""
    return f"{files}: {rules}, default {'deny' if policy.is_closed else 'allow'}{mode}"
