"""The server's interfaces: for plugins, receivers and publishers."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Protocol

from zope.interface import Attribute, Interface

from sbus.errors import CloseReason, Violation
from sbus.flood import ClientSettings, Naming, Outcome, PayloadMessage, SendQueue, Signature
from sbus.policy.rules import Identity, Verdict
from sbus.protocol.keys import PeerCredentials, SecretKey
from sbus.routing.route import Route
from sbus.seqpacket.interfaces import IPacketTransport
from sbus.server.core.listeners import Listener
from sbus.server.core.users import User

__all__ = [
    "Client",
    "ICredentials",
    "ICredentialsPolicy",
    "IObserver",
    "MessageTap",
    "PatternEvents",
    "Publisher",
    "Receiver",
    "Rights",
]


class Rights(Protocol):
    """The rights of the clients of one class; the class is this object."""

    @property
    def publishes_all(self) -> bool:
        """Whether they may publish every key, and nothing is to be noted."""

    @property
    def rates(self) -> tuple[float, ...]:
        """Messages a second, each of all clients of one user that have this rate; empty for any number."""

    def payloads(self) -> Verdict:
        """Return whether they may publish payloads in sealed memory."""

    def publication(self, zone: Any) -> Verdict:
        """Return whether they may publish the keys of a zone."""

    def subscription(self, pattern: bytes) -> Verdict:
        """Return whether they may subscribe to an open pattern."""


class Publisher(Protocol):
    """A client as the sender of messages, which receivers can block."""

    peer: PeerCredentials
    """The publisher's credentials, from the kernel."""

    user: User
    """The publisher's user."""

    signature: Signature
    """Names the publisher to receivers that have asked for senders."""

    @property
    def is_paused(self) -> bool:
        """Whether the server reads nothing from it now."""

    def pause_publishing(self) -> None:
        """Stop reading: at least one receiver blocks this publisher."""

    def resume_publishing(self) -> None:
        """Read again: no receiver blocks this publisher now."""

    def wait_for_mail(self) -> None:
        """Stop reading until `mail_delivered`: a receiver that may block this publisher has mail of it."""

    def mail_delivered(self) -> None:
        """Continue: that mail is delivered."""


class Receiver(Protocol):
    """A target of messages: a client's connection, or a subscriber inside the program.

    Subscribe one with `SubscriptionRegistry.subscribe`. For a receiver with a `direct` queue, the hot loop of
    `sbus.server.bus.handover` uses that and its transport. A receiver without a `queue` gets every run of messages
    through `enqueue`, and then `flush` when the batch has ended.
    """

    peer: PeerCredentials
    """The credentials of the receiver: they decide about secrets, and about the publishers that it may block."""

    user: User
    """The user of the receiver, from `SubscriptionRegistry.users`."""

    patterns: dict[bytes, tuple[int, SecretKey | None]]
    """Its subscriptions: pattern → (how often it subscribed, the parts of a secret pattern)."""

    pattern_bytes: int
    """The cost of all patterns together, by `sbus.protocol.patterns.pattern_cost`."""

    pattern_memory: int
    """The memory of these, in bytes, by `sbus.server.bus.memory.pattern_memory`."""

    lost: int
    """Messages that were dropped for it."""

    @property
    def queue(self) -> SendQueue | None:
        """Its queue of packets, or None."""

    @property
    def direct(self) -> SendQueue | None:
        """The queue, if messages may be put into it unsigned: the receiver has not asked for senders. Else None."""

    @property
    def naming(self) -> Naming | None:
        """Names the publishers of its messages; None if it has not asked."""

    @property
    def transport(self) -> IPacketTransport | None:
        """The transport that sends from the queue.

        It is None without a `queue`, and once the connection is lost.
        """

    @property
    def can_block(self) -> bool:
        """Whether `enqueue` can return an outcome that blocks the publisher."""

    def enqueue(self, packets: list[bytes], may_block: bool) -> Outcome | None:
        """Take a run of messages, one packet each.

        :param may_block: whether the receiver may block their publisher.
        :returns: None if all were kept; else the outcome on which the bus must act. A receiver that has blocked
            publishers calls ``registry.delivery.drained`` when it has room again.
        """

    def flush(self) -> None:
        """Send the messages of a batch; there may be none."""

    def close(self, reason: CloseReason) -> None:
        """Disconnect the receiver."""


class Client(Publisher, Receiver, Protocol):
    """A connection to the bus, as the registry sees it: publisher and receiver."""

    user: User
    """The user that the client belongs to."""

    number: int
    """Counts connections, from 1; 0 before the client was admitted."""

    connected_at: float
    """When it connected, in seconds since the epoch."""

    reason: CloseReason | None
    """Why its connection is to end, or has ended; else None."""

    is_ending: bool
    """Whether it is being disconnected; not while it only gets its queue after it has shut down writing."""

    is_write_closed: bool
    """Whether it has shut down reading."""

    listener: Listener
    """The socket at which it has connected."""

    def memory(self) -> int:
        """Return the bytes that are charged for this client alone."""

    def sample_kernel(self) -> None:
        """Charge the memory that the kernel holds for this client now."""

    @property
    def conflated(self) -> int:
        """Messages for it that newer ones of their keys replaced (``blocking/soft/latest``)."""

    settings: ClientSettings
    """The client's choices."""

    @property
    def rights(self) -> Rights:
        """The client's rights under the policy in force."""

    @property
    def identity(self) -> Identity:
        """The client, as a policy judges it."""

    untold: int
    """Refusals whose denials were not sent to the client, because too many replies wait for it."""

    def use_rights(self, rights: Rights) -> None:
        """Take these rights from now on."""

    def forget_rights(self) -> None:
        """Forget the rights, and ask the guard for new ones when they are needed next."""

    on_room: tuple[Callable[[], None], ...]
    """Called when packets have left its queue, after it was congested, and with the last of its letters."""

    @property
    def is_behind(self) -> bool:
        """Whether packets sent to it now have to wait: its queue is congested, or letters wait in the mail."""

    @property
    def waiting_replies(self) -> int:
        """Replies and notices that wait for it, with its letters in the mail and the packets of the batch in hand."""

    @property
    def is_holding(self) -> bool:
        """Whether packets wait for it, or messages have been dropped for it."""

    def change_user(self, user: User) -> None:
        """Belong to another user from now on, with all that the client holds; not while it `is_holding` more."""

    def close(self, reason: CloseReason, detail: str = "") -> None:
        """Disconnect the client.

        :param detail: more about the reason, for the client itself.
        """

    def in_order(self, kind: str, call: Callable[[], object]) -> bool:
        """Do something at its place in the client's stream: now, or when the mail before it is delivered.

        :param kind: see `sbus.server.bus.mail.Letter`.
        :returns: whether it was done now.
        """

    def reply(self, key: bytes, payload: bytes) -> None:
        """Send the client a reply; flood control never drops it."""

    def notify(self, key: bytes, payload: bytes) -> None:
        """Send the client a notice, maybe in another client's batch; it takes the place of a reply."""

    def share_queue(self) -> None:
        """Share the queue among the users whose messages wait there, because the client is a link."""

    def hold_replies(self) -> None:
        """Hold back the replies from now on, and leave a place for one that has to wait."""

    def release_reply(self, key: bytes, payload: bytes) -> None:
        """Send the reply that the first place was left for, and those that have waited for it."""

    def send_snapshot(self, packets: Generator[bytes | None, None, None], on_over: Callable[[], None]) -> None:
        """Send packets after those that wait, and before everything that comes from now on.

        Nothing more of the client is handled until the last one has been queued.

        :param packets: as for `sbus.flood.Front`.
        :param on_over: called when the last one has left, or the connection ends.
        """


class PatternEvents(Protocol):
    """Hears of open subscriptions."""

    def added(self, receiver: Receiver, pattern: bytes) -> None:
        """A receiver has subscribed to an open pattern."""

    def removed(self, receiver: Receiver, pattern: bytes) -> None:
        """A receiver's subscription to an open pattern has ended."""


class MessageTap(Protocol):
    """An object in the way of all messages, to look at them (`sbus.server.ops.tap`)."""

    def deliver(
        self,
        packets: list[bytes],
        route: Route[Receiver],
        publisher: Publisher | None,
        at_once: bool = False,
        has_echo: bool = True,
        /,
    ) -> int:
        """Deliver a run in place of `sbus.server.bus.delivery.Delivery.deliver`, and note it."""

    def deliver_payload(
        self, message: PayloadMessage, route: Route[Receiver], publisher: Publisher | None, has_echo: bool, /
    ) -> int:
        """Do the same for a payload in sealed memory."""

    def dropped(self, receiver: Receiver, messages: int, size: int) -> None:
        """Note that messages were dropped for a receiver (`IObserver.dropped`)."""


class ICredentials(Interface):
    """The permissions on one bus.

    The bus calls these methods for each event, so they must be quick.
    """

    restrictsPublishing: bool = Attribute(
        "Whether the bus calls `mayPublish`. That costs time for every message, unless there are `verdictSeconds`; so "
        "say False if it allows everything."
    )
    verdictSeconds: float = Attribute(
        "Seconds for which the bus may remember what `mayPublish` has said of a peer and a key; 0, or no such "
        "attribute: it asks for every message; ``math.inf``: as long as the bus runs."
    )

    def mayConnect(peer: PeerCredentials) -> bool:
        """Return whether this peer may use the bus."""

    def checkSubscription(peer: PeerCredentials, pattern: bytes, secret: SecretKey | None) -> None:
        """Check whether this peer may subscribe.

        :param secret: the parts of a secret pattern; None for any other.
        :raises sbus.errors.Violation: if it may not.
        """

    def mayPublish(peer: PeerCredentials, key: bytes) -> bool:
        """Return whether this peer may publish with this key.

        Called only if `restrictsPublishing`.
        """

    def mayBlock(receiver: PeerCredentials, publisher: PeerCredentials) -> bool:
        """Return whether a receiver whose strategies can block may block this publisher."""


class ICredentialsPolicy(Interface):
    """A kind of `ICredentials` that can be chosen with ``--credentials=NAME``."""

    name: str = Attribute("The ``NAME`` in ``--credentials=NAME``.")
    description: str = Attribute("One line for ``--help``.")

    def make(settings: Any) -> ICredentials:
        """Make the component for one bus from the settings in force.

        These are a `sbus.server.core.credentials.AccessSettings`.
        """


class IObserver(Interface):
    """Is notified of events on a bus: a log, metrics, a dashboard.

    Derive from `sbus.server.Observer` and override the events that you need: an event that no observer overrides costs
    nothing. A `client` is the same object from ``connected`` to ``closed``; its ``peer`` is a `PeerCredentials`, its
    ``number`` counts connections from 1, and its ``listener`` is the `Listener` of the socket at which it came in, with
    a ``name``. A secret key is cut after ``<pid>``, and its payload is withheld. Messages that an observer publishes
    during an event are handled when the batch that caused the event is over.
    """

    def connected(client: Any) -> None:
        """A client has connected."""

    def subscribed(client: Any, pattern: bytes) -> None:
        """A client has subscribed."""

    def unsubscribed(client: Any, pattern: bytes) -> None:
        """A client has dropped a subscription."""

    def published(client: Any, key: bytes, payload: bytes | None) -> None:
        """A client has published a message; the payload is None if the key is secret."""

    def delivered(client: Any, packets: int, size: int) -> None:
        """The server has handed packets for a client to the kernel, `size` bytes together."""

    def dropped(client: Any, packets: int, size: int) -> None:
        """The server has dropped packets for a client, `size` bytes in total."""

    def violated(client: Any, violation: Violation, key: bytes) -> None:
        """A client broke the protocol.

        `key` is the key or pattern, or empty if there was none.
        """

    def denied(client: Any, verb: bytes, key: bytes, verdict: Any, is_enforced: bool) -> None:
        """A client has published or subscribed without permission.

        :param verb: ``MSG`` or ``SUB``.
        :param verdict: a `sbus.policy.Verdict`, with the name of the rule and its place.
        :param is_enforced: whether it was refused; else the policy only observes (``mode = "audit"``).
        """

    def audited(client: Any, verb: bytes, key: bytes, verdict: Any, count: int) -> None:
        """A client has published, `count` messages with this key, or subscribed, under a rule with ``audit = true``."""

    def refused(peer: PeerCredentials, reason: CloseReason, listener: Listener) -> None:
        """The server has accepted a connection at this socket only to close it."""

    def closed(client: Any, reason: CloseReason) -> None:
        """A client has disconnected, or was disconnected."""
