"""The interfaces of everything that can be replaced, and of what a replacement works with.

A component is found through Twisted's plugin system: a module in ``twisted/plugins`` with an object that provides
`twisted.plugin.IPlugin` and one of these interfaces. The command line chooses it by its name, or a client by the
control message that names it.
"""

from __future__ import annotations

from sbus.flood.interfaces import IHardStrategy, IPacketQueue, IQueueOrder, ISoftStrategy
from sbus.seqpacket.interfaces import IPacketReceiver, IPacketTransport
from sbus.server.interfaces import ICredentials, ICredentialsPolicy, IObserver

__all__ = [
    "ICredentials",
    "ICredentialsPolicy",
    "IHardStrategy",
    "IObserver",
    "IPacketQueue",
    "IPacketReceiver",
    "IPacketTransport",
    "IQueueOrder",
    "ISoftStrategy",
]
