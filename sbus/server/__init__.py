"""The bus itself, for programs that contain one, and for plugins.

================================  ===================================================================
`BusService`                      the bus as a Twisted service
`SubscriptionRegistry`            the switch within it, from which the program publishes
`Counters`                        the numbers of events on a bus
`Limits`                          the limits of a bus
`Listener`                        a socket of a bus: the label of its clients, and its rules
`LogBudget`                       the bytes that clients can make the log grow by
`AccessSettings`                  the access options of a bus
`KernelPolicy`, `OwnUserPolicy`   the built-in credentials policies
`KernelCredentials`               the credentials that they make
`Observer`                        the base class of observers
`FloodControls`                   the strategies and orders that clients may choose
`SubordinateIds`                  the owners of the UIDs in ``/etc/subuid``
`Receiver`, `Publisher`           the interfaces of those that take messages from a bus, and send them
================================  ===================================================================

Importing this package imports none of them before it is used: ``sbusd`` listens before it loads Twisted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sbus.lazy import lazy_names

if TYPE_CHECKING:
    from sbus.daemon.log_budget import LogBudget
    from sbus.server.asks.last_values import LastValueRule
    from sbus.server.bus.registry import SubscriptionRegistry
    from sbus.server.core.components import FloodControls
    from sbus.server.core.counters import Counters
    from sbus.server.core.credentials import AccessSettings, KernelCredentials, KernelPolicy, OwnUserPolicy
    from sbus.server.core.interfaces import Publisher, Receiver
    from sbus.server.core.limits import Limits
    from sbus.server.core.listeners import Listener
    from sbus.server.core.observers import Observer
    from sbus.server.run.service import BusService
    from sbus.server.run.subuid import SubordinateIds

__all__ = [
    "AccessSettings",
    "BusService",
    "Counters",
    "FloodControls",
    "KernelCredentials",
    "KernelPolicy",
    "LastValueRule",
    "Limits",
    "Listener",
    "LogBudget",
    "Observer",
    "OwnUserPolicy",
    "Publisher",
    "Receiver",
    "SubordinateIds",
    "SubscriptionRegistry",
]

__getattr__ = lazy_names(
    __name__,
    {
        "AccessSettings": ".core.credentials",
        "BusService": ".run.service",
        "Counters": ".core.counters",
        "FloodControls": ".core.components",
        "KernelCredentials": ".core.credentials",
        "KernelPolicy": ".core.credentials",
        "LastValueRule": ".asks.last_values",
        "Limits": ".core.limits",
        "Listener": ".core.listeners",
        "LogBudget": "sbus.daemon.log_budget",
        "Observer": ".core.observers",
        "OwnUserPolicy": ".core.credentials",
        "Publisher": ".core.interfaces",
        "Receiver": ".core.interfaces",
        "SubordinateIds": ".run.subuid",
        "SubscriptionRegistry": ".bus.registry",
    },
)
