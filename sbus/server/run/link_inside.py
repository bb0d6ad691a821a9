"""The link of a bus to its master, inside the bus's own process (``twistd sbus --upstream-inside``).

It is the link of `sbus.link`, and a client of this bus like the one in a process of its own. It connects over a pair of
transports in memory (`sbus.seqpacket.pair`). It has the queue, the limits, the prices and the control messages of a
client, is a user of its own, and a sidecar (`sbus.server.run.children`). What its queues hold is charged to that user.

Carrying a message costs the bus's thread as much as three bundled copies. The link's user pays for it: on the way up
from its balance of copies, on the way down from its balance of work (`sbus.server.core.turns`). Once one is spent, the
messages that go that way wait for its turn, while other users' clients are served. So its work in a turn is bounded.
Lone messages are paid for 32 at a time, because a payment takes a third of the time of carrying one. A lone message
that goes up is carried inside its publisher's batch. So if that batch is measured (`Turns.correct`), the publisher pays
for the 3 µs as well.
What the link knows of a client's patterns is memory of that client's user.

A request from a client below to a client of the master, and its reply, take four steps from process to process; with a
link in a process of its own they take six. In return the link takes CPU time from the bus: two CPUs cannot share the
work of one bus and its link.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, Final

from sbus.daemon.service import MultiService, Service
from sbus.link.core import Side
from sbus.link.service import HIGH_WATER, LinkService
from sbus.protocol.keys import PeerCredentials
from sbus.protocol.packets import DEFAULT_MAX_PACKET
from sbus.seqpacket.pair_endpoint import PairEndpoint
from sbus.server.core.listeners import INSIDE
from sbus.server.run.children import AttendedBus
from sbus.server.run.link import absolute_address
from sbus.server.run.service import BusFactory, BusService

__all__ = ["BusWithLink"]

_BELOW: Final = Side.BELOW  # a member looked up in its enum costs ten times a global
_CARRIED = 8
"""Messages that the link carries for one unit of work (`sbus.server.core.turns`): 0.13 µs each, in bundles."""
_PATTERN_WEIGHT = 3
"""Times that an open pattern takes the memory of one at a bus alone: it is listed for the link, which indexes it."""


def _own_credentials() -> PeerCredentials:
    return PeerCredentials(os.getpid(), os.geteuid(), os.getegid())


class BusWithLink(AttendedBus):
    """A bus and its link in one process.

    :param bus: the bus.
    :param service: the service that runs: the bus, or the bus with its recorder.
    :param upstream: the address of the master.
    :param out: the patterns that may go up.
    :param into: the patterns that may come down.
    :param secrets: whether secret messages go up.
    :param max_packet: the length of the longest packet in bytes.
    :param reactor: connects and has timers; None: the global one.
    """

    def __init__(
        self,
        bus: BusService,
        service: Service | MultiService,
        upstream: str,
        out: Iterable[bytes] = (),
        into: Iterable[bytes] = (),
        *,
        secrets: bool = False,
        max_packet: int = DEFAULT_MAX_PACKET,
        reactor: Any = None,
    ) -> None:
        super().__init__(bus, service, reactor)
        registry = bus.registry
        self._upstream = registry.upstream
        endpoint = PairEndpoint(self._reactor, BusFactory(registry, INSIDE), _own_credentials)
        self.link = LinkService(
            self._reactor,
            endpoint,
            absolute_address(upstream),
            out,
            into,
            secrets=secrets,
            max_packet=max_packet,
            label="link: ",
            charge=self._charge,
        )
        endpoint.held, endpoint.held_limit = self.link.held, 2 * HIGH_WATER
        registry.pattern_weight = _PATTERN_WEIGHT
        registry.attached["link"] = lambda: self._upstream.is_up

    def startService(self) -> None:
        """Listen, and connect the link."""
        super().startService()
        self.link.startService()

    def _charge(self, side: Side, batches: int, packets: int) -> None:
        client = self._upstream.link
        if client is not None and client.listener is INSIDE:
            balance = client.user.copies if side is _BELOW else client.user
            balance.work_left -= batches + packets // _CARRIED

    async def _stop_sidecar(self) -> None:
        await self.link.stopService()
