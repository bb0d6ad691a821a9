"""The interfaces for plugins and embedding programs, and the types that they use.

Twisted's plugin system finds a component: a module in ``twisted/plugins`` with an object that provides
`twisted.plugin.IPlugin` and one of these interfaces. The command line selects it by its name, a client by the control
message that names it.
"""

from __future__ import annotations

from sbus.flood.interfaces import IHardStrategy, IPacketQueue, IQueueOrder, ISoftStrategy, Verdict
from sbus.protocol.keys import PeerCredentials, SecretKey
from sbus.seqpacket.interfaces import IPacketReceiver, IPacketTransport
from sbus.server.core.interfaces import ICredentials, ICredentialsPolicy, IObserver

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
    "PeerCredentials",
    "SecretKey",
    "Verdict",
]
