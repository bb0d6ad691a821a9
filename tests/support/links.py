"""Links between buses without sockets: the real core and the real servers, joined by hand."""

from __future__ import annotations

from sbus.link.core import LinkCore, Side
from tests.support.buses import Bus, Peer

__all__ = ["Link"]


class Link:
    """A link between two buses, as `sbus.link.core.Wire`: what one sends reaches the other with `pump`."""

    def __init__(self, below: Bus, above: Bus, out=(b"",), into=(b"",), *, pid: int = 77, uid: int = 0, **options):
        self._buses = (below, above)
        self._peers: list[Peer | None] = [None, None]
        self._pid = pid
        self._uid = uid
        self.lines: list[str] = []
        self.retries: list[float | None] = []
        self.core = LinkCore(self, out, into, **options)
        self.connect(Side.BELOW)
        self.connect(Side.ABOVE)

    @property
    def now(self) -> float:
        return self._buses[0].clock.seconds()

    def peer(self, side: Side) -> Peer:
        peer = self._peers[side]
        assert peer is not None
        return peer

    def connect(self, side: Side) -> None:
        """Connect to one of the buses, if it is not connected."""
        if self._peers[side] is None:
            uid = 0 if side is Side.BELOW else self._uid
            self._peers[side] = self._buses[side].connect(uid=uid, gid=1, pid=self._pid)
            self.core.connected(side)

    def break_off(self, side: Side) -> None:
        """Lose one of the connections."""
        peer, self._peers[side] = self._peers[side], None
        if peer is not None:
            peer.transport.hang_up()
            self._buses[side].settle()
            self.core.disconnected(side)

    def limit(self, side: Side, size: int) -> None:
        """See `sbus.link.core.Wire`: packets of any length cross here."""

    def pump(self) -> bool:
        """Hand over what both buses have sent; return whether there was anything."""
        is_busy = False
        for side in Side:
            peer = self._peers[side]
            packets = peer.take() if peer is not None else []
            if packets:
                is_busy = True
                self.core.received(side, packets, self.now)
            if peer is not None and not peer.is_connected and self._peers[side] is peer:
                self.core.received(side, peer.take(), self.now)  # the last packets, with a bye
                self._peers[side] = None
                self.core.disconnected(side)
        self.core.tick(self.now)
        return is_busy

    # --- `sbus.link.core.Wire` ---------------------------------------------------------------

    def send(self, side: Side, packets: list[bytes]) -> None:
        peer = self._peers[side]
        if peer is not None:
            peer.send(*packets)

    def bundle(self, side: Side, limit: int) -> None:
        pass

    def disconnect(self, side: Side, reason: str, retry: float | None) -> None:
        self.lines.append(reason)
        self.retries.append(retry)
        peer, self._peers[side] = self._peers[side], None
        if peer is not None:
            peer.transport.hang_up()
            self._buses[side].settle()

    def is_up(self, up: bool, master: str) -> None:
        self.lines.append(f"{'up' if up else 'down'}: {master}")

    def log(self, text: str) -> None:
        self.lines.append(text)


def settle(links: list[Link]) -> None:
    """Pump all links until nothing moves."""
    for _ in range(1000):
        is_busy = [link.pump() for link in links]
        if not any(is_busy):
            return
    raise AssertionError("messages go round for ever")
