"""The plain model beside which `tests.unit.server.test_model` checks a bus: its clients, and what each is to get."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import Any

from twisted.internet import error
from twisted.python.failure import Failure

from sbus.errors import CloseReason
from sbus.protocol.bundles import MAX_BUNDLE
from sbus.server.asks.last_values import LastValueRule
from sbus.server.bus.protocol import BusProtocol
from sbus.server.bus.registry import SubscriptionRegistry
from sbus.server.core.credentials import AccessSettings
from sbus.server.core.limits import Limits
from sbus.server.core.observers import Observer
from sbus.server.ops.admin_status import status
from tests.support.buses import HandTurnedBus, Peer

CROWD = 18
"""Readers of one user."""
FEW = 3
"""Readers of another user."""
READERS = CROWD + FEW
PUBLISHERS = 3
PATTERNS = (b"k", b"j", b"i", b"*")
KEYS = (*PATTERNS[:3], b"kept/1")
CHOICES = (
    b"blocking/soft/queue",
    b"blocking/soft/discard",
    b"blocking/soft/block",
    b"blocking/soft/latest",
    b"blocking/soft/error",
    b"blocking/hard/discard",
    b"blocking/hard/block",
    b"blocking/hard/error",
    b"order/queue",
    b"order/stack",
    b"order/random",
    b"bundle/on",
    b"bundle/off",
    b"echo/off",
    b"echo/on",
    b"observer/on",
    b"observer/off",
)
REPLIES = {
    b"bundle/on": b"%d" % MAX_BUNDLE,
    **dict.fromkeys((b"bundle/off", b"observer/on", b"observer/off", b"receipts/on", b"sender/on", b"sender/off"), b""),
}
"""The payloads of the replies to choices that have one."""
LATEST = b"blocking/soft/latest"
REORDERED = {b"order/stack", b"order/random"}
LOSSY = {b"blocking/soft/discard", b"blocking/soft/error", b"blocking/hard/error"}
MERGE = 64
"""Messages behind a receipt from which on the next loss begins another one."""
TURNS = 8
"""Turns of the server after each that gives a socket room: one is for one user."""
A_WHILE = 0.05
"""Seconds: longer than the server puts anything off by itself."""

Step = tuple[str, int, int, int]


class Noted(BusProtocol):
    """A connection that reports to the model what the server handles, and when it stops."""

    def __init__(self, client: Client, registry: SubscriptionRegistry) -> None:
        super().__init__(registry)
        self.client = client

    def packetsReceived(self, packets: list[bytes]) -> int:
        return self.client.model.noted(self.client, packets, super().packetsReceived)

    def _handle(self, packet: bytes) -> bool:
        is_handled = super()._handle(packet)
        if not packet.startswith(b"MSG "):
            self.client.handled.append(packet)
        return is_handled

    def readConnectionLost(self) -> None:
        self.client.is_deaf = True
        super().readConnectionLost()

    def writeConnectionLost(self) -> None:
        self.client.is_deaf = True
        super().writeConnectionLost()

    def connectionLost(self, reason: Failure) -> None:
        self.client.is_deaf = True
        super().connectionLost(reason)

    def close(self, reason: CloseReason, detail: str = "") -> None:
        self.client.is_closing = True
        super().close(reason, detail)


class Client:
    """A client, with what it is to get and what it has got.

    :ivar offered: the messages that it is to get, in the order of handling; in `is_own`, whether it has published each.
    :ivar handled: packets that are no messages, handled in the batch at hand.
    :ivar unsure: how many of these were handled while it was being disconnected.
    :ivar coming: the messages that have not come: packet → place in `offered`.
    :ivar letters: the replies and the packets of snapshots that have not come, each with the number of messages that
        were offered before it was asked for.
    :ivar told: messages in its receipts.
    :ivar named: the publisher that was named last.
    :ivar is_asking: whether it is told of each publisher, by the answers that have come.
    """

    def __init__(self, model: Model, uid: int) -> None:
        self.model = model
        self.handled: deque[bytes] = deque()
        self.offered: list[bytes] = []
        self.is_own: list[bool] = []
        self.unsure = 0
        self.coming: dict[bytes, int] = {}
        self.letters: deque[tuple[int, bytes]] = deque()
        self.patterns: Counter[bytes] = Counter()
        self.chosen: set[bytes] = set()
        self.has_echo = True
        self.is_observer = self.is_deaf = self.is_closing = False
        self.has_receipts = self.has_asked = self.was_slow = self.was_aborted = self.has_ended = False
        self.got = self.told = 0
        self.named = b""
        self.is_asking = False
        self._fence = 0
        self._last = -1
        self._last_of_key: dict[bytes, int] = {}
        self._receipts: deque[tuple[int, int]] = deque()  # messages told with it, messages that came before it
        self.peer: Peer = model.bus.connect(uid=uid, make=partial(Noted, self))
        peer = self.peer.transport.credentials
        self.name = b"!/cred/%d/%d/%d" % (peer.gid, peer.uid, peer.pid)
        self.sender = b"%d %b" % (self.peer.protocol.number, self.name)

    # --- what the server has handled -----------------------------------------------------------

    def is_for(self, key: bytes) -> bool:
        """Return whether one of the patterns matches a key."""
        if self.is_deaf:
            return False
        return key in self.patterns or (b"*" in self.patterns and b"/" not in key) or self._has_kept(key)

    def _has_kept(self, key: bytes) -> bool:
        return b"kept/" in self.patterns and key.startswith(b"kept/")

    def offer(self, packet: bytes, is_own: bool) -> None:
        self.coming[packet] = len(self.offered)
        self.offered.append(packet)
        self.is_own.append(is_own)
        self.unsure += self.is_closing

    def asked(self, packet: bytes) -> None:
        """Note a packet that is no message."""
        verb, _, what = packet.partition(b" ")
        if verb == b"SUB":
            self.patterns[what] += 1
        elif verb == b"UNSUB":
            self.patterns[what] -= 1
            self.patterns = +self.patterns
        elif what == b"!/cred/whoami":
            self._expect(packet + b"\0" + self.name)
        elif what.startswith(b"last\0"):
            self.patterns[b"kept/"] += 1
            for value in self.model.kept.values():
                self._expect(value)
            self._expect(b"CMSG last/done\0kept/")
        else:
            self._chose(what)

    def _chose(self, choice: bytes) -> None:
        self.chosen.add(choice)
        if choice.startswith(b"echo/"):
            self.has_echo = choice == b"echo/on"
        elif choice.startswith(b"observer/"):
            self.is_observer = choice == b"observer/on"
        elif choice == b"receipts/on":
            self.has_receipts = not self.offered  # the sum of all receipts is to be the sum of all losses
        if choice in REPLIES:
            self._expect(b"CMSG %s\0%s" % (choice, REPLIES[choice]))

    def _expect(self, packet: bytes) -> None:
        if not self.is_deaf:
            self.letters.append((len(self.offered), packet))

    # --- what has come -------------------------------------------------------------------------

    @property
    def is_in_order(self) -> bool:
        return not self.chosen & REORDERED

    def take(self) -> None:
        """Check what has come since the last call: its order, and the places of receipts."""
        for packet in self.peer.take():
            if self.is_asking and packet.startswith(b"MSG "):
                assert self.named == self.model.senders[packet], "its publisher is not the one named last"
            if packet.startswith(b"CMSG lost\0"):
                self._receipt(packet)
            elif packet.startswith(b"CMSG sender\0"):
                self.named = packet.partition(b"\0")[2]
            elif self.letters and packet == self.letters[0][1]:
                self._fence = self.letters.popleft()[0]
                if packet.startswith(b"CMSG sender/"):
                    self.is_asking = packet.startswith(b"CMSG sender/on")
            else:
                assert packet in self.coming, "it comes twice, is for others, or is a reply before its turn"
                self._message(packet, self.coming.pop(packet))
        assert self.got + self.lost + self.conflated <= len(self.offered), "a message was lost and has come"

    def _message(self, packet: bytes, place: int) -> None:
        if self.is_in_order:
            assert place >= self._fence, "it was published before a request and comes after the reply"
            key = packet.partition(b"\0")[0]
            if LATEST in self.chosen:  # in the place of a replaced message stands its key's newest
                assert place > self._last_of_key.get(key, -1), "an older message comes after a newer one of its key"
            else:
                assert place > self._last, "messages have changed their order"
                assert not self.letters or place < self.letters[0][0], "it was published after a request that waits"
                missed = place - self.got
                assert missed <= self.lost, "a message was neither lost nor has it come"
                if self.has_receipts:
                    assert missed <= self.told, "a gap comes before its receipt"
                    self._check_receipts(missed)
            self._last_of_key[key] = self._last = place
        self.got += 1

    def _receipt(self, packet: bytes) -> None:
        messages, _, total = map(int, packet.partition(b"\0")[2].split()[:3])
        self.told += messages
        if self.has_receipts:
            assert self.told == total
            self._receipts.append((self.told, self.got))

    def _check_receipts(self, missed: int) -> None:
        """Check the receipts of the first `missed` losses, which are before the message that comes now."""
        while self._receipts and self._receipts[0][0] <= missed:
            _, before = self._receipts.popleft()
            assert self.got - before < MERGE, "a receipt stands too far before its gap"

    @property
    def lost(self) -> int:
        return self.peer.protocol.lost

    @property
    def conflated(self) -> int:
        return self.peer.protocol.conflated

    def check_end(self, has_room: bool, has_memory: bool) -> None:
        """Check that nothing waits: each message has come, was lost or was replaced."""
        gone = self.got + self.lost + self.conflated
        if self.peer.is_connected:
            assert gone == len(self.offered)
            assert not self.letters, "a reply has not come"
            assert not self.peer.protocol.is_paused
        assert gone >= len(self.offered) - self.unsure
        is_there = self.peer.is_connected or self.has_ended or not self.was_slow
        if is_there and has_room and not (self.was_slow and self.chosen & LOSSY):
            if has_memory:
                assert self.lost == 0
            elif LATEST not in self.chosen and not self.was_slow and not self.is_closing:  # for want of memory
                own = [packet for packet, is_own in zip(self.offered, self.is_own, strict=True) if is_own]
                assert not self.coming.keys() & set(own), "a user has lost messages of its own"
        if LATEST not in self.chosen:
            assert self.conflated == 0
        elif is_there and self.lost == 0:
            newest = {packet.partition(b"\0")[0]: packet for packet in self.offered}
            assert not self.coming.keys() & set(newest.values()), "the newest message of a key has not come"
        if self.has_receipts and not self.was_aborted:
            assert self.told == self.lost
            if self.is_in_order and LATEST not in self.chosen:
                self._check_receipts(self.lost)


class Echoing(Observer):
    """Publishes when something is delivered next, if it was told to."""

    publish: Callable[[], None] | None = None

    def delivered(self, client: object, messages: int, size: int) -> None:
        publish, self.publish = self.publish, None
        if publish is not None:
            publish()


class Model:
    """The bus, its clients, and what the server has handled."""

    def __init__(self, limits: Limits, across_users: bool, has_observer: bool) -> None:
        self._echoing = Echoing()
        self._has_observer = has_observer
        self.bus = HandTurnedBus(
            limits=limits,
            access=AccessSettings(block_across_users=across_users),
            observers=[self._echoing] if has_observer else [],
            last_values=(LastValueRule(b"kept/"),),
        )
        self.registry = self.bus.registry
        self._deliver, self.registry.deliver = self.registry.deliver, self._delivering
        self._numbers = itertools.count()
        self.kept: dict[bytes, bytes] = {}
        self.senders: dict[bytes, bytes] = {}
        self.published = self.copies = self.unsure_copies = self.unrouted = self.unsure_unrouted = 0
        self._is_handling = False
        self._published_in_batch: list[bytes] = []
        self.has_waited = False
        self.all: list[Client] = []
        self.publishers = [self._connect(uid) for uid in range(1, PUBLISHERS + 1)]
        self.publishers[0].peer.send(b"MSG kept/1\0one", b"MSG kept/2\0two")
        self.readers = [self._connect_reader(slot) for slot in range(READERS)]

    def _connect(self, uid: int) -> Client:
        client = Client(self, uid)
        self.all.append(client)
        return client

    def _connect_reader(self, slot: int) -> Client:
        return self._connect(2 if slot < CROWD else 3)

    # --- what the server handles -----------------------------------------------------------------

    def noted(self, client: Client, packets: list[bytes], handle: Callable[[list[bytes]], int]) -> int:
        """Have the server handle a batch, and note what it took."""
        before, given = self.registry.counters.published, list(packets)
        self._is_handling = True
        taken = handle(packets)
        self._is_handling = False
        self.has_waited = self.has_waited or taken < len(packets)
        inside, self._published_in_batch = self._published_in_batch, []
        messages = self.registry.counters.published - before - len(inside)
        noted = 0
        for packet in given[:taken]:
            if not packet.startswith(b"MSG "):
                if client.handled and client.handled[0] == packet:  # else the client was disconnected before
                    client.asked(client.handled.popleft())
                continue
            if noted == messages:
                break
            noted += 1
            self._message(packet, client)
        assert noted == messages
        assert client.is_closing or noted == sum(packet.startswith(b"MSG ") for packet in given[:taken])
        for packet in inside:
            self._message(packet, None)
        return taken

    def _message(self, packet: bytes, publisher: Client | None) -> None:
        """Note that a message was handled."""
        self.published += 1
        key = packet[4:].partition(b"\0")[0]
        takers = [client for client in self.all if client.is_for(key) and (client.has_echo or client is not publisher)]
        self.senders[packet] = b"0 -" if publisher is None else publisher.sender
        uid = None if publisher is None else publisher.peer.transport.credentials.uid
        for taker in takers:
            taker.offer(packet, taker.peer.transport.credentials.uid == uid)
        unsure = sum(taker.is_closing for taker in takers)
        self.copies += len(takers) - unsure
        self.unsure_copies += unsure
        counting = [taker for taker in takers if not taker.is_observer]
        if all(taker.is_closing for taker in counting):
            self.unsure_unrouted += bool(counting)
            self.unrouted += not counting
        if key.startswith(b"kept/"):
            self.kept.pop(key, None)
            self.kept[key] = packet

    def _publish_inside(self, key: bytes) -> None:
        """Publish on behalf of no client."""
        self.registry.publish(key, self.packets(key, 1)[0].partition(b"\0")[2])

    def _delivering(self, packets: list[bytes], route: Any, publisher: Any, *more: bool) -> int:
        """Note messages of no client when they are handled: those in a batch come after it."""
        done = self._deliver(packets, route, publisher, *more)
        if publisher is None:
            if self._is_handling:
                self._published_in_batch += packets
            else:
                for packet in packets:
                    self._message(packet, None)
        return done

    def packets(self, key: bytes, count: int) -> list[bytes]:
        numbers = itertools.islice(self._numbers, count)
        return [b"MSG %s\0%d %s" % (key, number, b"x" * (number % 7 + 400 * (number % 5 == 0))) for number in numbers]

    # --- steps -----------------------------------------------------------------------------------

    def _some(self, who: int) -> list[int]:
        """Return the slots of some readers: one, or the whole crowd."""
        return [who] if who < READERS else list(range(CROWD))

    def _tell(self, who: int, packet: bytes) -> None:
        for slot in self._some(who):
            self._send(self.readers[slot], packet)

    def _send(self, client: Client, *packets: bytes) -> None:
        if client.peer.is_connected and not client.has_ended and not client.was_aborted:
            client.peer.send(*packets)

    def publish(self, who: int, key: int, count: int) -> None:
        senders = [*self.publishers, *self.readers]
        self._send(senders[who % len(senders)], *self.packets(KEYS[key], count))

    def echo(self, who: int, key: int, count: int) -> None:
        """Have the next delivery make the program around the bus publish."""
        if self._has_observer:
            self._echoing.publish = partial(self._publish_inside, KEYS[key])

    def inside(self, who: int, key: int, count: int) -> None:
        """Have the program around the bus publish."""
        self._publish_inside(KEYS[key])

    def use_up(self, who: int, key: int, count: int) -> None:
        self.bus.use_up(self.publishers[who % PUBLISHERS].peer, count * 10)

    def stall(self, who: int, key: int, count: int) -> None:
        for slot in self._some(who):
            reader = self.readers[slot]
            reader.was_slow = True
            reader.peer.transport.capacity = key

    def drain(self, who: int, key: int, count: int) -> None:
        for slot in self._some(who):
            reader = self.readers[slot]
            if reader.was_slow and reader.peer.is_connected:
                reader.peer.drain(count)

    def free(self, who: int, key: int, count: int) -> None:
        for slot in self._some(who):
            if self.readers[slot].peer.is_connected:
                self.readers[slot].peer.drain()

    def select(self, who: int, key: int, count: int) -> None:
        self._tell(who, b"CMSG " + CHOICES[count % len(CHOICES)])

    def sender(self, who: int, key: int, count: int) -> None:
        """Have readers ask who publishes, or ask no more."""
        self._tell(who, b"CMSG sender/off" if key == 3 else b"CMSG sender/on")

    def receipts(self, who: int, key: int, count: int) -> None:
        for slot in self._some(who):
            if not self.readers[slot].offered:
                self._send(self.readers[slot], b"CMSG receipts/on")

    def fence(self, who: int, key: int, count: int) -> None:
        self._tell(who, b"CMSG !/cred/whoami")

    def last(self, who: int, key: int, count: int) -> None:
        for slot in self._some(who):
            reader = self.readers[slot]
            if not reader.has_asked:  # else a value and a message of a kept key could not be told apart
                reader.has_asked = reader.was_slow = True
                self._send(reader, b"CMSG last\0kept/")

    def subscribe(self, who: int, key: int, count: int) -> None:
        self._tell(who, b"SUB " + PATTERNS[key])

    def unsubscribe(self, who: int, key: int, count: int) -> None:
        self._tell(who, b"UNSUB " + PATTERNS[key])

    def end(self, who: int, key: int, count: int) -> None:
        """End connections, one way or another; mostly the clients come back as new ones."""
        for slot in self._some(who):
            self._end(self.readers[slot], key)
        self.bus.settle()
        if count % 4:
            for slot in self._some(who):
                self.readers[slot] = self._connect_reader(slot)

    def _end(self, reader: Client, how: int) -> None:
        if not reader.peer.is_connected or reader.has_ended or reader.was_aborted:
            return
        if how == 0:
            reader.has_ended = True
            reader.peer.transport.end()
            return
        reader.was_slow = True
        if how == 1:
            reader.was_aborted = True
            reader.peer.transport.hang_up()
        elif how == 2:
            reader.was_aborted = True
            reader.peer.transport._abort(Failure(error.ConnectionLost()))
        else:
            reader.peer.protocol.close(CloseReason.VIOLATION)

    def turn(self, who: int, key: int, count: int) -> None:
        self.bus.turn()

    def wait(self, who: int, key: int, count: int) -> None:
        self.bus.turn(A_WHILE)

    def finish(self, turns: int) -> None:
        """Have all sockets take everything, for a bounded number of turns; in the middle one more message comes."""
        for at in range(turns):
            if at == turns // 2:
                for key in KEYS:
                    self._send(self.publishers[0], *self.packets(key, 1))
            for client in self.all:
                if client.peer.is_connected:
                    client.peer.drain()
            self.bus.turn(A_WHILE)
            for _ in range(TURNS):
                self.bus.turn()

    # --- what must hold ------------------------------------------------------------------------

    def check(self) -> None:
        """Check what holds between any two steps."""
        for client in self.all:
            client.take()
        counters = self.registry.counters
        assert counters.published == self.published
        assert counters.routed >= self.copies
        if not self.registry.scheduler.mail_copies:  # copies in the mail may be for clients that have left
            assert counters.routed <= self.copies + self.unsure_copies
        assert counters.unrouted <= self.unrouted + self.unsure_unrouted
        assert counters.dropped == sum(counters.dropped_by.values()) == sum(client.lost for client in self.all)
        assert counters.conflated == sum(client.conflated for client in self.all)

    def check_end(self, has_room: bool, has_memory: bool) -> None:
        """Check that everything has come or is accounted for, and that nothing is left."""
        self.check()
        for client in self.all:
            client.check_end(has_room, has_memory)
        *_, figures = status(self.registry)
        assert figures is not None
        assert (figures["queue_messages"], figures["queue_bytes"], figures["held_publishers"]) == (0, 0, 0)
        for client in self.all:
            if client.peer.is_connected:
                client.peer.transport.hang_up()
        self.finish(8)
        self.check()
        *_, figures = status(self.registry)
        kept = self.registry.last_values
        assert figures is not None
        assert [figures[name] for name in ("clients", "users", "queues", "queue_messages", "queue_bytes")] == [0] * 5
        assert kept is not None
        assert figures["memory_bytes"] == kept.memory
