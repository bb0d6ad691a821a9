"""The requests of a bridge to NATS: from the patterns of the bus's clients to subscriptions on a connection.

The bus lists the open patterns of its clients, and reports each change (``interest/patterns``). `sbus.link.interest`
decides which patterns to ask for; several of these may have one subject on NATS. A connection that is new subscribes to
all of them; after that only what changes is done, in the order of the changes.
"""

from __future__ import annotations

import asyncio
import time

from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
from twisted.logger import Logger

from sbus.link.interest import Interest
from sbus.link.nats.client import Connection
from sbus.link.nats.incoming import Incoming
from sbus.link.nats.settings import Settings
from sbus.link.subjects import pattern_subject

__all__ = ["Wanted"]

_LIST_TIME = 5.0
"""Seconds until the bus sends the first pattern, or the bridge concludes that it sends none."""
_POLL = 0.02


class Wanted:
    """The patterns that are wanted, and the subscriptions that are made for them."""

    _log = Logger(namespace="sbus.nats")

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._interest = Interest(settings.listed_in)
        self._interest_changed = asyncio.Event()
        self._listing: dict[bytes, None] | None = {}  # patterns of a list that is not complete
        self._has_list = asyncio.Event()
        self._names: dict[str, set[bytes]] = {}  # the subjects to subscribe to, with their patterns
        self._subscriptions: dict[str, Subscription] = {}  # on the present connection
        self._changed: dict[str, None] = {}  # subjects for which the two may differ
        self._subscribing = asyncio.Lock()
        self._connection: Connection | None = None
        if settings.all_in:
            self._interest.add(b"")

    @property
    def asks_bus(self) -> bool:
        """Whether the bus has to list the patterns of its clients."""
        return bool(self._settings.listed_in) and not self._settings.all_in

    def __len__(self) -> int:
        return len(self._subscriptions)

    # --- what the bus says -------------------------------------------------------------------

    def begin_list(self) -> None:
        """Expect a new list of patterns, which takes the place of the old one when it is complete."""
        self._listing = {}

    def end_list(self) -> None:
        """Note that the list is complete."""
        if self._listing is not None:
            self._interest.replace(self._listing, time.monotonic())
            self._listing = None
            self._interest_changed.set()
            self._has_list.set()

    def note(self, change: bytes) -> None:
        """Note a change: ``+ <n> <pattern>`` or ``- <n> <pattern>``."""
        sign, _, pattern = change.split(b" ", 2)
        if self._listing is not None:
            if sign == b"+":
                self._listing[pattern] = None
            else:
                self._listing.pop(pattern, None)
            return
        if sign == b"+":
            self._interest.add(pattern)
        else:
            self._interest.remove(pattern, time.monotonic())
        self._interest_changed.set()

    async def _wait_for_list(self) -> None:
        deadline = time.monotonic() + _LIST_TIME
        while not self._has_list.is_set() and (self._listing or time.monotonic() < deadline):
            await asyncio.sleep(_POLL)
        if not self._has_list.is_set():
            self._log.warn(
                "the bus does not say what its clients want: everything that --in lists is subscribed to "
                "(run the bridge as root or as the server's user)"
            )
            self._interest.add(b"")

    # --- what NATS is asked for --------------------------------------------------------------

    async def follow(self, incoming: Incoming) -> None:
        """Subscribe to the wanted patterns, for ever."""
        if not self._settings.listed_in:
            return
        if self.asks_bus:
            await self._wait_for_list()
        interest = self._interest
        while True:
            for change in interest.changes(time.monotonic()):
                self._change(incoming, *change)
            if self._connection is not None:
                await self._subscribe(self._connection)
            self._interest_changed.clear()
            due = interest.due(time.monotonic())
            try:
                async with asyncio.timeout(None if due is None else max(0.001, due - time.monotonic())):
                    await self._interest_changed.wait()
            except TimeoutError:
                pass

    def _change(self, incoming: Incoming, is_new: bool, pattern: bytes) -> None:
        if is_new:
            incoming.asked_for(pattern)
        else:
            incoming.gave_up(pattern)
        name = pattern_subject(self._settings.realm, pattern)
        if name is not None:
            patterns = self._names.setdefault(name, set())
            (patterns.add if is_new else patterns.discard)(pattern)
            if not patterns and self._connection is None:
                del self._names[name]
                self._changed.pop(name, None)
                return
            self._changed.pop(name, None)
            self._changed[name] = None

    def lower_limit(self, incoming: Incoming) -> None:
        """Ask for fewer patterns on the next connection: NATS has refused this number."""
        before = set(self._interest.asked)
        self._interest.lower_limit()
        after = {pattern for _, pattern in self._interest.restart(time.monotonic())}
        for pattern in after - before:
            self._change(incoming, True, pattern)
        for pattern in before - after:
            self._change(incoming, False, pattern)
        if len(after) < len(before):
            self._log.warn(
                "NATS permits fewer subscriptions: asking for {after} instead of {before}",
                after=len(after),
                before=len(before),
            )

    def refused(self, incoming: Incoming, name: str) -> None:
        """Do without the patterns of a subject, for a while: NATS does not permit it."""
        for pattern in list(self._names.get(name, ())):
            self._interest.refuse(pattern, time.monotonic())
            self._change(incoming, False, pattern)
        self._interest_changed.set()

    async def connected(self, connection: Connection) -> None:
        """Make all subscriptions on a new connection, and follow there from now on."""
        self._subscriptions = {}
        self._changed.update(dict.fromkeys(self._names))
        self._connection = connection
        await self._subscribe(connection)

    def disconnected(self) -> None:
        """Note that the connection is lost."""
        self._connection = None
        self._subscriptions = {}

    async def _subscribe(self, connection: Connection) -> None:
        """Make the subscriptions of a connection those that are asked for, in the order of the changes."""
        async with self._subscribing:
            while self._changed and self._connection is connection:
                name = next(iter(self._changed))
                del self._changed[name]
                try:
                    if not self._names.get(name):
                        self._names.pop(name, None)
                        if name in self._subscriptions:
                            await self._subscriptions.pop(name).unsubscribe()
                    elif name not in self._subscriptions:
                        subscription = await connection.subscribe(name)
                        if self._connection is connection:
                            self._subscriptions[name] = subscription
                except NatsError:
                    return  # it is lost; the next connection subscribes to everything
