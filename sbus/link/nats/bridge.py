"""The bridge: one bus and NATS, joined for as long as both are wanted.

.. rubric:: Theory of operation

The bridge is a client of the bus and a client of NATS. Messages listed with ``--out`` go from the bus to NATS
(`sbus.link.nats.outgoing`); of the keys listed with ``--in``, the bridge subscribes on NATS only to those that clients
of the bus want (`sbus.link.nats.wanted`), and publishes the messages on the bus (`sbus.link.nats.incoming`).

Nothing comes back the way it went: echo is off on both sides, and messages of this bus's own origin are dropped. That
is enough as long as there is one bridge to a bus (`sbus.link.nats.state`) and no other way round. So a bus with a
master is refused (``link/path``): packets have no headers, and would go round for ever. The bridge then takes the one
place that the bus has for a link, so that the bus refuses a link to a master for as long as the bridge runs.

Both connections come and go independently, each with attempts for ever. While NATS is away, messages wait in the queue
as far as there is room. While the bus is away, the subscriptions on NATS stay: a bus that restarts gets its clients
back. When a connection to NATS is made, it subscribes first, and a fence returns before it carries anything.

Everything runs in one thread on the asyncio reactor, because nats-py is an asyncio library. A thread for it would cost
two hand-overs a message.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from twisted.logger import Logger

from sbus.client.aio import Bus, Subscription, connect
from sbus.client.connecting import Backoff
from sbus.client.losses import Lost
from sbus.errors import Closed, CloseReason, ConnectionLost, Disconnected, SbusError, TimedOut
from sbus.link.nats.client import Connection, ConnectionFailed, connect_options
from sbus.link.nats.counters import LOSSES, LOST_IN, LOST_OUT, Counters
from sbus.link.nats.incoming import Incoming
from sbus.link.nats.metrics import families
from sbus.link.nats.outgoing import Outgoing
from sbus.link.nats.sequence import Numbering
from sbus.link.nats.settings import Settings
from sbus.link.nats.state import State
from sbus.link.nats.wanted import Wanted
from sbus.protocol.controls import INTEREST_PATTERN, INTEREST_PATTERNS, LINK_DOWN, LINK_LOST, LINK_PATH, LINK_UP
from sbus.protocol.explain import hints
from sbus.protocol.packets import CMSG, UNSUB, build

if TYPE_CHECKING:
    from prometheus_client.core import Metric

__all__ = ["Bridge", "BusHasMaster"]

_ANSWER_TIME = 10.0
"""Seconds that the bus may take to answer."""
_REPORT_INTERVAL = 10.0
"""Seconds between two lines about losses."""
_REPEAT_INTERVAL = 60.0
"""Seconds between two lines with the same reason why NATS cannot be reached."""
_DRAIN_TIME = 5.0
"""Seconds that the queues may take to drain when the bridge stops."""
_MIN_LIFETIME = 1.0
"""Seconds that a connection must have lasted for the next attempt to be made without a pause."""
_POLL = 0.02
_NOT_PERMITTED = "permissions violation for publish"
"""The text with which nats-server refuses a message that its user may not publish."""
_TOO_MANY = "maximum subscriptions"
"""Words of nats-server when a client, or its account, subscribes to more than it may."""


class BusHasMaster(SbusError):
    """The bus has a master, so it must not have a bridge."""


class Bridge:
    """A bridge between the bus at `address` and NATS.

    :param state: the locked state file.
    :raises sbus.errors.UsageError: if the login cannot be used.
    :ivar counters: the messages carried and lost.
    """

    _log = Logger(namespace="sbus.nats")

    def __init__(self, address: str, settings: Settings, state: State) -> None:
        self.counters = Counters()
        self._address = address
        self._settings = settings
        self._state = state
        self._options = connect_options(settings.nats, settings.login)
        self._wanted = Wanted(settings)
        self._path: list[tuple[str, str]] = []
        self._bus: Bus | None = None
        self._connection: Connection | None = None
        self._outgoing: Outgoing | None = None
        self._incoming: Incoming | None = None
        self._local: Subscription | None = None
        self._failure: asyncio.Future[None] | None = None
        self._last_report: tuple[str, float] = ("", 0.0)
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False

    # --- running -----------------------------------------------------------------------------

    async def run(self) -> None:
        """Carry messages until `stop`.

        :raises BusHasMaster: if the bus has a master, or gets one.
        :raises Exception: if there is a bug.
        """
        settings = self._settings
        self._failure = asyncio.get_running_loop().create_future()
        self._say_what_was_lost()
        for line in hints((*settings.listed_out, *settings.listed_in)):
            self._log.warn("{line}", line=line)
        bus = self._bus = await connect(
            self._address,
            reconnect=True,
            timeout=None,
            max_packet=settings.max_packet,
            reconnect_buffer=settings.queue_bytes,
            on_control=self._control_received,
            on_lost=self._loss_received,
            on_gap=self._bus_replaced,
        )
        try:
            self._start(self._join(bus))
            await self._failure
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if self._connection is not None:
                await self._connection.close()
            bus.close_now()
            await bus.close()

    async def _join(self, bus: Bus) -> None:
        """Begin to carry messages, once the bus answers."""
        settings = self._settings
        while True:
            try:
                await self._introduce(bus)
                break
            except Closed:
                raise
            except Disconnected:
                await asyncio.sleep(_POLL)  # it reconnects
        own_id = self._own_id()
        self._incoming = Incoming(
            settings.realm, own_id, settings.queue_bytes, settings.max_packet, self.counters, self._note
        )
        self._outgoing = Outgoing(
            settings.realm,
            f"{own_id.decode()} {settings.name}",
            settings.prefix,
            Numbering(self._state.next_run(time.time_ns())),
            settings.queue_bytes,
            settings.confirm_time,
            self.counters,
            self._note,
        )
        self._log.info(
            "bus {name} ({address}, {id}) joins realm {realm}",
            name=settings.name,
            address=self._address,
            id=own_id.decode(),
            realm=settings.realm,
        )
        for work in (
            self._incoming.run(bus),
            self._stay_connected(self._outgoing),
            self._wanted.follow(self._incoming),
            self._report_losses(),
            *([self._take(self._outgoing)] if settings.listed_out else []),
        ):
            self._start(work)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._stopping:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(error)

    async def stop(self) -> None:
        """Send the waiting messages, for 5 seconds at most, and end `run`."""
        self._stopping = True
        await self._take_no_more()
        outgoing, incoming = self._outgoing, self._incoming
        deadline = time.monotonic() + _DRAIN_TIME
        if outgoing is not None and incoming is not None:
            while time.monotonic() < deadline and self._bus is not None and self._bus.is_connected():
                is_sent = not (outgoing.waiting or outgoing.in_flight) or self._connection is None
                if is_sent and not (incoming.waiting or incoming.unhandled):
                    break
                await asyncio.sleep(_POLL)
            left = outgoing.waiting + outgoing.in_flight + incoming.waiting + incoming.unhandled
            if left:
                self._log.warn("{left} messages are lost, because the bridge stops", left=left)
        self._log.info("the bridge stops: {counters}", counters=self.counters.nonzero())
        self._state.note(0, 0, 0, 0)
        if self._failure is not None and not self._failure.done():
            self._failure.set_result(None)

    async def _take_no_more(self) -> None:
        """End the subscriptions on the bus, and receive the messages queued for them."""
        bus = self._bus
        if bus is None or self._local is None:
            return
        try:
            bus.send([build(UNSUB, pattern) for pattern in self._settings.listed_out])
            await bus.fence(_DRAIN_TIME)
        except (Disconnected, TimedOut):
            pass
        await asyncio.sleep(0)  # `_take` gets the rest

    def log_counters(self) -> None:
        """Log the messages carried, lost and waiting."""
        outgoing, incoming, connection = self._outgoing, self._incoming, self._connection
        self._log.info(
            "{counters}; waiting: {out} for NATS, {come} for the bus; NATS: {server}; subscriptions: {subscriptions}",
            counters=self.counters.nonzero(),
            out=outgoing.waiting if outgoing else 0,
            come=incoming.waiting if incoming else 0,
            server=connection.server if connection else "not connected",
            subscriptions=len(self._wanted),
        )

    # --- the bus -----------------------------------------------------------------------------

    async def _introduce(self, bus: Bus) -> None:
        """Choose the settings, and ask for the path and the patterns."""
        self._wanted.begin_list()
        bus.control("echo/off")
        bus.flood_control(soft="queue", hard="discard")
        if self._settings.listed_out and self._local is None:
            first, *more = self._settings.listed_out
            self._local = bus.subscribe(first)
            for pattern in more:
                bus.send(bus.core.subscribe(pattern, self._local))
        bus.send([build(CMSG, LINK_PATH)])
        if self._wanted.asks_bus:
            bus.send([build(CMSG, INTEREST_PATTERNS)])
        await self._answered(bus)
        self._check_path()
        # Take the one place that the bus has for a link, so that no link to a master takes it meanwhile.
        bus.send([build(CMSG, LINK_PATH, b"")])
        await self._answered(bus)
        self._tell_state()

    async def _answered(self, bus: Bus) -> None:
        """Wait until the bus has handled all messages, however long it takes."""
        while True:
            try:
                return await bus.fence(_ANSWER_TIME)
            except TimedOut as error:
                self._log.warn("the bus does not answer: {error}", error=error)

    def _tell_state(self) -> None:
        """Tell a bus that knows links whether messages cross."""
        if self._bus is not None and self._path:
            with contextlib.suppress(Disconnected):  # it is told when it comes back
                self._bus.send([build(CMSG, LINK_DOWN if self._connection is None else LINK_UP)])

    def _own_id(self) -> bytes:
        """Return the identity of this bus: its own, or, if it has none, that of the state file."""
        return self._path[0][0].encode() if self._path else self._state.bridge_id

    def _check_path(self) -> None:
        if len(self._path) > 1:
            (_, own), (_, master) = self._path[:2]
            raise BusHasMaster(
                f"the bus {own} has a master, {master}: messages would go round for ever; join {master} to NATS instead"
            )

    def _control_received(self, key: bytes, payload: bytes) -> None:
        if key == LINK_PATH:
            lines = (line.partition(b" ") for line in payload.splitlines())
            self._path = [
                (bus_id.decode("ascii", "replace"), name.decode("utf-8", "replace")) for bus_id, _, name in lines
            ]
            if self._incoming is not None:
                try:
                    self._check_path()
                except BusHasMaster as error:
                    self._fail(error)
        elif key == INTEREST_PATTERN:
            self._wanted.note(payload)
        elif key == INTEREST_PATTERNS:
            self._wanted.end_list()

    def _loss_received(self, lost: Lost) -> None:
        self.counters.bus_lost += lost.messages or 0

    def _bus_replaced(self, reason: Exception) -> None:
        """The connection to the bus was lost, and made again."""
        self._log.warn("the bus was away: {reason}; messages on it may have been missed", reason=reason)
        if isinstance(reason, ConnectionLost) and reason.reason in (CloseReason.SECOND_LINK, CloseReason.NOT_ALLOWED):
            self._fail(reason)
        if self._incoming is not None:
            self._incoming.bus_lost()
            if self._bus is not None and not self._stopping:
                self._start(self._introduce_again(self._bus))

    async def _introduce_again(self, bus: Bus) -> None:
        with contextlib.suppress(Disconnected):  # it comes back, and is asked again
            await self._introduce(bus)

    async def _take(self, outgoing: Outgoing) -> None:
        assert self._local is not None
        while True:
            try:
                outgoing.offer(await self._local.get_many())
            except Disconnected:
                return

    # --- NATS --------------------------------------------------------------------------------

    async def _stay_connected(self, outgoing: Outgoing) -> None:
        urls = list(self._settings.nats)
        delays = Backoff(first=0.1, longest=5.0).delays()
        while True:
            await asyncio.sleep(next(delays))
            try:
                connection = await self._connect(urls)
            except ConnectionFailed as error:
                self._report(f"NATS cannot be reached: {error}")
                self._ask_for_less(str(error))
                continue
            since = time.monotonic()
            before = self.counters.unconfirmed
            await outgoing.run(connection)
            urls = self._all_servers(connection)
            self._connection = None
            self._tell_state()
            self._wanted.disconnected()
            why = connection.lost.result() if connection.lost.done() else "it takes no more messages"
            connection.abort(why)
            left = self.counters.unconfirmed - before
            self._report(f"NATS is lost: {why}; {left:,} messages were not confirmed, and may be lost")
            self._ask_for_less(why)
            if time.monotonic() - since >= _MIN_LIFETIME:
                delays = Backoff(first=0.1, longest=5.0).delays()

    def _ask_for_less(self, why: str) -> None:
        """Ask for fewer patterns from now on if nats-server has refused this number; clients choose the patterns."""
        if _TOO_MANY in why.lower() and self._incoming is not None:
            self._wanted.lower_limit(self._incoming)

    def _all_servers(self, connection: Connection) -> list[str]:
        """Return the URLs that were given, and those of the other servers of the cluster (not for web sockets)."""
        given = {_host(url): url for url in self._settings.nats}
        if self._settings.nats[0].startswith("ws"):
            return [*given.values()]
        return [*{**{_host(url): url for url in connection.peers()}, **given}.values()]

    async def _connect(self, urls: list[str]) -> Connection:
        assert self._incoming is not None
        connection = await Connection.open(
            urls,
            self._options,
            f"sbus {self._settings.name}",
            self._incoming.receive,
            self._error_received,
            partial(self._wanted.refused, self._incoming),
        )
        try:
            await self._wanted.connected(connection)
            if not await connection.fence(self._settings.confirm_time):
                raise ConnectionFailed(connection.lost.result() if connection.lost.done() else "it does not answer")
            self._connection = connection
            self._tell_state()
        except BaseException:
            self._wanted.disconnected()
            connection.abort("not used")
            raise
        self._last_report = ("", 0.0)
        self._log.info("joined NATS at {server}", server=connection.server)
        return connection

    def _error_received(self, text: str) -> None:
        """Log an error of nats-server, and count it if it refuses a message that the bridge may not publish."""
        self.counters.out_denied += _NOT_PERMITTED in text.lower()
        self._report(text)

    # --- reporting ---------------------------------------------------------------------------

    def _report(self, text: str) -> None:
        """Log trouble with NATS; the same text again only after a while."""
        now = time.monotonic()
        if text != self._last_report[0] or now - self._last_report[1] >= _REPEAT_INTERVAL:
            self._last_report = text, now
            self._log.warn("{text}", text=text)

    async def _report_losses(self) -> None:
        """Log the first loss within a second, later ones in sums."""
        before = dict.fromkeys(LOSSES, 0)
        while True:
            await asyncio.sleep(1.0)
            now = {name: getattr(self.counters, name) for name in LOSSES}
            lost = ", ".join(f"{name} {now[name] - before[name]:,}" for name in LOSSES if now[name] > before[name])
            if lost:
                up, down = (sum(now[name] for name in names) for names in (LOST_OUT, LOST_IN))
                if self._bus is not None:
                    self._bus.send([build(CMSG, LINK_LOST, b"%d %d" % (up, down))])
                self._log.warn("messages were lost: {lost}", lost=lost)
                before = now
                await asyncio.sleep(_REPORT_INTERVAL)

    def metrics(self, is_up: bool) -> Iterator[Metric]:
        """Yield the metrics.

        :param is_up: whether the bridge has not been stopped.
        """
        outgoing, incoming = self._outgoing, self._incoming
        is_connected = is_up and self._connection is not None
        return families(
            self.counters,
            waiting_out=outgoing.waiting if outgoing else 0,
            waiting_in=incoming.waiting if incoming else 0,
            is_connected=is_connected,
            subscriptions=len(self._wanted) if is_connected else 0,
        )

    def _say_what_was_lost(self) -> None:
        out, come = self._state.lost
        if out or come:
            self._log.warn(
                "the bridge before this one was killed: up to {out} messages to NATS and {come} to the bus were lost",
                out=out,
                come=come,
            )
        self._state.note(0, 0, 0, 0)

    def _note(self) -> None:
        """Write the counts for the next bridge."""
        outgoing, incoming, counters = self._outgoing, self._incoming, self.counters
        if outgoing is None or incoming is None:
            return
        self._state.note(
            counters.taken,
            counters.taken - outgoing.waiting - outgoing.in_flight,
            counters.received,
            counters.received - incoming.waiting - incoming.unhandled,
        )


def _host(url: str) -> str:
    """Return the host and the port of a URL, without the secret that may be in front of them."""
    return urlsplit(url).netloc.rpartition("@")[2]
