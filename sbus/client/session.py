"""One connection over an event loop: what Twisted and asyncio clients share.

Theory of operation
-------------------

Everything here runs in one thread, in turns of an event loop, and nothing waits except coroutines. The backend supplies
the socket, the loop and the waiters through the abstract methods; it calls `Session._receive_packets` with packets and
`Session._disconnected` when the connection is lost.

*Reading.* The session dispatches a batch of packets as a whole before any reader wakes up (`Session.schedule_wake`).
Otherwise a reader that resumes could close a subscription, or publish, between two messages of one batch.

*Back-pressure.* While a subscription has its high-water mark of unread messages, the session stops reading, for all
subscriptions, which share the socket. The server's queue for this client then fills, and the strategies chosen with
``flood_control`` decide there.

*Writing.* A packet that is alone in its turn goes to the socket at once. Packets that are written together leave
together (`Session._write`).

*While there is no bus*, messages wait in the outbox, up to ``reconnect_buffer`` bytes. With a bus there is no limit, as
callers wait for its back-pressure.

*Reconnecting.* When the connection is lost, the session rebuilds the outbox: first the packets that restore settings
and subscriptions, and a fence, then the unsent messages, kept back until the server's limits are known. Only then do
pending calls fail: their callers may use the client at once. `Session._reconnect_loop` connects.

*The end* is final: `Session._end` sets the error, which every later call raises, and all waiters fail.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from typing import TypeVar, TypeVarTuple

from sbus.client.api import CLOSED_HERE, State
from sbus.client.batches import AsyncPayloadBatch, PayloadBatch
from sbus.client.connection import Connection
from sbus.client.core import Message
from sbus.client.dispatch import Waiter
from sbus.client.forks import leave_to_parent
from sbus.client.losses import Lost
from sbus.client.options import ConnectOptions
from sbus.client.questions import CallingWaiter
from sbus.client.subscription import QueuedSubscription, Readers, WatchQueue
from sbus.client.workers import Work
from sbus.errors import Closed, ConnectError, Disconnected, Forked, NotAllowed, PacketTooLong, UsageError
from sbus.protocol.bundles import MAX_BUNDLE
from sbus.protocol.packets import MSG
from sbus.routing.runs import total_size
from sbus.syscalls.batch import BATCH

__all__ = ["Session"]

Sub = TypeVar("Sub", bound=QueuedSubscription)
W = TypeVar("W", bound=WatchQueue)
_MESSAGE = MSG + b" "
Args = TypeVarTuple("Args")


class Session(Connection[Sub]):
    """A client's connection over an event loop; see the theory of operation."""

    _callback_errors: tuple[type[BaseException], ...] = (Exception,)
    """Exceptions of callbacks that are logged and do not end the connection."""

    def __init__(self, address: str | os.PathLike[str] | None, options: ConnectOptions) -> None:
        super().__init__(address, options)
        self._immediate_writes = BATCH  # lone writes left to send at once, see `_write`
        self._turn_writes = 0  # writes deferred to the end of this turn
        self._deferred_bytes = 0  # bytes in them
        self._in_line = 0  # calls that wait for the server's limit, or for a call that does
        self._above_high_water: set[QueuedSubscription] = set()
        self._is_reading = True
        self._to_wake: list[Readers] = []
        self._restoring: Waiter = CallingWaiter()  # of `_reconnect_loop`: this client's choices are in force again
        self._restored = CallingWaiter(
            lambda value: self._restoring.set_result(value), lambda error: self._restoring.set_exception(error)
        )
        self._closing = False
        leave_to_parent(self)

    # --- what a backend implements -----------------------------------------------------------

    @abstractmethod
    def callback_failed(self, error: BaseException) -> None:
        """Log an exception that a callback of the application has raised."""

    @abstractmethod
    def _make_subscription(self, callback: Callable[[Message], object] | None) -> Sub:
        """Return a new subscription of the backend's class."""

    @abstractmethod
    def _flush(self) -> None:
        """Send from the outbox what the socket takes, if there is a socket."""

    @abstractmethod
    def _try_send(self, packets: list[bytes]) -> int:
        """Send packets past the empty outbox; return how many the socket has taken.

        Returning 0 is always right: the caller then puts the packets into the outbox and flushes that, which also
        finds out why a socket takes nothing.
        """

    @abstractmethod
    def _call_soon(self, call: Callable[[], None]) -> None:
        """Call a function at the end of this turn of the event loop."""

    @abstractmethod
    def _set_reading(self, reading: bool) -> None:
        """Start or stop reading the socket, if there is a socket."""

    @abstractmethod
    async def _open(self) -> object:
        """Connect, and start sending the outbox.

        :raises ConnectError: with the reason and the remedy.
        """

    @abstractmethod
    def is_connected(self) -> bool:
        """Return whether there is a socket."""

    @abstractmethod
    def _detach(self) -> None:
        """Close the socket, if there is one."""

    @abstractmethod
    def _sleep(self, seconds: float) -> Awaitable[object]:
        """Wait."""

    @abstractmethod
    def wait_drained(self) -> Awaitable[object]:
        """Wait until every packet in the outbox has been handed to the kernel."""

    @abstractmethod
    def _start_reconnecting(self) -> None:
        """Run `_reconnect_loop` in the background."""

    @abstractmethod
    def _on_end(self, error: Exception) -> None:
        """Complete the waiters for the end of the connection."""

    # --- what users call ---------------------------------------------------------------------

    @property
    def state(self) -> State:
        if self._error is not None:
            return "closed"
        return "connected" if self.is_connected() and not self._reconnecting else "reconnecting"

    def subscribe(
        self,
        pattern: bytes | str,
        callback: Callable[[Message], object] | None = None,
        *,
        last: bool = False,
        sender: bool = False,
    ) -> Sub:
        """Subscribe to a pattern: read the messages from the result, or pass a callback.

        :param last: get the last values of matching keys first, as far as the server keeps them.
        :param sender: get only messages whose sender is known; the client asks for it from now on (see `ClientApi`).
        :raises sbus.errors.InvalidKey: if the protocol does not allow the pattern.
        """
        self._check_open()
        self._hint(pattern)
        subscription = self._make_subscription(callback)
        self.send(self.core.subscribe(pattern, subscription, last=last, sender=sender))
        return subscription

    def work(self, queue: str, credit: int = 1) -> Work:
        self._check_open()
        return Work(self, queue, credit)

    def _start(self, watch: W) -> W:
        """Have the server report to a new watch, and return it."""
        self._check_open()
        self.send(self.core.watch(watch))
        return watch

    def unsubscribe(self, subscription: QueuedSubscription) -> None:
        """End a subscription."""
        if self._error is None:
            self.send(self.core.unsubscribe(subscription))
        subscription.end(Closed("the subscription was closed here: subscribe again to read more"))
        self.resume_for(subscription)

    def unwatch(self, watch: WatchQueue) -> None:
        """End a watch."""
        if self._error is None:
            self.send(self.core.extensions.unwatch(watch))
        watch.end(Closed("the watch was closed here: begin another one with watch_subscribers"))

    def send(self, packets: list[bytes]) -> None:
        """See `sbus.client.api.ClientApi.send`."""
        self._check_open()
        if packets:
            self._write(packets)

    # --- sending -----------------------------------------------------------------------------

    def _write(self, packets: list[bytes]) -> None:
        """Send packets at once or at the end of this turn.

        100 messages in one bundle cost little more than one, but whether more follow is not known in advance. So
        `BATCH` lone writes in a row go out at once, and the next waits until the end of the turn. If others joined it,
        only the first write of the following turn goes at once; if none did, another `BATCH` do. As many bytes as the
        largest bundle go earlier, as waiting longer gains nothing.
        """
        queued = len(self.outbox)
        is_held = self.outbox.is_held and packets[0].startswith(_MESSAGE)
        if self._immediate_writes and not queued and not self._turn_writes and not is_held:
            self._immediate_writes -= 1
            sent = self._try_send(packets)
            if sent < len(packets):
                self._keep(packets[sent:], has_begun=sent > 0)
                self._flush()
            return
        if self._reconnecting:
            self._keep(packets)
        else:
            self.outbox.extend(packets)
        if self._turn_writes:
            self._turn_writes += 1
            self._deferred_bytes += total_size(packets)
            if self._deferred_bytes >= MAX_BUNDLE:
                self._deferred_bytes = 0
                self._flush()
        elif not queued:
            self._turn_writes, self._deferred_bytes = 1, 0
            self._call_soon(self._end_of_turn)
        # Otherwise the socket is full or missing; the flush that sends the queued packets sends these too.

    def _keep(self, packets: list[bytes], *, has_begun: bool = False) -> None:
        """Put packets into the outbox; without a bus, messages only as far as `reconnect_buffer` permits.

        :param has_begun: whether packets that belong to them have been sent.
        """
        if self._reconnecting and not has_begun and packets[0].startswith(_MESSAGE):
            self.outbox.extend_within(packets, self._options.reconnect_buffer)
        else:
            self.outbox.extend(packets)

    def _end_of_turn(self) -> None:
        self._immediate_writes = 1 if self._turn_writes > 1 else BATCH
        self._turn_writes = 0
        self._flush()

    def _on_settled(self) -> None:
        self._call_soon(self._settled)

    def _settled(self) -> None:
        """Send the messages that waited for the server's limits, except for those beyond them."""
        if self.is_connected():
            self._release()
        self._update_reading()
        self._flush()

    def payloads(self) -> AsyncPayloadBatch:
        """Begin a batch of large messages (:doc:`/payloads`); the end of ``async with``, or its ``send``, sends it."""
        self._check_open()
        return AsyncPayloadBatch(self.core, self._send_batch)

    async def _send_batch(self, batch: PayloadBatch[Awaitable[None]]) -> None:
        if self._in_line or self.core.is_open:
            packets = await self._write_in_turn(batch.packets)
        else:
            packets = batch.packets()
            self._check_open()
            if packets:
                self._write(packets)
        if packets:
            await self._sent(len(packets))

    async def _write_in_turn(self, build: Callable[[], list[bytes]]) -> list[bytes]:
        """Write the packets of a publish that is too long for all that is known, or comes after one; return them.

        Each of them has its own fence, and the server answers these in order.

        :raises sbus.errors.PacketTooLong: if it is known that they are too long.
        """
        if not self._in_line and not self.core.may_learn_limit:
            build()
        self._in_line += 1
        self._update_reading()
        loss: Disconnected | None = None
        try:
            try:
                await self._fence()
            except Disconnected as e:
                loss = e  # only a call that needs the answer fails
            self._check_open()
            try:
                packets = build()
            except PacketTooLong as e:
                raise loss or e from None
            if packets:
                self._write(packets)
            return packets
        finally:
            self._in_line -= 1
            self._update_reading()

    async def _sent(self, count: int) -> None:
        """Wait until the last `count` packets have been sent; take them back if the caller gives up before."""
        if not len(self.outbox):
            return
        waiter = self.waiter()
        pending = self.outbox.wait(waiter, count)
        try:
            await waiter
        except BaseException:
            self.outbox.cancel(pending)
            raise

    # --- receiving ---------------------------------------------------------------------------

    def _receive_packets(self, packets: list[bytes]) -> None:
        """Dispatch received packets, then wake the readers."""
        self.core.receive(packets)
        while self._to_wake:
            to_wake, self._to_wake = self._to_wake, []
            for readers in to_wake:
                readers.wake()

    def schedule_wake(self, readers: Readers) -> None:
        """Wake the readers of a subscription or watch once the packets at hand are dispatched."""
        self._to_wake.append(readers)

    def call_user(self, callback: Callable[[*Args], object], *args: *Args) -> None:
        """Call the application. If it raises, log the error and continue."""
        try:
            callback(*args)
        except self._callback_errors as error:
            self.callback_failed(error)

    def _refuse(self, subscription: Sub, error: NotAllowed) -> bool:
        if self._error is None:
            self.send(self.core.unsubscribe(subscription))
        subscription.refuse(error)
        self.resume_for(subscription)
        return subscription.callback is None

    def report_lost(self, lost: Lost) -> None:
        """Call ``on_lost``."""
        assert self._options.on_lost is not None
        self.call_user(self._options.on_lost, lost)

    # --- back-pressure -----------------------------------------------------------------------

    def pause_for(self, subscription: QueuedSubscription) -> None:
        """Stop reading: a subscription has reached its high-water mark, which the rest of the batch may exceed."""
        self._above_high_water.add(subscription)
        self._update_reading()

    def resume_for(self, subscription: QueuedSubscription) -> None:
        """Read again if this was the last subscription that reading was stopped for."""
        if subscription in self._above_high_water:
            self._above_high_water.discard(subscription)
            self._update_reading()

    def _wants_reading(self) -> bool:
        """Return whether to read: no subscription is full, or calls wait to learn what the server takes."""
        waits = self._in_line > 0 or self.outbox.is_held or not self.core.payloads.is_settled
        return waits or not self._above_high_water

    def _update_reading(self) -> None:
        if self._wants_reading() is not self._is_reading:
            self._begin_reading()

    def _begin_reading(self) -> None:
        """Read the socket, which may be new, or not, as is wanted."""
        self._is_reading = self._wants_reading()
        self._set_reading(self._is_reading)

    # --- connecting and disconnecting --------------------------------------------------------

    def _disconnected(self, why: str) -> None:
        """Reconnect after a loss, or end if the client does not reconnect."""
        if self._error is not None:
            return
        error = self.core.extensions.connection_lost(why, self.address)
        if self._closing:
            self._end(Closed(CLOSED_HERE))
        elif self._backoff is None:
            self._end(error)
        else:
            self._detach()
            waiters = self._restart(self._restored)
            self._loss_reason = self._loss_reason or error
            if not self._reconnecting:
                self._reconnecting = True
                self._start_reconnecting()
            for waiter in waiters:
                waiter.set_exception(error)

    async def _reconnect_loop(self, *, report: bool = True) -> None:
        """Connect until a fence returns, then call ``on_gap``.

        A connection counts only then: a server that accepts and closes at once would otherwise be retried without
        pauses, and ``on_gap`` would report a connection on which nothing is in force yet.

        :param report: False for a first connection, before which nothing can have been missed.
        """
        assert self._backoff is not None
        self._reconnecting = True
        is_told = report
        for delay in self._backoff.delays():
            await self._sleep(delay)
            try:
                if self._error is None:
                    await self._open()
                if self.is_connected():
                    self._restoring = restoring = self.waiter()
                    await restoring
            except (ConnectError, Disconnected, UsageError) as e:  # UsageError: it names no senders (`_give_up`)
                if not is_told:
                    self._warn(f"{e}; trying again")
                    is_told = True
            if self._error is not None:
                self._detach()
                return
            if self.is_connected():
                break
        reason, self._loss_reason, self._reconnecting = self._loss_reason, None, False
        if report and self._options.on_gap is not None and reason is not None:
            self.call_user(self._options.on_gap, reason)

    async def _finish(self) -> None:
        """Send the outbox, then end; a cancellation before the works are closed leaves all as it is."""
        await self._drain()
        self._close_works()
        try:
            await self._drain()  # what the works have said
        finally:
            self.close_now()

    async def _drain(self) -> None:
        """Send the outbox, if there is a connection; if it is lost meanwhile, end."""
        if self._error is None and self.is_connected() and (self._in_line or len(self.outbox)):
            self._closing = True
            try:
                if self._in_line:
                    await self._fence()
                await self.wait_drained()
            except Disconnected:
                pass
            finally:
                self._closing = False

    def close_now(self) -> None:
        """End without sending the outbox."""
        self._close_works()
        self._end(Closed(CLOSED_HERE))

    def forked(self, error: Forked) -> None:
        """Give the connection up in a forked child; the parent's loop and waiters are left alone."""
        self._error = error
        for subscription in self.core.sinks():
            assert isinstance(subscription, QueuedSubscription)
            subscription.forked(error)

    def _give_up(self, error: UsageError) -> None:
        self._warn(f"the connection to the bus at {self.address} ends: {error}")  # callbacks get no error
        self._end(error)

    def _end(self, error: Exception) -> None:
        if self._error is not None:
            return
        self._error = error
        self._detach()
        for waiter in self._forget_connection():
            waiter.set_exception(error)
        self.outbox.set_exception(error)
        for subscription in self.core.sinks():
            assert isinstance(subscription, QueuedSubscription)
            subscription.end(error)
        for watch in self.core.extensions.watches.all():
            watch.end(error)
        self._end_works(error)
        self._on_end(error)
