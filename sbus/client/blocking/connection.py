"""What is under the blocking client: a socket that is sent to, read, lost and made again, all in its user's calls."""

from __future__ import annotations

import errno
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator
from functools import partial
from typing import Any, TypeVar

from sbus.client.api import ClientApi, Sub
from sbus.client.connecting import CLOSED, connect_once, describe_loss, dial, find_address
from sbus.client.core import Batch
from sbus.client.options import Settings
from sbus.client.outbox import Outbox
from sbus.client.sending import read_at_once, send_some, share
from sbus.errors import ConnectError, Disconnected, PacketTooLong, TimedOut
from sbus.routing.runs import total_size
from sbus.syscalls.batch import PacketReader
from sbus.syscalls.sockets import LARGEST_SEND_BUFFER, max_sendable

__all__ = ["LONGEST_POLL", "WaitingConnection", "deadline_in"]

T = TypeVar("T")

LONGEST_POLL = 2**31 - 1
"""Milliseconds that poll(2) can wait for at once."""

_ANSWER = b"CMSG bundle/on\0"
_PACKET = 512
"""Bytes of a socket's buffer that a packet takes besides its own, at least."""
_RETRY = 0.05
"""Seconds until a socket is tried again for which the kernel had no memory."""


class _Waiter:
    """A waiter (see `sbus.client.core.Waiter`) that `WaitingConnection._run` reads the socket for."""

    __slots__ = ("_error", "_value")

    def __init__(self) -> None:
        self._value: bytes | None = None
        self._error: Exception | None = None

    def set_result(self, value: bytes) -> None:
        if self._error is None and self._value is None:
            self._value = value

    def set_exception(self, error: Exception) -> None:
        if self._value is None:
            self._error = error

    @property
    def has_succeeded(self) -> bool:
        return self._value is not None

    def is_done(self) -> bool:
        return self._value is not None or self._error is not None

    def __await__(self) -> Generator[_Waiter, None, bytes]:
        if not self.is_done():
            yield self
        if self._error is not None:
            raise self._error
        assert self._value is not None
        return self._value


class WaitingConnection(ClientApi[Sub]):
    """A connection to a bus, in whose calls everything happens: nothing does behind a program's back.

    :param address: where the bus is; without one, see `sbus.client.connecting.find_address`.
    """

    def __init__(self, address: str | None, settings: Settings) -> None:
        super().__init__()
        self.address = find_address(address)
        self.core = settings.core(settings.on_control and partial(self._call_user, settings.on_control))
        self._settings = settings
        self._reader = PacketReader(settings.longest)
        self._batch = Batch([])  # what was received; a callback that reads goes on where it stands
        self._failures: deque[Exception] = deque()  # of callbacks
        self._outbox = Outbox()  # what has to be sent before anything else
        self._outbox.extend(self.core.resync_packets())
        self._deadline: float | None = None  # of the call of the vocabulary that is under way
        self._sock: socket.socket | None = None
        self._asking = False  # the server may yet answer that it takes bundles
        self._error: Disconnected | None = None  # why it is over
        self._backoff = settings.backoff
        self._loss_reason: Disconnected | None = None  # why the connection was lost, until that has been told
        self._delays: Iterator[float] = iter(())
        self._next_attempt = 0.0
        self._proof = _Waiter()  # that the new connection is where the old one was
        self._coming_back = False

    # --- sending -----------------------------------------------------------------------------

    def send(self, packets: list[bytes]) -> None:
        """See `sbus.client.api.ClientApi.send`."""
        if self._error is not None:
            raise self._error
        self._outbox.extend(packets)
        self._drain(self._deadline)

    def _send_all(self, packets: list[bytes]) -> None:
        """Send messages, however long it takes."""
        at = 0
        while at < len(packets):
            if self._outbox:
                self._drain(None)
            sock = self._connected(None)
            if sock is None:
                self._outbox.extend(packets[at:])
                return
            if self._asking and len(packets) > 1:
                self._hear_answer(sock)
            size = share(self.core.bundle_limit)
            sent = self._send(sock, packets[at : at + size] if at or len(packets) > size else packets)
            at += sent
            if not sent and sock is self._sock:
                self._wait_for_room(sock, None)

    def _send_in_time(self, packet: bytes, flags: int, timeout: float | None) -> None:
        """Send a message, or nothing."""
        deadline = deadline_in(0.0 if flags & socket.MSG_DONTWAIT else timeout)
        try:
            while True:
                self._drain(deadline)
                sock = self._connected(deadline)
                if sock is None:
                    raise Disconnected("not connected just now")
                if self._send(sock, [packet], flags):
                    return
                if sock is self._sock:
                    self._wait_for_room(sock, deadline)
        except TimedOut:
            if flags & socket.MSG_DONTWAIT:
                raise BlockingIOError(errno.EAGAIN, "the socket is full, or not connected just now") from None
            raise TimedOut(f"not sent: the socket was full, or not connected, for {timeout} seconds") from None

    def _drain(self, deadline: float | None) -> None:
        """Send what has to be sent before anything else, or find out that the connection is lost."""
        while self._outbox:
            sock = self._connected(deadline)
            if sock is None:
                return
            taken = self._outbox.take(share(self.core.bundle_limit))
            try:
                sent = self._send(sock, taken)
            except PacketTooLong:
                self._outbox.ack(taken, 1)
                raise
            if sock is not self._sock:
                return  # it is lost; what is left is for the next one
            self._outbox.ack(taken, sent)
            if not sent:
                self._wait_for_room(sock, deadline)

    def _send(self, sock: socket.socket, packets: list[bytes], flags: int = 0) -> int:
        """Send what the socket takes of a batch; if the connection turns out to be lost, nothing.

        :raises sbus.errors.PacketTooLong: if the first packet does not fit the socket's buffer.
        """
        try:
            if not flags:
                return send_some(sock, packets, self.core.bundle_limit) if packets else 0
            sock.send(packets[0], flags | socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            return 1
        except BlockingIOError:
            return 0
        except OSError as e:
            if e.errno in (errno.EPIPE, errno.ECONNRESET):
                self._lose(describe_loss(e), self._read_rest(sock))
            elif e.errno in (errno.ENOBUFS, errno.ENOMEM):
                time.sleep(_RETRY)
            elif e.errno == errno.EMSGSIZE:
                raise PacketTooLong(f"{len(packets[0])} bytes do not fit the socket's send buffer (SO_SNDBUF)") from e
            else:
                raise
            return 0

    def _hear_answer(self, sock: socket.socket) -> None:
        """Take the server's word on bundles, if it is here: who only publishes never reads.

        We asked before anything else, so the answer is the first packet to come, if there is one.
        """
        try:
            first = sock.recv(len(_ANSWER), socket.MSG_DONTWAIT | socket.MSG_PEEK)
            self._asking = False
            if first == _ANSWER:
                self.core.receive(self._reader.read(sock, 1)[0])
        except OSError:
            pass  # nothing yet; or the connection is lost, which is dealt with when it is used

    def _wait_for_room(self, sock: socket.socket, deadline: float | None) -> None:
        if (deadline is not None and time.monotonic() >= deadline) or not _poll(sock, select.POLLOUT, deadline):
            raise TimedOut("the socket stayed full")

    # --- receiving ---------------------------------------------------------------------------

    def _read_until(self, found: Callable[[], Any], deadline: float | None) -> None:
        """Receive until something is here.

        :raises sbus.errors.TimedOut: if the deadline has passed first.
        :raises sbus.errors.Disconnected: if the connection is lost, and not to be made again.
        """
        late = 0
        while not found():
            taken = self._read(deadline)
            if deadline is not None and time.monotonic() >= deadline:
                late += taken or _PACKET
                # What had come by then is still read, and no socket holds more.
                if late > LARGEST_SEND_BUFFER and not found():
                    raise TimedOut("nothing has come in time")

    def _read(self, deadline: float | None) -> int:
        """Receive a batch, waiting for it; none if the connection is lost, but to be made again.

        :returns: as `_read_ready`.
        """
        taken = self._read_ready(deadline)
        if not taken:
            sock = self._sock
            if sock is not None and not _poll(sock, select.POLLIN, deadline):
                raise TimedOut("nothing has come in time")
        return taken

    def _read_now(self, wanted: deque[Any]) -> None:
        """Receive what is here."""
        left = LARGEST_SEND_BUFFER
        try:
            while left > 0 and (taken := self._read_ready(0.0)):
                left -= taken
        except TimedOut:
            pass  # not connected just now
        except Disconnected:
            if not wanted:
                raise

    def _read_ready(self, deadline: float | None) -> int:
        """Receive a batch that is here.

        :param deadline: until when to wait for a connection.
        :returns: bytes of the socket's buffer that it had taken, about; 0 if there was none.
        """
        if self._failures:
            raise self._failures.popleft()
        if len(self._batch):
            self._receive()
            return _PACKET
        sock = self._connected(deadline)
        if sock is None:
            raise Disconnected("not connected just now")
        try:
            packets, ended = self._reader.read(sock, read_at_once(self.core.bundle_limit))
        except OSError as e:
            self._lose(describe_loss(e))
        else:
            if packets:  # if the end is behind them it will be told again
                self._asking = False
                self._batch = Batch(packets)
                self._receive()
                return total_size(packets) + len(packets) * _PACKET
            if ended:
                self._lose(CLOSED)
        if self._error is not None:
            raise self._error
        return 0

    def _receive(self) -> None:
        self.core.go_on(self._batch)
        if self._failures:
            raise self._failures.popleft()

    def _call_user(self, callback: Callable[..., Any], *args: Any) -> None:
        """Call the application; an exception of its must not keep others from what is theirs."""
        try:
            callback(*args)
        except Exception as e:
            self._failures.append(e)

    def _read_rest(self, sock: socket.socket) -> list[bytes]:
        """The server takes no more; what it sent before is still here to be read."""
        rest: list[bytes] = []
        while True:
            try:
                packets, ended = self._reader.read(sock)
            except OSError:
                return rest
            rest += packets
            if ended or not packets:
                return rest

    # --- what the vocabulary needs (`ClientApi`) -------------------------------------------------

    def waiter(self) -> _Waiter:
        """See `sbus.client.api.ClientApi.waiter`."""
        return _Waiter()

    def _run(self, call: Coroutine[Any, None, T], timeout: float | None) -> T:
        """Run a coroutine of the vocabulary: read the socket while it waits."""
        outer, deadline = self._deadline, deadline_in(timeout)
        self._deadline = deadline
        error: Exception | None = None
        try:
            while True:
                try:
                    waiter: _Waiter = call.throw(error) if error is not None else call.send(None)
                except StopIteration as result:
                    value: T = result.value
                    return value
                error = None
                try:
                    self._read_until(waiter.is_done, deadline)
                except TimedOut:
                    error = TimedOut(f"no answer within {timeout} seconds")
                except Disconnected as e:
                    error = e
        finally:
            self._deadline = outer
            call.close()

    # --- coming and going --------------------------------------------------------------------

    def _open(self, timeout: float | None) -> None:
        self._attach(dial(self.address, self._settings.longest, timeout))
        self._drain(deadline_in(timeout))

    def _attach(self, sock: socket.socket) -> None:
        self._sock = sock
        self._asking = self._settings.bundles
        self.core.connected(max_sendable(sock))

    def _detach(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _connected(self, deadline: float | None) -> socket.socket | None:
        """The socket, made again if need be; None if a callback asks while that is being done.

        :raises sbus.errors.TimedOut: if the deadline has passed first.
        :raises sbus.errors.Disconnected: if it is over.
        """
        if self._loss_reason is not None and not self._coming_back:
            self._reconnect_loop(deadline)
        if self._error is not None:
            raise self._error
        return self._sock

    def _lose(self, why: str, rest: list[bytes] | None = None) -> None:
        """The connection is lost; `rest` is what it has brought and nobody has got yet."""
        error = Disconnected(f"{why} ({self.address})")
        if self._backoff is None:
            self._error = error
        elif self._loss_reason is None:
            self._delays = self._backoff.delays()
            self._next_attempt = time.monotonic() + next(self._delays)
            self._loss_reason = error
        self._detach()
        # Messages are still good, whenever they are read; the replies were for those who are told now.
        rest = self._batch.take() + Batch(rest or []).packets
        self._batch = Batch([packet for packet in rest if packet.startswith(b"MSG ")])
        waiting = self._lost()
        self._outbox.restart(self.core.resync_packets())
        for waiter in waiting:
            waiter.set_exception(error)

    def _reconnect_loop(self, deadline: float | None) -> None:
        """Connect until a connection lasts long enough to be where the old one was; then tell of the gap."""
        self._coming_back = True
        try:
            while self._error is None and not (self._sock is not None and self._proof.has_succeeded):
                if self._sock is None:
                    self._try_to_open(deadline)
                else:
                    self._drain(deadline)
                    if self._sock is not None and not self._proof.is_done():
                        self._read(deadline)
        finally:
            self._coming_back = False
        gap, self._loss_reason = self._loss_reason, None
        on_gap = self._settings.on_gap
        if on_gap is not None and gap is not None and self._error is None:
            on_gap(gap)

    def _try_to_open(self, deadline: float | None) -> None:
        """Try to connect, when it is time to."""
        until = self._next_attempt if deadline is None else min(self._next_attempt, deadline)
        time.sleep(max(0.0, until - time.monotonic()))
        if time.monotonic() < self._next_attempt:
            raise TimedOut("there is no connection yet")
        self._next_attempt = time.monotonic() + next(self._delays)
        try:
            sock = connect_once(self.address, self._settings.longest)
        except ConnectError:
            return
        if sock is not None:
            self._attach(sock)
            self._proof = _Waiter()
            self._outbox.extend(self.core.fence(self._proof))


def deadline_in(timeout: float | None) -> float | None:
    """When so many seconds are over, by `time.monotonic`; None for never."""
    return None if timeout is None else time.monotonic() + timeout


def _poll(sock: socket.socket, events: int, deadline: float | None) -> bool:
    """Wait for a socket; False if the deadline has passed first."""
    poll = select.poll()
    poll.register(sock, events)
    if deadline is None:
        return bool(poll.poll())
    while True:
        left = max(0.0, deadline - time.monotonic()) * 1000
        if poll.poll(min(left, LONGEST_POLL)):
            return True
        if left <= LONGEST_POLL:
            return False
