"""The receiving half of a client's connection: its queue, and everything that goes into it.

.. rubric:: Theory of operation

`ReceivingHalf` is a receiver (`sbus.server.core.interfaces.Receiver`) with a queue, from which its transport sends.
`sbus.server.bus.protocol` adds the publisher, and how a connection begins and ends.

Everything for the client has a place in its stream. While mail waits for it, replies, choices, snapshots and the end go
into the mail as letters (`ReceivingHalf.in_order`).

====================  =============================================================================================
what comes            how it gets to the client
====================  =============================================================================================
messages              `sbus.server.bus.handover` puts them into the queue, or past it to the socket
replies, notices      never dropped; past `MAX_REPLIES`, counting letters of any kind, the client is not read
a reply held back     leaves a place, and later replies wait for it (`hold_replies`)
a choice              of strategy, order, receipts, bundles or senders takes effect at its place; any other at once.
                      Before the answer to a choice of senders, all waiting messages are sent
a snapshot            a `Front` before the queue; the client is not read until the last packet has been queued
room in the socket    sent on at once, or in turns while several users are active (`Drain`)
====================  =============================================================================================
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial

from sbus.errors import CloseReason
from sbus.flood import (
    DEFAULT_SETTINGS,
    PROGRAM,
    SIGNED,
    ClientSettings,
    Front,
    Loss,
    Naming,
    Outcome,
    Run,
    SendQueue,
    State,
    Verdict,
)
from sbus.flood.backlogs import PRICE, REPLY, SHARED
from sbus.policy.rules import Identity
from sbus.protocol.keys import PeerCredentials, SecretKey
from sbus.protocol.packets import CMSG, build
from sbus.seqpacket.interfaces import IPacketTransport
from sbus.server.bus.connection import Connection
from sbus.server.bus.drain import ARRANGED_AT_ONCE, Drain
from sbus.server.bus.mail import LETTER_MEMORY
from sbus.server.bus.memory import CLIENT_MEMORY
from sbus.server.bus.registry import SubscriptionRegistry
from sbus.server.core.credentials import is_proven
from sbus.server.core.interfaces import Rights
from sbus.server.core.limits import MAX_REPLIES
from sbus.server.core.listeners import Listener
from sbus.server.core.permissions import FREE
from sbus.server.core.users import User

__all__ = ["ReceivingHalf"]


class _Nobody:
    """The owner of a queue whose client has gone."""

    def on_drained(self, has_room: bool, is_empty: bool) -> None:
        pass

    def on_lost(self, losses: tuple[Loss, ...]) -> None:
        pass


_NOBODY = _Nobody()


class ReceivingHalf(Connection):
    """A client's connection, as far as it receives. The other half makes it a `sbus.server.core.interfaces.Client`.

    :param listener: the socket at which the client has connected.
    :ivar number: counts connections, from 1.
    :ivar peer: the client's credentials, from the kernel.
    :ivar user: the user that the client belongs to.
    :ivar queue: the packets on their way to the client.
    :ivar direct: the queue, while messages may be put into it, or sent past it, unsigned; else None.
    :ivar naming: names the publishers of the messages that are sent; None if the client has not asked.
    :ivar signature: names the client as a publisher to receivers that have asked for senders.
    :ivar settings: the client's choices; those that have a place in its stream may not be in force yet.
    :ivar has_echo: whether it gets its own messages, as these say.
    :ivar is_free: whether it may publish everything, and gets its own messages: nothing is to be asked for a run.
    :ivar untold: refusals of which it has had no denial (`sbus.server.bus.denials`).
    :ivar patterns: its subscriptions: pattern → (how often it subscribed, the parts of a secret pattern).
    :ivar pattern_bytes: the cost of these (`sbus.protocol.patterns.pattern_cost`).
    :ivar lost: messages that were dropped for the client.
    :ivar connected_at: when the client connected, in seconds since the epoch.
    :ivar is_ending: whether it is being disconnected; not while it only gets its queue after it has shut down writing.
    :ivar front: a snapshot that is sent before the queue; None without one.
    :ivar drain: the chore that sends on, while it waits for a turn; else None.
    :ivar is_write_closed: whether the client has shut down reading.
    """

    __slots__ = (
        "_delivery",
        "_identity",
        "_in_force",
        "_rights",
        "_scheduler",
        "connected_at",
        "drain",
        "front",
        "has_echo",
        "is_ending",
        "is_free",
        "is_write_closed",
        "listener",
        "lost",
        "naming",
        "number",
        "on_room",
        "pattern_bytes",
        "patterns",
        "peer",
        "settings",
        "signature",
        "untold",
    )

    settings: ClientSettings

    def __init__(self, registry: SubscriptionRegistry, listener: Listener) -> None:
        super().__init__(registry)
        self.listener = listener
        self._delivery = registry.delivery
        self._scheduler = registry.scheduler
        self.number = 0
        self.signature = PROGRAM  # until it is connected
        self.naming: Naming | None = None
        self.settings = self._in_force = DEFAULT_SETTINGS
        self.on_room: tuple[Callable[[], None], ...] = ()
        self.peer = PeerCredentials(0, 0, 0)
        self.patterns: dict[bytes, tuple[int, SecretKey | None]] = {}
        self.pattern_bytes = 0
        self.lost = self.untold = 0
        self.connected_at = time.time()
        self.is_ending = False
        self.has_echo = self.is_free = True
        self._rights: Rights | None = FREE
        self._identity: Identity | None = None
        self.drain: Drain | None = None
        self.front: Front | None = None
        self.is_write_closed = False

    @abstractmethod
    def close(self, reason: CloseReason, detail: str = "") -> None:
        """See `sbus.server.core.interfaces.Client`."""

    # --- the user that pays ------------------------------------------------------------------

    def _join(self, transport: IPacketTransport, user: User) -> None:
        """Belong to a user, who pays for everything that is sent from now on."""
        self.user = user
        self._use(self.registry.new_queue(self, self, user))
        self._send_from(transport, self.queue)

    def change_user(self, user: User) -> None:
        """See `sbus.server.core.interfaces.Client`."""
        if self.transport is None:
            return
        before, memory = self.user, CLIENT_MEMORY + self._kept + self._in_kernel + self._unsent
        before.blockers.pop(self, None)
        if before.askers.pop(self, self) is None:
            user.askers[self] = None
        self._join(self.transport, user)
        self._configure_queue()
        before.charge_memory(-memory)
        user.charge_memory(memory)
        self.registry.memory.add_buffer(before, -self._buffer)
        self.registry.memory.add_buffer(user, self._buffer)

    def release(self) -> None:
        """Give back the charges for the connection, which is lost."""
        self.user.charge_memory(-CLIENT_MEMORY - self._kept - self._in_kernel)
        self._kept = self._in_kernel = 0
        self.registry.memory.add_buffer(self.user, -self._buffer)
        self.drain = None

    def detach(self) -> None:
        """Let the queue refer to this object no longer: only the garbage collector would free such a cycle."""
        self.user.charge_memory(-self._unsent)
        self._unsent = 0
        self.queue.owner = _NOBODY

    # --- what it may do ----------------------------------------------------------------------

    @property
    def identity(self) -> Identity:
        """See `sbus.server.core.interfaces.Client`."""
        if self._identity is None:
            peer = self.peer
            groups = frozenset[int]() if self.transport is None else self.transport.peer_groups()
            self._identity = Identity(peer.uid, peer.gid, groups, self.listener.name, is_proven(peer))
        return self._identity

    @property
    def rights(self) -> Rights:
        """See `sbus.server.core.interfaces.Client`."""
        return self._rights or self.registry.guard.admit(self)

    @abstractmethod
    def use_rights(self, rights: Rights) -> None:
        """See `sbus.server.core.interfaces.Client`."""

    @abstractmethod
    def forget_rights(self) -> None:
        """See `sbus.server.core.interfaces.Client`."""

    # --- the place in the stream -------------------------------------------------------------

    def in_order(self, kind: str, call: Callable[[], object]) -> bool:
        """See `sbus.server.core.interfaces.Client`."""
        if self.user.lines.mail and self._post(kind, call):
            return False
        call()
        return True

    def _post(self, kind: str, call: Callable[[], object], size: int = 0) -> bool:
        """Put a letter into the mail, if mail waits for the client; charge the letter's memory and `size` bytes."""
        size += LETTER_MEMORY
        if not self._delivery.post(self, kind, partial(self._open, call, size)):
            return False
        self._letters += 1
        self._charge_unsent(size)
        if self._has_replies():
            self.pause()
        return True

    def _open(self, call: Callable[[], object], size: int) -> None:
        """Run the call of a letter whose place in the stream has come."""
        self._letters -= 1
        self._charge_unsent(-size)
        call()
        self._maybe_resume()
        if self.on_room and not self._letters:
            self._delivery.flush()  # first: a hook that finds a packet in `pending` would not be called again
            for hook in self.on_room:
                hook()

    def choose(self, settings: ClientSettings) -> None:
        """Choose flood control: from this place in the client's stream on."""
        self.settings = settings
        self.in_order("choice", partial(self.put_in_force, settings))

    def put_in_force(self, settings: ClientSettings) -> None:
        """Use the client's choices from now on: their place in its stream has come."""
        self._delivery.flush()  # first the client's earlier messages to itself, from the same batch
        self._in_force = settings
        self._configure_queue()

    def _configure_queue(self) -> None:
        """Give the queue the choices in force; after a snapshot, each message is kept if there is room."""
        settings = self._in_force
        if self.naming is not None and not (settings.order.arrival and settings.soft.always is not Verdict.REPLACE):
            self.queue.sign_all(self.naming.last)  # a message may leave the run that names its publisher
        self.queue.configure(settings if self.front is None else replace(settings, soft=DEFAULT_SETTINGS.soft))
        if self.reason is None and self.queue.state is not State.DEAF and self.queue.settings.can_block():
            self.user.blockers[self] = None
        else:
            self.user.blockers.pop(self, None)
        self.registry.backpressure.reconsider(self)
        self._delivery.reconsider(self)

    # --- replies and notices -----------------------------------------------------------------

    @property
    def is_behind(self) -> bool:
        """See `sbus.server.core.interfaces.Client`."""
        return self.queue.is_congested or self._letters > 0

    @property
    def waiting_replies(self) -> int:
        """See `sbus.server.core.interfaces.Client`."""
        return self.queue.replies + len(self.queue.pending) + self._letters

    def reply(self, key: bytes, payload: bytes) -> None:
        """See `sbus.server.core.interfaces.Client`."""
        packet = build(CMSG, key, payload)
        if not self._held:
            self._write(packet, True)
            return
        self.answer(packet)
        if self._has_replies():
            self.pause()

    def hold_replies(self) -> None:
        """See `sbus.server.core.interfaces.Client`."""
        self._held.append(None)
        if self._has_replies():
            self.pause()

    def release_reply(self, key: bytes, payload: bytes) -> None:
        """See `sbus.server.core.interfaces.Client`."""
        del self._held[0]
        self._write(build(CMSG, key, payload))
        while self._held and (packet := self._held[0]) is not None:
            del self._held[0]
            self._charge_unsent(-_memory(packet))
            self._write(packet)
        self._maybe_resume()

    def _charge_unsent(self, size: int) -> None:
        """Charge `size` bytes of a letter or of a reply that is held back; a negative size returns them."""
        self._unsent += size
        self.user.charge_memory(size)

    def forget_replies(self) -> None:
        """Drop the replies that are held back: nothing can be sent to the client any longer."""
        for packet in filter(None, self._held):
            self._charge_unsent(-_memory(packet))
        self._held.clear()
        self._maybe_resume()

    def notify(self, key: bytes, payload: bytes) -> None:
        """See `sbus.server.core.interfaces.Client`."""
        self._write(build(CMSG, key, payload))

    def _write(self, packet: bytes, is_own: bool = False) -> None:
        """Put a reply into the queue, or into the mail if its place is there.

        :param is_own: whether it answers the packets of this client that are being handled.
        """
        if self.is_write_closed or self.transport is None:  # `detach` gives the charges back before a later letter
            return
        if not (self.user.lines.mail and self._post("reply", partial(self._put_late, packet), _memory(packet))):
            self._put(packet, is_own)

    def answer(self, packet: bytes) -> None:
        """Put a reply into the queue, or after the replies that are held back: its place in the stream has come."""
        if self._held:
            self._held.append(packet)
            self._charge_unsent(_memory(packet))
        else:
            self._put(packet)

    def _put(self, packet: bytes, is_own: bool = False) -> None:
        """Put a reply into the queue: its place in the stream has come."""
        queue = self.queue
        queue.write(packet)
        if not queue.is_congested:
            if is_own:
                self._delivery.touch(self, self)
            else:
                self._delivery.touch_also(self)
        if len(queue.pending) >= MAX_REPLIES:
            self._delivery.flush()
        if self._has_replies():
            self.pause()

    def _put_late(self, packet: bytes) -> None:
        if not self.is_write_closed:
            self._put(packet)

    # --- snapshots ---------------------------------------------------------------------------

    def send_snapshot(self, packets: Generator[bytes | None, None, None], on_over: Callable[[], None]) -> None:
        """See `sbus.server.core.interfaces.Client`."""
        self._is_loading = True
        self.pause()
        self.in_order("snapshot", partial(self._begin_snapshot, packets, on_over))

    def _begin_snapshot(self, packets: Generator[bytes | None, None, None], on_over: Callable[[], None]) -> None:
        registry, transport = self.registry, self.transport
        if transport is None or self.is_write_closed or self.queue.state is State.HELD:  # nothing more leaves
            packets.close()
            self._is_loading = False
            on_over()
            self._maybe_resume()
            return
        self._delivery.flush()
        front, live = self.queue, registry.new_queue(self, self, self.user)
        if self.naming is not None:
            front.sign_pending(self.naming.last)  # flood control may decide about these; all others keep their places
        self._use(live)
        self.front = Front(front, packets, live, self, partial(self._snapshot_over, on_over))
        self._send_from(transport, self.front)
        self._configure_queue()
        self._delivery.touch(self, self)

    def _snapshot_over(self, on_over: Callable[[], None]) -> None:
        on_over()
        self.front = None
        self._is_loading = False
        if self.transport is not None:
            self._send_from(self.transport, self.queue)
        self._configure_queue()
        if not self.queue.is_congested:
            self._delivery.drained(self, True, True)
        if self.reason is None:
            self._maybe_resume()

    # --- senders -----------------------------------------------------------------------------

    def name_senders(self, wanted: bool, answer: bytes) -> None:
        """Begin or end to name the publishers of messages, at this place in the client's stream.

        The publishers of waiting messages are not known, or are no longer to be named. So all waiting messages are sent
        before the answer, as if it were a snapshot, and the client is not read until then.
        """
        if not self.in_order("choice", partial(self._name_senders, wanted, answer)):
            self._is_loading = True
            self.pause()

    def _name_senders(self, wanted: bool, answer: bytes) -> None:
        self._is_loading = False
        self._delivery.flush()
        transport = self.transport
        if transport is None:
            return
        self.settings = replace(self.settings, sender=wanted)
        if wanted:
            self.user.askers[self] = None
            if self.naming is None:
                self.naming = Naming(self.queue)
        else:
            self.user.askers.pop(self, None)
        if not self.queue.is_congested:
            self._stop_naming()
            self._use(self.queue)
            self._send_from(transport, self.queue)
            self._put(answer)  # before replies that are held back, as notices are
            self._maybe_resume()
        else:
            self._is_loading = True
            self.pause()
            self._begin_snapshot((packet for packet in (answer,)), self._stop_naming)

    def _stop_naming(self) -> None:
        """Stop naming publishers, if the client has asked for that."""
        if not self.settings.sender:
            self.naming = None

    def share_queue(self) -> None:
        """See `sbus.server.core.interfaces.Client`."""
        self.choose(self.settings.with_order(SHARED))

    def _use(self, queue: SendQueue) -> None:
        """Make a queue the one that messages go into."""
        is_asking = self.settings.sender
        queue.price = PRICE + SIGNED if is_asking else PRICE
        self.queue = queue
        self.direct = None if is_asking else queue

    def _send_from(self, transport: IPacketTransport, source: SendQueue | Front) -> None:
        """Make the transport send from a source, with the names of publishers if the client has asked for them."""
        naming = self.naming
        if naming is None:
            transport.queue = source
        else:
            naming.source = source
            transport.queue = naming

    # --- messages ----------------------------------------------------------------------------

    @property
    def can_block(self) -> bool:
        """See `sbus.server.core.interfaces.Receiver`."""
        return self in self.user.blockers

    @property
    def conflated(self) -> int:
        """See `sbus.server.core.interfaces.Client`."""
        return self.queue.conflated

    @property
    def is_holding(self) -> bool:
        """See `sbus.server.core.interfaces.Client`."""
        return len(self.queue) > 0 or self.front is not None or self.lost > 0 or self.user.lines.waits((self,))

    def enqueue(self, packets: list[bytes], may_block: bool) -> Outcome | None:
        """See `sbus.server.core.interfaces.Receiver`."""
        return self.queue.admit(Run(packets), may_block)

    def flush(self) -> None:
        """See `sbus.server.core.interfaces.Receiver`."""
        if self.transport is not None:
            self.transport.flush()
        else:
            self.queue.discard_all()

    def on_drained(self, has_room: bool, is_empty: bool) -> None:
        """See `sbus.flood.QueueOwner`."""
        self._delivery.drained(self, has_room, is_empty)
        if self.is_paused:
            self._maybe_resume()
        for hook in self.on_room:
            hook()

    def on_lost(self, losses: tuple[Loss, ...]) -> None:
        """See `sbus.flood.QueueOwner`."""
        self._delivery.dropped(self, losses)

    # --- sending on --------------------------------------------------------------------------

    def _writable(self, exclusive: bool) -> bool:
        """Send on: now if nobody else is active, else as a chore; see `IPacketTransport.on_writable`."""
        scheduler = self._scheduler
        if scheduler.is_busy:
            scheduler.note_event(self.user.lines)
        if self.drain is not None:
            return False  # it waits already
        if not scheduler.is_busy and self.transport is not None and self.queue_is_arranged(ARRANGED_AT_ONCE):
            self.transport.send_on(True)
            return True
        self.drain = Drain(self, scheduler)
        scheduler.add_chore(self.user.lines, self.drain)
        return False

    def queue_is_arranged(self, most: int) -> bool:
        """Put some waiting messages into the client's order; return whether all are that can be."""
        try:
            return self.transport is None or (self.front or self.queue).put_in_order(most)
        except Exception:  # of a plugged-in order: sending meets it again, which ends this connection and no turn
            return True


def _memory(reply: bytes) -> int:
    """Return the bytes of memory of a reply that is not in the queue yet."""
    return len(reply) + PRICE + REPLY
