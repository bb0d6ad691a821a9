"""Packet transports in a reactor that a test turns by hand, and flood control on them."""

from __future__ import annotations

import socket

from sbus.errors import CloseReason
from sbus.flood import (
    SOFT_STRATEGIES,
    ClientSettings,
    Loss,
    QueueLimits,
    SendQueue,
    SharedBudget,
    Strategy,
    UserShare,
)
from sbus.interfaces import IPacketTransport
from sbus.seqpacket.framing import FrameReader, frame
from sbus.seqpacket.stream import StreamTransport
from sbus.seqpacket.transport import PacketTransport
from tests.support.reactors import HandTurnedReactor, Recorder, socket_pair

__all__ = ["DISCARD", "ERROR", "QUEUE", "FloodRecorder", "FramedPeer", "World", "flood_controlled", "numbered"]

QUEUE, DISCARD, _, ERROR = SOFT_STRATEGIES[:4]


class FramedPeer:
    """The peer's end of a stream socket, with the methods of a SEQPACKET one.

    :ivar raw: the socket itself.
    """

    def __init__(self, raw: socket.socket) -> None:
        self.raw = raw
        self._reader = FrameReader(1 << 24)
        self._packets: list[bytes] = []

    def send(self, packet: bytes) -> None:
        data = frame([packet])
        assert self.raw.send(data) == len(data), "the kernel takes a short frame whole, or not at all"

    def recv(self, size: int = 1 << 20) -> bytes:
        """Return the next packet, or the empty packet at the end of file; BlockingIOError if there is none yet."""
        while not self._packets:
            held = self._reader.held
            self._packets, ended = self._reader.read(self.raw)
            if not self._packets:
                if ended:
                    return b""
                if self._reader.held == held:
                    raise BlockingIOError
        return self._packets.pop(0)

    def shutdown(self, how: int) -> None:
        self.raw.shutdown(how)

    def close(self) -> None:
        self.raw.close()


class World:
    """A reactor turned by hand, and connections in it."""

    def __init__(self) -> None:
        self.reactor = HandTurnedReactor()
        self.peers: list[socket.socket | FramedPeer] = []
        self.transports: list[PacketTransport] = []

    def connect(
        self,
        protocol: Recorder,
        max_packet: int = 1000,
        transport_class: type[PacketTransport] = PacketTransport,
    ) -> socket.socket:
        ours, peer = socket_pair()
        self._start(protocol, transport_class(self.reactor, ours, max_packet))
        self.peers.append(peer)
        return peer

    def connect_stream(self, protocol: Recorder, max_packet: int = 1000) -> FramedPeer:
        ours, raw = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        peer = FramedPeer(raw)
        self._start(protocol, StreamTransport(self.reactor, ours, max_packet))
        self.peers.append(peer)
        return peer

    def _start(self, protocol: Recorder, transport: PacketTransport) -> None:
        self.transports.append(transport)
        transport.start(protocol)

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
