"""The extensions of the protocol on one connection: the client's requests, and the server's answers.

Theory of operation
-------------------

A client asks for an extension without knowing whether the server has it; a server that has not ignores the question.
Most of them need no answer: no ``bye`` comes, no receipt and no denial, and everything else is as it would be without.
Where a caller waits for the answer, ``whoami`` follows the question, and its reply ends the wait
(`sbus.client.questions`). `Extensions.answered` has the names of the extensions that the server has answered for.

Everything here is the state of one connection, except the watches and the subscriptions with a snapshot, which are the
client's choices (`sbus.client.choices`). `Extensions.restart` expects the answers to the packets that restore them.
"""

from __future__ import annotations

from collections.abc import Callable

from sbus.client.agreement import Agreement
from sbus.client.choices import Choices, last_packets
from sbus.client.denials import Denial, Denials
from sbus.client.dispatch import Dispatcher, Sink, Waiter
from sbus.client.losses import GAP, Lost, parse_lost
from sbus.client.questions import CallingWaiter, Questions
from sbus.client.senders import RESET, Senders
from sbus.client.snapshots import Snapshots
from sbus.client.watches import NO_INTEREST, Watch, Watches
from sbus.errors import CloseReason, ConnectionLost, NotAllowed, UsageError
from sbus.protocol.controls import (
    BYE_ON,
    DENIED_ON,
    INTEREST,
    INTEREST_OFF,
    INTEREST_ON,
    LAST_DONE,
    PAYLOAD_ON,
    PROBE,
    RECEIPTS_ON,
    SENDER_OFF,
    SENDER_ON,
    WHOAMI,
)
from sbus.protocol.notices import BYE, DENIED, LOST, SENDER
from sbus.protocol.packets import CMSG, UNSUB, build

__all__ = ["Extensions"]

_BYE = build(CMSG, BYE, b"")
_WHOAMI = build(CMSG, WHOAMI)


class Extensions:
    """The requests of one client beyond the original protocol.

    :param on_lost: called with each loss that the server reports, in its place among the messages; None if the
        application does not ask for receipts.
    :param dispatcher: delivers the messages of this client.
    :param give_up: called with the error if the server does not name senders and the client relies on them.
    :param on_denied: called with each denial that no call and no reader gets; None if this client does not ask for any.
    :param refuse: see `Denials`.
    :param payloads: the agreement about large messages.
    :param no_limit: called if the server ignores the question for its longest packet.
    :ivar answered: the names of the extensions that the server has answered for on this connection: ``bye``,
        ``denied``, ``receipts``, ``sender``, ``interest``, ``probe``, ``last`` and others.
    :ivar questions: the replies expected.
    """

    def __init__(
        self,
        on_lost: Callable[[Lost], object] | None,
        dispatcher: Dispatcher,
        give_up: Callable[[UsageError], object],
        on_denied: Callable[[Denial], object] | None,
        refuse: Callable[[Sink, NotAllowed], bool],
        payloads: Agreement,
        no_limit: Callable[[], object],
    ) -> None:
        self.answered: set[str] = set()
        self.questions = Questions()
        self.watches = Watches()
        self.snapshots = Snapshots(dispatcher)
        self.denials = Denials(dispatcher, self.snapshots, refuse, on_denied)
        self._senders = Senders(dispatcher, give_up)
        self._payloads = payloads
        self._no_limit = no_limit
        self._on_lost = on_lost
        self._farewell: bytes | None = None  # the payload of the server's ``bye``
        self._had_connection = False
        self._first: list[bytes] = []  # packets to put before the first ones of this connection
        self._handlers: dict[bytes, Callable[[bytes], bool]] = {
            BYE: self._bye_received,
            LOST: self._lost_received,
            DENIED: self.denials.receive,
            INTEREST: self._interest_received,
            INTEREST_ON: _confirmed,
            INTEREST_OFF: _confirmed,
            PROBE: self._probe_received,
            SENDER: self._senders.notice,
            SENDER_ON: self._sender_answered,
            SENDER_OFF: self._senders.off,
            LAST_DONE: self._last_received,
            PAYLOAD_ON: self._payload_answered,
        }

    # --- asking ------------------------------------------------------------------------------

    def probe(self, key: bytes, waiter: Waiter) -> list[bytes]:
        """Ask how many clients would get a message with this key; `waiter` gets the number in decimal."""
        self.questions.ask(PROBE, key, waiter, ignored=NO_INTEREST)
        if "probe" in self.answered:
            return [build(CMSG, PROBE, key)]
        self.questions.ask(WHOAMI, b"", CallingWaiter())
        return [build(CMSG, PROBE, key), _WHOAMI]

    def watch(self, watch: Watch) -> list[bytes]:
        """Have the server report on a key.

        :returns: the packets to send; none if the key has another watch.
        :raises UsageError: if it is a key more than a client may watch.
        """
        if not self.watches.add(watch):
            return []
        self._ask_interest(watch.key)
        if "interest" in self.answered:
            return [build(CMSG, INTEREST_ON, watch.key)]
        self.questions.ask(WHOAMI, b"", CallingWaiter())
        return [build(CMSG, INTEREST_ON, watch.key), _WHOAMI]

    def unwatch(self, watch: Watch) -> list[bytes]:
        """Return the packets to send when a watch ends: none if the key has another watch, or if it ended before."""
        return [build(CMSG, INTEREST_OFF, watch.key)] if self.watches.remove(watch) else []

    def _ask_interest(self, key: bytes) -> None:
        def fail(error: Exception) -> None:
            if isinstance(error, UsageError):  # not the end of the connection
                self.watches.fail(key, error)

        self.questions.ask(INTEREST, key, CallingWaiter(on_error=fail), ignored=NO_INTEREST)

    def ask_senders(self) -> list[bytes]:
        """Ask for senders from now on; return the packets to send after the question (`sbus.client.senders`)."""
        self.questions.ask(WHOAMI, b"", CallingWaiter(lambda _: self._senders.check()))
        return [_WHOAMI]

    def subscribe_last(self, sink: Sink, *, is_first: bool, choices: Choices) -> list[bytes]:
        """Subscribe with a snapshot.

        :param is_first: whether the pattern has no other subscription.
        :param choices: the settings in force.
        """
        self.snapshots.add(sink)
        self.snapshots.request(self.questions, sink.pattern, sink, exclusive=choices.keeps_order)
        return last_packets(sink.pattern, is_first=is_first)

    def unsubscribe(self, sink: Sink, *, is_last: bool) -> list[bytes]:
        """Return the packets that end a subscription.

        :param is_last: whether the pattern no longer has another subscription.
        """
        self.snapshots.discard(sink)
        return [build(UNSUB, sink.pattern)] * (1 + self.snapshots.take_requests(sink.pattern)) if is_last else []

    def _limit_unknown(self, error: Exception) -> None:
        if isinstance(error, UsageError):  # not the end of the connection
            self._no_limit()

    # --- connections -------------------------------------------------------------------------

    def restart(self, choices: Choices) -> None:
        """Expect the answers to the packets that make these choices."""
        if BYE_ON in choices.controls:
            self.questions.ask(BYE_ON, b"", CallingWaiter(on_error=self._limit_unknown), ignored="it has no limits")
        for control in (DENIED_ON, RECEIPTS_ON):
            if control in choices.controls:
                self.questions.ask(control, b"", None)
        if SENDER_ON in choices.controls:
            self.ask_senders()
        if PAYLOAD_ON in choices.controls:
            self.questions.ask(WHOAMI, b"", CallingWaiter(lambda _: self._payloads.settle()))
        for key in choices.watched:
            self._ask_interest(key)
        for pattern, _ in choices.patterns:  # as `Choices.packets` asks
            if pattern in choices.last:
                self.snapshots.request(self.questions, pattern, exclusive=choices.keeps_order)

    def connected(self, *, has_subscriptions: bool) -> None:
        """Note a new connection.

        :param has_subscriptions: whether messages may have been missed, unless it is the first connection.
        """
        self._farewell = None
        self.answered.clear()
        self._payloads.restart()
        self._first = []
        if self._had_connection:
            self._first = [GAP, RESET] if has_subscriptions and self._on_lost is not None else [RESET]
        self._had_connection = True

    def disconnected(self) -> list[Waiter]:
        """Forget the connection; return the waiters to fail."""
        self.watches.disconnected()
        self.snapshots.disconnected()
        return self.questions.take()

    def mark_start(self, packets: list[bytes]) -> list[bytes]:
        """Return the packets that were read; before the first ones of a connection, those that end the last one."""
        if not self._first or not packets:
            return packets
        first, self._first = self._first, []
        return [*first, *packets]

    def take_farewell(self, packets: list[bytes]) -> None:
        """Find the server's ``bye`` among packets that will not be processed."""
        for packet in packets:
            if packet.startswith(_BYE):
                self._farewell = packet[len(_BYE) :]

    def connection_lost(self, why: str, address: str) -> ConnectionLost:
        """Return the error for a lost connection.

        :param why: the reason as far as this end knows it, in words; the server's comes first.
        """
        if self._farewell is None:
            return ConnectionLost(f"{why} ({address})")
        name, _, text = self._farewell.decode("utf-8", "backslashreplace").partition(" ")
        return ConnectionLost(f"the server disconnected this client: {text or name} ({address})", _close_reason(name))

    # --- received control messages -----------------------------------------------------------

    def handle(self, key: bytes, payload: bytes) -> bool:
        """Handle a control message; return whether it belongs to an extension that was asked for."""
        handler = self._handlers.get(key)
        if handler is not None:
            return handler(payload)
        if key == WHOAMI:
            return self.questions.answer_whoami(payload)
        name, _, word = key.rpartition(b"/")
        if word == b"on":
            self.answered.add(name.decode("ascii", "backslashreplace"))
        return self.questions.answer(key, b"", payload)

    def _bye_received(self, payload: bytes) -> bool:
        self._farewell = payload
        return True

    def _lost_received(self, payload: bytes) -> bool:
        lost = parse_lost(payload)
        if lost is None or self._on_lost is None:
            return False
        self._on_lost(lost)
        return True

    def _sender_answered(self, payload: bytes) -> bool:
        self.answered.add("sender")
        return self._senders.on(payload)

    def _payload_answered(self, payload: bytes) -> bool:
        if self._payloads.receive(payload):
            self.answered.add("payload")
            return True
        return False

    def _interest_received(self, payload: bytes) -> bool:
        state, blank, key = payload.partition(b" ")
        if state not in (b"0", b"1") or not blank:
            return False
        self.answered.add("interest")
        self.questions.answer(INTEREST, key, state)
        self.watches.report(key, state == b"1")
        return True

    def _probe_received(self, payload: bytes) -> bool:
        count, blank, key = payload.partition(b" ")
        if not count.isdigit() or not blank:
            return False
        self.answered.add("probe")
        return self.questions.answer(PROBE, key, count)

    def _last_received(self, payload: bytes) -> bool:
        self.answered.add("last")
        return self.snapshots.done(payload)


def _confirmed(payload: bytes) -> bool:
    return True


def _close_reason(name: str) -> CloseReason | None:
    """Return the reason with a name on the wire; None for one of a newer server."""
    return CloseReason.__members__.get(name.upper().replace("-", "_"))
