"""The connection of a blocking client, which works within its caller's calls.

Theory of operation
-------------------

Without a thread or an event loop, nothing happens between two calls. Each does its work within its own deadline.

*Sending.* Messages bypass the outbox. They go from the caller's list to the socket, and a call returns when the kernel
has them all. The outbox has everything else (subscriptions, settings, questions, replies), which must precede later
messages; `_drain` sends it first. If a deadline stops a drain, the rest goes out with the next call.

*Reading.* `_read_until` reads batches until its condition holds. Each batch is dispatched completely; a callback that
reads continues after its own message (`sbus.client.core.Batch`). If a callback raises, the read raises the exception
once the batch is dispatched.

*Coroutines.* The calls with a round trip are coroutines of `sbus.client.api`. `_run` resumes one each time its waiter
is done. A call may be nested in another one's callback; each keeps its own deadline.

*Losses.* A receipt is dispatched like a message. The read that reaches a loss in a queue reports it: if ``on_lost``
raises, that read raises at once.

*Reconnecting.* A send or a read finds out that the connection is lost. Messages received before are kept; replies are
dropped, because their waiters fail. The next call that publishes, reads or asks reconnects, until its own deadline: it
connects when the `Backoff` permits, and sends the outbox with the restored settings (`_reconnect_loop`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import time
from collections.abc import Callable, Coroutine, Iterator, Sized
from contextlib import contextmanager
from itertools import islice
from typing import TypeVar, TypeVarTuple

from sbus.client.api import State, Sub
from sbus.client.blocking.callbacks import Callbacks
from sbus.client.blocking.waiting import PolledWaiter, buffer_bytes, deadline_in
from sbus.client.connecting import SERVER_CLOSED, connect_first, connect_once, describe_loss
from sbus.client.connection import Connection
from sbus.client.core import Batch
from sbus.client.dispatch import LASTING
from sbus.client.inlet import Inlet, PayloadInlet
from sbus.client.losses import Lost, MessageQueue
from sbus.client.options import ConnectOptions
from sbus.client.outbox import NO_ROOM, send_limit, send_some
from sbus.client.payload_sender import PayloadSender
from sbus.client.payloads import Outgoing
from sbus.errors import ConnectError, Disconnected, NotAllowed, PacketTooLong, SbusError, TimedOut, UsageError
from sbus.protocol.bundles import unbundle
from sbus.protocol.controls import BUNDLE_ON
from sbus.protocol.packets import CMSG, build
from sbus.syscalls.polling import poll_until
from sbus.syscalls.sockets import DONTWAIT, LARGEST_SEND_BUFFER, PEEK, SEND_NOW, grow_send_buffer, max_sendable

__all__ = ["BlockingConnection"]

T = TypeVar("T")
Args = TypeVarTuple("Args")

_BUNDLE_REPLY = build(CMSG, BUNDLE_ON, b"")
"""The beginning of the server's reply to ``bundle/on``."""
_DONE = Batch([])
"""Stands for a batch that is processed, so that its packets are freed."""
_OTHER = [b""]
"""Stands for a batch if something else has happened that a caller may wait for."""
_CLOSE_LOOK = 0.1
"""Interval in seconds, between two attempts to reconnect, of the checks whether the connection was closed meanwhile. An
event would not do: a signal handler of the waiting thread may close it, and would wait for the event's lock forever."""
_INTERRUPTED = "a signal handler's exception interrupted the client"
_MEMORY_RETRY = 0.05
"""Seconds until the next attempt to send after the kernel ran out of memory."""


class BlockingConnection(Connection[Sub]):
    """A connection to a bus; see the theory of operation above."""

    def __init__(self, address: str | os.PathLike[str] | None, options: ConnectOptions) -> None:
        super().__init__(address, options)
        self._reader = (PayloadInlet if options.payloads else Inlet)(self.core, options.receive_size)
        self._send_some = PayloadSender(self.core).send if options.payloads else send_some
        self._batch = _DONE  # what was received; a callback that reads on continues it
        self._callbacks = Callbacks()
        self._unread_errors: dict[Sub, NotAllowed] = {}  # of refused subscriptions, for the readers of the bus
        self._handed_over = self.core.changes  # those whose packets went to the outbox
        self._deadline: float | None = None  # of the round trip under way
        self._limit: float | None = None  # of the block of `limit` under way
        self._sock: socket.socket | None = None
        self._usable: socket.socket | None = None  # the same, unless the client has to reconnect or has ended
        self._expects_bundle_reply = False
        self._is_polling = False
        self._delays: Iterator[float] = iter(())
        self._next_attempt = 0.0
        self._resync_fence = PolledWaiter()  # succeeds once the choices of this client are in force again

    @property
    def state(self) -> State:
        if self._error is not None:
            return "closed"
        return "connected" if self._loss_reason is None else "reconnecting"

    # --- sending -----------------------------------------------------------------------------

    @contextmanager
    def limit(self, timeout: float | None) -> Iterator[None]:
        """Bound a block of calls that send or ask, also while they reconnect; a shorter timeout of a call counts.

        A call that sends several messages may have sent some of them when it raises. Closing does not raise.

        :param timeout: seconds for all of the block; None for no limit but that of a block around it.
        :raises sbus.errors.TimedOut: from the call that would take longer.
        """
        outer = self._deadline, self._limit
        self._deadline = self._limit = self._until(timeout)
        try:
            yield
        finally:
            self._deadline, self._limit = outer

    def _until(self, timeout: float | None) -> float | None:
        """Return the deadline of a call with this timeout within the block of `limit`."""
        own, limit = deadline_in(timeout), self._limit
        return own if limit is None else limit if own is None else min(own, limit)

    def send(self, packets: list[bytes]) -> None:
        """See `sbus.client.api.ClientApi.send`; without a connection, the packets wait for the call that reconnects."""
        self._check_open()
        self._hand_over(packets)
        if self._loss_reason is None or self._reconnecting:
            self._drain(self._deadline)

    def _hand_over(self, packets: list[bytes]) -> None:
        self.outbox.extend(packets)
        self._handed_over = self.core.changes

    def _send_all(self, packets: list[bytes]) -> None:
        """Send messages, however long it takes, or until the deadline of `limit`."""
        position, known = 0, self._usable
        while position < len(packets):
            if self.outbox.packets:
                self._drain(self._limit)
            sock = self._usable or self._connected(self._limit)
            if sock is None or (self._reconnecting and self._is_unsettled()):
                self.outbox.extend_within(packets[position:], self._options.reconnect_buffer)
                return
            if sock is not known:
                known = sock
                self.core.check_taken(packets[position:])
            if self._expects_bundle_reply and len(packets) > 1:
                self._read_bundle_reply(sock)
            size = send_limit(self.core.bundle_limit)
            whole = not position and len(packets) <= size
            sent = self._send(sock, packets if whole else packets[position : position + size])
            position += sent
            if not sent and sock is self._sock:
                self._wait_writable(sock, self._limit)

    def _send_one(self, packet: bytes, flags: int, timeout: float | None) -> None:
        """Send one message within a timeout, or leave it unsent."""
        deadline, known = self._until(0.0 if flags & DONTWAIT else timeout), self._usable
        try:
            while True:
                self._drain(deadline)
                sock = self._usable or self._connected(deadline)
                if sock is None:
                    raise Disconnected("not connected at present")
                if self._is_unsettled():
                    self._read_until(lambda: not self._is_unsettled(), deadline)
                    continue
                if sock is not known:
                    known = sock
                    self.core.check_taken([packet])
                if self._send(sock, [packet], flags):
                    return
                if sock is self._sock:
                    self._wait_writable(sock, deadline)
        except TimedOut as e:
            if not self._is_own(e):
                raise
            if flags & DONTWAIT:
                raise BlockingIOError(errno.EAGAIN, "the socket is full, or not connected at present") from None
            raise TimedOut("not sent: the socket was full, or not connected, until its time was over") from None

    def _drain(self, deadline: float | None) -> None:
        """Send the outbox, or find out that the connection is lost."""
        while self.outbox.packets:
            sock = self._usable or self._connected(deadline)
            if sock is None:
                return
            taken = self.outbox.take(send_limit(self.core.bundle_limit))
            if not taken:
                return  # the rest waits for the server's word about payloads
            handed_over, self._handed_over = self._handed_over, -1  # unless interrupted before the outbox knows
            try:
                sent = self._send(sock, taken)
                if sock is not self._sock:
                    return  # lost; the outbox now belongs to the next connection
                self.outbox.ack(taken, sent)
            except PacketTooLong:
                self.outbox.ack(taken, 1)
                self._handed_over = handed_over
                raise
            self._handed_over = handed_over
            if not sent:
                self._wait_writable(sock, deadline)

    def _send(self, sock: socket.socket, packets: list[bytes], flags: int = 0) -> int:
        """Send what the socket takes of a batch, and return the number of packets.

        It is also 0 if the connection is lost.

        :raises sbus.errors.PacketTooLong: if the first packet does not fit the socket's buffer.
        """
        try:
            if not flags or isinstance(packets[0], Outgoing):
                return self._send_some(sock, packets, self.core.bundle_limit) if packets else 0
            sock.send(packets[0], flags | SEND_NOW)
            return 1
        except OSError as e:
            self._not_sent(sock, e, len(packets[0]))
            return 0

    def _not_sent(self, sock: socket.socket, e: OSError, size: int) -> None:
        """Find out why `size` bytes were not sent; return if that is to be tried again, or the connection is lost."""
        if isinstance(e, BlockingIOError):
            return
        if self._error is not None:
            raise self._error from None  # closed in another thread
        if e.errno in (errno.EPIPE, errno.ECONNRESET):
            self._connection_lost(describe_loss(e), self._reader.read_rest(sock))
        elif e.errno in NO_ROOM:
            time.sleep(_MEMORY_RETRY)
        elif e.errno == errno.EMSGSIZE:
            raise PacketTooLong(f"{size} bytes do not fit the socket's send buffer (SO_SNDBUF)") from e
        else:
            raise e

    def _read_bundle_reply(self, sock: socket.socket) -> None:
        """Read the reply to ``bundle/on`` if it is the first packet: a program that only publishes never reads."""
        try:
            first = sock.recv(len(_BUNDLE_REPLY), DONTWAIT | PEEK)
            self._expects_bundle_reply = False
            if first == _BUNDLE_REPLY:
                self.core.receive(self._reader.read(sock, 1)[0])
        except OSError:
            pass  # nothing is here yet, or the connection is lost, which the next send finds out

    def _wait_writable(self, sock: socket.socket, deadline: float | None) -> None:
        """Wait for a full socket; keep what comes up to the last reply that is due, for which the server may wait."""
        keeps = self.core.extensions.questions.are_open_after(islice(self._batch.packets, self._batch.position, None))
        events = select.POLLOUT | select.POLLIN if keeps else select.POLLOUT
        if (deadline is not None and time.monotonic() >= deadline) or not self._poll(sock, events, deadline):
            raise TimedOut(f"the bus at {self.address} does not read: the socket stayed full")
        if keeps:
            try:
                self._add(self._read_socket(sock))
            except BaseException:
                self._connection_lost(_INTERRUPTED)
                raise

    def _poll(self, sock: socket.socket, events: int, deadline: float | None) -> bool:
        """Wait for the socket, as `poll_until` does, or until `close` is called in another thread.

        :raises sbus.errors.Closed: in that case.
        """
        self._is_polling = True  # from here on `close` wakes this thread, and leaves the descriptor open
        try:
            is_ready = self._error is not None or poll_until(sock, events, deadline)
        finally:
            self._is_polling = False
            if self._error is not None:
                self._detach()
        self._check_open()
        return is_ready

    def _wake_and_detach(self) -> None:
        """Close the socket; a thread that waits for it wakes up and closes it itself.

        A descriptor that was closed under a poll would leave it waiting, and could be another file's by then.
        """
        self._usable = None
        sock = self._sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        if not self._is_polling:
            self._detach()

    # --- receiving ---------------------------------------------------------------------------

    def _read_until(self, condition: Callable[[], object], deadline: float | None) -> None:
        """Receive until a condition holds.

        The deadline bounds the waiting. Packets that were in the socket when it passed are still read, because the
        expected one may be among them: up to `LARGEST_SEND_BUFFER` bytes, which is what a socket holds.

        :param condition: returns something true once it holds.
        :raises sbus.errors.TimedOut: if the deadline has passed first.
        :raises sbus.errors.Disconnected: if the connection is lost and not made again.
        """
        late = 0
        while not condition():
            packets = self._read(deadline)
            if deadline is not None and time.monotonic() >= deadline:
                late += buffer_bytes(packets or _OTHER)
                if late > LARGEST_SEND_BUFFER and not condition():
                    raise TimedOut("nothing has come in time")

    def _wait_for_messages(self, messages: MessageQueue, timeout: float | None) -> None:
        """Receive until there is a message, and report the losses in front of it.

        :param timeout: seconds to wait; None for no limit.
        :raises sbus.errors.NotAllowed: if the server has refused a subscription that the readers of the bus share.
        :raises: as `_read_until`.
        """
        deadline = None if timeout is None else deadline_in(timeout)
        if messages.marks:
            messages.settle(self.report_lost)
        while not messages:
            if self._unread_errors:
                self._raise_refused()
            if deadline is None:
                self._read(None)
            else:
                self._read_until(lambda: messages or self._unread_errors, deadline)
            if messages.marks:
                messages.settle(self.report_lost)  # a callback may have taken what came before a mark

    def _raise_refused(self) -> None:
        """Raise, once, the error of a refused subscription that the readers of the bus share."""
        for subscription in self._unread_errors:
            raise self._unread_errors.pop(subscription)

    def _read(self, deadline: float | None) -> list[bytes]:
        """Wait for a batch and receive it; nothing if the client has to reconnect.

        :returns: as `_read_ready`.
        """
        if self._reader.is_empty and self._batch is _DONE and self._callbacks.is_idle:
            sock = self._sock if self._reconnecting else self._usable
            if sock is not None and not self._poll(sock, select.POLLIN, deadline):
                raise TimedOut("nothing has come in time")
        return self._read_ready(deadline)

    def _read_now(self, wanted: Sized) -> None:
        """Receive the packets that are here.

        :param wanted: where the messages go; if some are there, the end of the connection is not raised yet.
        """
        left = LARGEST_SEND_BUFFER
        try:
            while left > 0 and (packets := self._read_ready(0.0)):
                left -= buffer_bytes(packets)
        except (TimedOut, Disconnected) as e:  # a time-out: not connected at present
            if not self._is_own(e) or (isinstance(e, Disconnected) and not wanted):
                raise

    def _read_ready(self, deadline: float | None) -> list[bytes]:
        """Receive a batch that is here, and dispatch it.

        :param deadline: until when to wait for a connection.
        :returns: the packets, or `_OTHER`; nothing if there were none.
        """
        self._check_whole()
        self._callbacks.settle()
        try:
            packets = self._read_batch(deadline)
        except BaseException as e:
            if not (isinstance(e, SbusError) or self._callbacks.has_raised(e)):
                # Packets may be lost, and each later answer would be mistaken.
                self._connection_lost(_INTERRUPTED)
            raise
        self._callbacks.settle()
        return packets

    def _read_batch(self, deadline: float | None) -> list[bytes]:
        batch, packets = self._batch, _OTHER
        if batch is _DONE:
            sock = self._usable
            if sock is None:
                was_lost = not self._reconnecting
                sock = self._connected(deadline)
                if sock is None:
                    raise Disconnected("not connected at present")
                if was_lost:
                    return _OTHER  # what the caller waits for may have come while the client reconnected
            packets = self._read_socket(sock)
            if not packets:
                self._check_open()
                return packets
            batch = self._add(packets)
        self.core.process(batch)
        if self._batch is batch:
            self._batch = _DONE
        return packets

    def _read_socket(self, sock: socket.socket) -> list[bytes]:
        """Return the packets that have arrived; if there are none, find out whether the connection is lost."""
        try:
            packets, ended = self._reader.read(sock)
        except OSError as e:
            self._connection_lost(describe_loss(e))
            return []
        if ended and not packets:
            self._connection_lost(SERVER_CLOSED)
        return packets

    def _add(self, packets: list[bytes]) -> Batch:
        """Add packets that were read to those that are to be processed; return these."""
        if packets:
            self._expects_bundle_reply = False
            packets = self.core.extensions.mark_start(packets)
        if self._batch is not _DONE:
            self._batch.extend(packets)
        elif packets:
            self._batch = Batch(packets)
        return self._batch

    def _is_own(self, error: Exception) -> bool:
        """Return whether an error comes from this client: one of a callback reaches the caller, whatever it is."""
        return not self._callbacks.has_raised(error) or error is self._error

    def call_user(self, callback: Callable[[*Args], object], *args: *Args) -> None:
        """Call the application; a later read raises what it raises."""
        self._callbacks.call(callback, *args)

    def report_lost(self, lost: Lost) -> None:
        """Call ``on_lost``."""
        assert self._options.on_lost is not None
        self._callbacks.call_now(self._options.on_lost, lost)

    # --- round trips -------------------------------------------------------------------------

    def waiter(self) -> PolledWaiter:
        """See `sbus.client.api.ClientApi.waiter`."""
        return PolledWaiter()

    def _check_whole(self) -> None:
        """Take the connection for lost if a call was interrupted before its packet was in the outbox, or as it left."""
        if self.core.changes != self._handed_over:
            self._connection_lost(_INTERRUPTED)

    def _run(self, call: Coroutine[PolledWaiter, None, T], timeout: float | None) -> T:
        """Run a coroutine of `ClientApi`: read the socket while it waits."""
        outer = self._deadline
        error: Exception | None = None
        try:
            self._check_whole()
            self._deadline = deadline = self._until(timeout)
            while True:
                try:
                    waiter = call.throw(error) if error is not None else call.send(None)
                except StopIteration as result:
                    value: T = result.value
                    return value
                error = None
                try:
                    self._read_until(waiter.is_done, deadline)
                except (TimedOut, Disconnected) as e:
                    if not self._is_own(e):
                        raise
                    time_given = "the limit" if deadline == self._limit else f"{timeout} s"
                    error = e if isinstance(e, Disconnected) else TimedOut(f"no answer within {time_given}")
        finally:
            self._deadline = outer
            call.close()

    # --- connecting and disconnecting --------------------------------------------------------

    def _open(self) -> None:
        deadline = deadline_in(self._options.timeout)
        self._attach(connect_first(self.address, self._options.buffer_size, self._backoff, deadline))
        self._drain(deadline)

    def _on_settled(self) -> None:
        self._release()

    def _is_unsettled(self) -> bool:
        """Return whether a callback runs before it is known what the new server takes."""
        return self._reconnecting and self.outbox.is_held

    def _make_room(self, size: int) -> None:
        self._reader.make_room(size)
        if self._sock is not None and size > self.core.max_packet:
            self.core.can_send(grow_send_buffer(self._sock, size))

    def _attach(self, sock: socket.socket) -> None:
        self._sock = sock
        self._usable = sock if self._loss_reason is None else None
        self._expects_bundle_reply = self._options.bundles
        self.core.connected(max_sendable(sock))
        self._reader.connected()

    def _detach(self) -> None:
        self._usable = None
        sock, self._sock = self._sock, None  # before an interruption could leave a closed one here
        if sock is not None:
            sock.close()

    def _connected(self, deadline: float | None) -> socket.socket | None:
        """Return the socket, after reconnecting if necessary.

        A callback that runs meanwhile gets None.

        :raises sbus.errors.TimedOut: if the deadline has passed first.
        :raises sbus.errors.Disconnected: if the connection has ended.
        """
        if self._loss_reason is not None and not self._reconnecting:
            self._reconnect_loop(deadline)
        self._check_open()
        return self._sock

    def _connection_lost(self, why: str, rest: list[bytes] | None = None) -> None:
        """Prepare for the next connection, or end.

        :param rest: packets received and not dispatched yet.
        """
        if self._error is not None:
            self._detach()
            return  # closed in another thread
        self._handed_over = -1  # unless interrupted here: the next call begins anew
        rest = self._batch.take() + self.core.extensions.mark_start(unbundle(rest or []))
        self.core.extensions.take_farewell(rest)
        error = self.core.extensions.connection_lost(why, self.address)
        if self._backoff is None:
            self._error = error
            self._end_works(error)
        elif self._loss_reason is None:
            self._delays = self._backoff.delays()
            self._next_attempt = time.monotonic() + next(self._delays)
            self._loss_reason = error
        self._detach()
        # Replies belong to the waiters that fail below, and a refused subscription is refused again.
        self._batch = Batch([packet for packet in rest if packet.startswith(LASTING)])
        self._resync_fence = PolledWaiter()
        waiters = self._restart(self._resync_fence)
        self._handed_over = self.core.changes
        for waiter in waiters:
            waiter.set_exception(error)

    def _give_up(self, error: UsageError) -> None:
        self._error = error
        self._detach()
        self._batch.take()
        self._end_works(error)

    def _reconnect_loop(self, deadline: float | None) -> None:
        """Connect until a fence returns on a connection, then call ``on_gap``."""
        try:
            # Set inside the block: a signal handler can raise in the jump back to the start of the loop, and CPython
            # takes that exception for one of the statement before the loop.
            self._reconnecting = True
            while self._error is None:
                if self._sock is None:
                    self._try_to_connect(deadline)
                    continue
                self._drain(deadline)  # also at the end: nobody else sends what waited, or came from callbacks
                if self._sock is not None and self._resync_fence.has_succeeded():
                    break
                if self._sock is not None and not self._resync_fence.is_done():
                    self._read(deadline)
        finally:
            self._reconnecting = False
        reason, self._loss_reason = self._loss_reason, None
        self._usable = self._sock if self._error is None else None
        on_gap = self._options.on_gap
        if on_gap is not None and reason is not None and self._error is None:
            self._callbacks.call_now(on_gap, reason)

    def _try_to_connect(self, deadline: float | None) -> None:
        """Make one attempt to connect, when the next one is due."""
        until = self._next_attempt if deadline is None else min(self._next_attempt, deadline)
        while self._error is None and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _CLOSE_LOOK))
        if self._error is not None:
            return
        if time.monotonic() < self._next_attempt:
            raise TimedOut("there is no connection yet")
        self._next_attempt = time.monotonic() + next(self._delays)
        try:
            sock = connect_once(self.address, self._options.buffer_size)
        except ConnectError:
            return
        if sock is not None:
            self._attach(sock)
