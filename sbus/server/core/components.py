"""The replaceable components, found by name: built-in ones and those of plugins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from twisted.plugin import getPlugins
from zope.interface.interface import InterfaceClass

from sbus.errors import PluginError
from sbus.flood import HARD_STRATEGIES, ORDERS, SOFT_STRATEGIES, ClientSettings
from sbus.flood.interfaces import IHardStrategy, IQueueOrder, ISoftStrategy
from sbus.server.core.credentials import KernelPolicy, OwnUserPolicy
from sbus.server.core.interfaces import ICredentialsPolicy

__all__ = ["FloodControls", "credentials_policies", "find_policy", "installed"]

_POLICIES = (KernelPolicy(), OwnUserPolicy())


def installed(interface: InterfaceClass, built_in: Iterable[Any]) -> Iterator[Any]:
    """Return the built-in components, then those of plugins (`twisted.plugin`)."""
    return chain(built_in, getPlugins(interface))


def _by(attribute: str, interface: InterfaceClass, built_in: Iterable[Any]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for component in installed(interface, built_in):
        name = getattr(component, attribute)
        if name in found and found[name] is not component:
            raise PluginError(f"two components have the name {name!r}: {found[name]!r} and {component!r}; remove one")
        found[name] = component
    return found


def credentials_policies() -> dict[str, ICredentialsPolicy]:
    """Return the credentials policies by name, as ``--credentials`` chooses them."""
    return _by("name", ICredentialsPolicy, _POLICIES)


def find_policy(name: str) -> ICredentialsPolicy:
    """Return the credentials policy of this name.

    :raises PluginError: if there is none; the text lists the existing ones.
    """
    policies = credentials_policies()
    try:
        return policies[name]
    except KeyError:
        raise PluginError(
            f"there is no credentials policy {name!r}: choose from {', '.join(sorted(policies))}"
        ) from None


def _soft() -> dict[bytes, ISoftStrategy]:
    return _by("selector", ISoftStrategy, SOFT_STRATEGIES)


def _hard() -> dict[bytes, IHardStrategy]:
    return _by("selector", IHardStrategy, HARD_STRATEGIES)


def _orders() -> dict[bytes, IQueueOrder]:
    return _by("selector", IQueueOrder, ORDERS)


@dataclass(frozen=True, slots=True)
class FloodControls:
    """The strategies and orders that a bus offers, by their control messages."""

    soft: dict[bytes, ISoftStrategy] = field(default_factory=_soft)
    hard: dict[bytes, IHardStrategy] = field(default_factory=_hard)
    orders: dict[bytes, IQueueOrder] = field(default_factory=_orders)

    @classmethod
    def built_in(cls) -> FloodControls:
        """Return those of the protocol only; this is quick, as it searches for no plugins."""
        return cls(
            {strategy.selector: strategy for strategy in SOFT_STRATEGIES},
            {strategy.selector: strategy for strategy in HARD_STRATEGIES},
            {order.selector: order for order in ORDERS},
        )

    def apply(self, settings: ClientSettings, key: bytes) -> ClientSettings | None:
        """Return a client's settings after a control message.

        The result is None if the message names no strategy or order.
        """
        if key in self.soft:
            return replace(settings, soft=self.soft[key])
        if key in self.hard:
            return replace(settings, hard=self.hard[key])
        if key in self.orders:
            return settings.with_order(self.orders[key])
        return None
