"""Packet transports in a reactor that a test turns by hand, and flood control on them."""

from __future__ import annotations

import socket

from sbus.errors import CloseReason
from sbus.flood import ClientSettings, Loss, QueueLimits, SendQueue, SharedBudget, Strategy, UserShare
from sbus.interfaces import IPacketTransport
from sbus.seqpacket.transport import PacketTransport
from tests.support.reactors import HandTurnedReactor, Recorder, socket_pair

__all__ = ["FloodRecorder", "World", "flood_controlled", "numbered"]


class World:
    """A reactor turned by hand, and connections in it."""

    def __init__(self) -> None:
        self.reactor = HandTurnedReactor()
        self.peers: list[socket.socket] = []
        self.transports: list[PacketTransport] = []

    def connect(
        self,
        protocol: Recorder,
        max_packet: int = 1000,
        transport_class: type[PacketTransport] = PacketTransport,
    ) -> socket.socket:
        ours, peer = socket_pair()
        self.peers.append(peer)
        transport = transport_class(self.reactor, ours, max_packet)
        self.transports.append(transport)
        transport.start(protocol)
        return peer

    def turn(self, times: int = 1) -> None:
        self.reactor.turn(times)

    def settle(self) -> None:
        self.reactor.settle()

    def close(self) -> None:
        """Close everything; nothing may be left in the reactor."""
        for peer in self.peers:
            peer.close()
        for transport in self.transports:
            transport.abortConnection()
        self.settle()
        assert self.reactor.getReaders() == []
        assert [call for call in self.reactor.getDelayedCalls() if call.active()] == []


def numbered(count: int, start: int = 0) -> list[bytes]:
    """Return `count` packets, each of which is its number in four digits."""
    return [b"%04d" % i for i in range(start, start + count)]


class FloodRecorder:
    """The owner of a queue, which counts what is lost and why the connection must be closed."""

    def __init__(self) -> None:
        self.lost = 0
        self.reasons: list[CloseReason] = []

    def on_drained(self, has_room: bool, is_empty: bool) -> None:
        pass

    def on_lost(self, losses: tuple[Loss, ...]) -> None:
        self.lost += sum(loss.messages for loss in losses)


class _SettledQueue(SendQueue):
    """A queue that decides at once about what a first flush has left."""

    recorder: FloodRecorder

    def ack(self, taken: list[bytes], sent: int) -> None:
        super().ack(taken, sent)
        if self.is_congested and self.pending and (outcome := self.settle(may_block=False)) is not None:
            self.recorder.lost += outcome.dropped
            if outcome.close is not None:
                self.recorder.reasons.append(outcome.close)


def flood_controlled(transport: IPacketTransport, soft: Strategy) -> tuple[SendQueue, FloodRecorder]:
    """Give a transport a queue with flood control, as the server does."""
    recorder = FloodRecorder()
    queue = _SettledQueue(recorder, QueueLimits(), UserShare(SharedBudget()))
    queue.recorder = recorder
    queue.configure(ClientSettings(soft=soft))
    transport.queue = queue
    return queue, recorder
