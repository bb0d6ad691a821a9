"""Last values: the newest message of each key that the operator has listed, for clients that connect late.

.. rubric:: Theory of operation

The operator lists patterns (``--last-value``), each with a limit of keys and of bytes. `LastValues` is subscribed to
them like any receiver, so the route cache knows which keys are kept, and a message of any other key costs nothing. It
does not count as a subscriber. Secret keys never reach it, because no open pattern matches one.

===========================  =========================================================================================
event                        what happens
===========================  =========================================================================================
a message                    replaces the value of its key (2 µs); an empty payload deletes it. The key belongs to the
                             first listed pattern that matches, and the value to its publisher's user.
a limit is exceeded          the user with the most keys or bytes of that pattern loses the oldest value, in the time of
                             the publisher: nobody pushes out the values of a user who has less
a client asks (``last``)     in one step it is subscribed and gets a list of references to all values; later
                             messages change the store, not the list
its socket takes packets     a chore of its user finds out, in slices, which values its pattern matches
                             (`LastValues.snapshot`, `sbus.flood.front`)
===========================  =========================================================================================

So a list keeps replaced values alive. It is charged to the client's user: its references at once, and each time that
`_RECOUNTED` bytes were replaced, all bytes replaced since the request, up to the size of the list. That is an upper
bound, as several lists may hold one value. If that puts the user over its limit, the client is disconnected. A value
takes about 500 bytes besides its packet, and up to 500 more for the name of a publisher that has left.

Rejected: copying the matching packets at once (10,000 patterns matched in one go stop the bus for 20 ms, and slow
readers would hold copies); keeping the place of a reader in the store instead of a list (values that change meanwhile
would be missing, or come twice).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from sbus.daemon.values import size
from sbus.errors import CloseReason, UsageError, Violation
from sbus.fair import Scheduler
from sbus.flood import PROGRAM, Outcome, SharedBudget, Signature, sign
from sbus.protocol.keys import Dialect, OpenPattern, PeerCredentials, SecretKey
from sbus.server.core.interfaces import Client, Publisher
from sbus.server.core.shares import UNBOUNDED
from sbus.server.core.users import User

__all__ = ["VALUE_OVERHEAD", "LastValueRule", "LastValues", "check_rules", "parse_rule"]

VALUE_OVERHEAD = 700
"""Bytes of memory that a kept value takes besides its packet, about."""

_SLICE = 64
"""Values of a snapshot that are matched in one turn of the reactor: about 0.3 ms with their sending."""
_SEGMENTS = 16
"""Segments of a pattern that are compared in the time of a match."""
_REFERENCE = 16
"""Bytes of memory that a value takes in the lists of a snapshot, the value aside."""
_RECOUNTED = 256 << 10
"""Bytes of replaced values after which the memory of the snapshots is counted again."""


@dataclass(frozen=True, slots=True)
class LastValueRule:
    """A pattern whose last values are kept.

    :ivar pattern: an open pattern.
    :ivar keys: the limit of keys.
    :ivar bytes: the limit of bytes of packets.
    """

    pattern: bytes
    keys: int = 10_000
    bytes: int = 16 << 20


def parse_rule(text: str) -> LastValueRule:
    """Parse the value of ``--last-value``: ``PATTERN[,keys=N][,bytes=SIZE]``.

    It is split from the right, so a pattern may contain commas.

    :raises UsageError: if a limit is no number above 0, or is given twice.
    """
    pattern, limits = text, dict[str, int]()
    while match := re.fullmatch(r"(.*),(keys|bytes)=([^,]*)", pattern, re.DOTALL):
        pattern, name, number = match.groups()
        try:
            limit = size("last-value")(number) if name == "bytes" else int(number)
        except (ValueError, UsageError):
            limit = 0
        if limit < 1 or name in limits:
            raise UsageError(
                f"--last-value={text}: {name}={number}: give each limit once, above 0: PATTERN,keys=10000,bytes=16M"
            )
        limits[name] = limit
    return LastValueRule(os.fsencode(pattern), **limits)


def check_rules(rules: Iterable[LastValueRule], dialect: Dialect) -> None:
    """Check the patterns of rules.

    :raises UsageError: if a pattern is malformed or secret.
    """
    for rule in rules:
        shown = dialect.shown(rule.pattern)
        try:
            is_secret = dialect.check(rule.pattern) is not None
        except Violation as e:
            raise UsageError(f"--last-value={shown}: {e}; give another pattern") from None
        if is_secret:
            raise UsageError(f"--last-value={shown}: values of secret keys are never kept; leave it out")


class _Value(NamedTuple):
    """A kept message: its packet, the UID and the signature of its publisher, and the store that it belongs to."""

    packet: bytes
    uid: int
    signature: Signature
    store: _Store


class _Image:
    """A snapshot on its way: a list of values of which some may no longer be in the store.

    :ivar size: bytes of memory of the values in the list.
    :ivar since: the bytes that had been replaced when the list was made.
    :ivar charged: bytes of memory that are charged for it.
    """

    __slots__ = ("charged", "client", "references", "since", "size")

    def __init__(self, client: Client, references: int, size: int, since: int) -> None:
        self.client = client
        self.references = references
        self.size = size
        self.since = since
        self.charged = 0

    def charge(self, replaced: int) -> None:
        """Charge the memory that it holds, given the bytes replaced until now."""
        self._charge(self.references + min(self.size, replaced - self.since))

    def end(self) -> None:
        self._charge(0)

    def _charge(self, memory: int) -> None:
        more, self.charged = memory - self.charged, memory
        self.client.pattern_memory += more
        self.client.user.charge_memory(more)


class _Store:
    """The values of one rule, by user, each user's oldest first."""

    __slots__ = ("bytes_by_user", "keys", "keys_by_user", "pattern", "rule", "size")

    def __init__(self, rule: LastValueRule, separator: bytes) -> None:
        self.rule = rule
        self.pattern = OpenPattern(rule.pattern, separator)
        self.keys = 0
        self.size = 0
        self.keys_by_user: dict[int, dict[bytes, None]] = {}
        self.bytes_by_user: dict[int, int] = {}

    def add(self, key: bytes, size: int, uid: int) -> None:
        self.keys += 1
        self.size += size
        self.keys_by_user.setdefault(uid, {})[key] = None
        self.bytes_by_user[uid] = self.bytes_by_user.get(uid, 0) + size

    def remove(self, key: bytes, size: int, uid: int) -> None:
        self.keys -= 1
        self.size -= size
        keys = self.keys_by_user[uid]
        del keys[key]
        self.bytes_by_user[uid] -= size
        if not keys:
            del self.keys_by_user[uid], self.bytes_by_user[uid]

    def excess(self) -> bytes | None:
        """Return the key to push out; None if there is room for all."""
        if self.size > self.rule.bytes:
            most = max(self.bytes_by_user, key=self.bytes_by_user.__getitem__)
        elif self.keys > self.rule.keys:
            most = max(self.keys_by_user, key=lambda uid: len(self.keys_by_user[uid]))
        else:
            return None
        return next(iter(self.keys_by_user[most]))


class _Pull:
    """The next slice of a snapshot, to be sent: a chore of the client's user."""

    __slots__ = ("_client", "is_waiting")

    def __init__(self, client: Client) -> None:
        self._client = client
        self.is_waiting = True

    def run(self, until: int) -> bool:
        """See `sbus.fair.Entry`."""
        if self.is_waiting:
            self.is_waiting = False
            self._client.flush()
        return True

    def describe(self) -> dict[str, Any]:
        """See `sbus.fair.Entry`."""
        return {"client": self._client.number}


class LastValues:
    """The last values of one bus: a `sbus.server.core.interfaces.Receiver` that keeps the messages that it receives.

    :param rules: the patterns to keep; the first one that matches a key is the key's.
    :param scheduler: where a snapshot waits between two slices.
    :param charge: called with the bytes of memory that the values take more than before, or below 0 less.
    """

    def __init__(
        self,
        rules: tuple[LastValueRule, ...],
        dialect: Dialect,
        scheduler: Scheduler,
        charge: Callable[[int], None] = lambda size: None,
    ) -> None:
        check_rules(rules, dialect)
        # As a receiver
        self.peer = PeerCredentials(os.getpid(), os.geteuid(), os.getegid())
        self.user = User(self.peer.uid, SharedBudget(), dialect.separator, UNBOUNDED)
        self.patterns: dict[bytes, tuple[int, SecretKey | None]] = {}
        self.pattern_bytes = 0
        self.pattern_memory = 0
        self.lost = 0
        self.queue = self.direct = self.naming = None
        self.transport = None
        self.can_block = False
        # The values, by key: the oldest publication first.
        self._values: dict[bytes, _Value] = {}
        self._stores = [_Store(rule, dialect.separator) for rule in rules]
        self._images: dict[_Image, None] = {}
        self._replaced = self._recounted = 0
        self._separator = dialect.separator
        self._scheduler = scheduler
        self._charge = charge

    def __len__(self) -> int:
        return len(self._values)

    @property
    def listed(self) -> list[bytes]:
        """The patterns whose values are kept."""
        return [store.rule.pattern for store in self._stores]

    @property
    def memory(self) -> int:
        """The memory of all values in bytes, about."""
        return sum(store.size + store.keys * VALUE_OVERHEAD for store in self._stores)

    def keys(self) -> list[bytes]:
        """Return the keys that are kept, the oldest publication first."""
        return list(self._values)

    def value(self, key: bytes) -> tuple[bytes, int] | None:
        """Return the kept packet of a key and the UID of its publisher, or None."""
        value = self._values.get(key)
        return None if value is None else (value.packet, value.uid)

    def keep(self, packets: list[bytes], publisher: Publisher | None) -> None:
        """Keep messages whose route this is on.

        :param publisher: the client that published them; None for the program around the bus.
        """
        if publisher is None:
            uid, signature = os.geteuid(), PROGRAM
        else:
            uid, signature = publisher.user.uid, publisher.signature
        before = self.memory
        for packet in packets:
            self._keep(packet, uid, signature)
        self._charge(self.memory - before)
        if self._images and self._replaced - self._recounted >= _RECOUNTED:
            self._recount()

    def _keep(self, packet: bytes, uid: int, signature: Signature) -> None:
        """Keep a message, and push out others if there are too many."""
        end = packet.index(b"\0", 4)
        key, size = packet[4:end], len(packet)
        before = self._values.pop(key, None)
        if before is not None:
            store = before.store
            store.remove(key, len(before.packet), before.uid)
            self._replaced += len(before.packet) + VALUE_OVERHEAD
        else:
            store = next(s for s in self._stores if s.pattern.matches(key))
        if size == end + 1 or size > store.rule.bytes:
            return
        self._values[key] = _Value(packet, uid, signature, store)
        store.add(key, size, uid)
        while (excess := store.excess()) is not None:
            value = self._values.pop(excess)
            store.remove(excess, len(value.packet), value.uid)
            self._replaced += len(value.packet) + VALUE_OVERHEAD

    def forget(self, key: bytes) -> None:
        """Drop the value of a key, as the newest one is in sealed memory and too long to be kept."""
        value = self._values.pop(key, None)
        if value is not None:
            before = self.memory
            value.store.remove(key, len(value.packet), value.uid)
            self._replaced += len(value.packet) + VALUE_OVERHEAD
            self._charge(self.memory - before)

    def _recount(self) -> None:
        """Charge the memory of the snapshots now; disconnect the clients of users that have no memory for it."""
        self._recounted = self._replaced
        for image in tuple(self._images):
            image.charge(self._replaced)
            if not (image.client.is_ending or image.client.user.may_hold(0)):
                image.client.close(CloseReason.USER_LIMIT)

    @property
    def snapshot_memory(self) -> int:
        """The memory of a snapshot's references, in bytes."""
        return _REFERENCE * len(self._values)

    def snapshot(
        self, client: Client, pattern: bytes, done: bytes
    ) -> tuple[Generator[bytes | None, None, None], Callable[[], None]]:
        """Return the packets of the kept messages that a pattern matches, the oldest publication first.

        They are those of this moment. The iterator yields None after each slice, to continue in a turn of the client's
        user.

        :param done: the packet to end with.
        :returns: the packets, and the function to call when the last one has left, or the connection ends.
        """
        image = _Image(client, self.snapshot_memory, self.memory, self._replaced)
        self._images[image] = None
        image.charge(self._replaced)
        # Not one list of pairs: a thousand snapshots would be millions of tuples for the garbage collector to visit.
        keys, values = list(self._values), list(self._values.values())
        return self._send(client, pattern, keys, values, done), lambda: self._forget(image)

    def _forget(self, image: _Image) -> None:
        """Give back what a snapshot was charged."""
        self._images.pop(image, None)
        image.end()

    def _send(
        self, client: Client, pattern: bytes, keys: list[bytes], values: list[_Value], done: bytes
    ) -> Generator[bytes | None, None, None]:
        wanted = OpenPattern(pattern, self._separator)
        at_once = max(1, _SLICE // (1 + wanted.segments // _SEGMENTS))
        pull: _Pull | None = None
        try:
            for at, (key, value) in enumerate(zip(keys, values, strict=True)):
                if at and at % at_once == 0:
                    pull = _Pull(client)
                    self._scheduler.add_chore(client.user.lines, pull)
                    while pull.is_waiting:
                        yield None
                if wanted.matches(key):
                    yield sign(value.packet, value.signature.mark) if client.naming else value.packet
            yield done
        finally:
            if pull is not None:
                pull.is_waiting = False

    # --- as a receiver -----------------------------------------------------------------------

    def enqueue(self, packets: list[bytes], may_block: bool) -> Outcome | None:
        """See `sbus.server.core.interfaces.Receiver`; `keep` takes its place."""
        self.keep(packets, None)
        return None

    def flush(self) -> None:
        """See `sbus.server.core.interfaces.Receiver`."""

    def close(self, reason: CloseReason) -> None:
        """See `sbus.server.core.interfaces.Receiver`."""
