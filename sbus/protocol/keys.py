"""Routing keys, patterns and secret keys, and the reference for matching them.

Theory of operation
-------------------

This module defines the keys and patterns that a client may use, and the keys that a pattern matches. `matches` favours
clarity over speed: it states the rules in the order of the protocol. A property test compares it with the trie. The
numbers in comments are those rules; 1 to 4 are numbered in the protocol's "Keys and patterns", 5 and 8 are these:

5. No wildcard reaches a key whose first segment is ``!``.
8. A segment ``!`` may only begin complete credentials: at the start of a key or, chained, within ``<rest>``.

Invariants:

* `Dialect.check` runs on every key and every pattern before anything else uses it, so all other code may rely on three
  well-formed IDs in a secret key.
* IDs are canonical (decimal, no leading zeros, below 2^32), so equal IDs are equal bytes.
* A pattern is secret if and only if it begins with ``!/cred/`` literally. So an open pattern matches open keys only.
* An empty ID in a pattern means "empty, or my own". `SecretKey.readers` expands it when a client subscribes, so
  matching a key needs no credentials.

There is no backtracking: a pattern with anything but ``*`` after a ``*`` in one segment matches nothing, so matching is
linear in the length of the key.

The early dialect has the same rules with ``.`` as separator, no control messages and no secret keys.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from sbus.errors import UsageError, Violation, ViolationReason

__all__ = [
    "CURRENT",
    "DIALECTS",
    "EARLY",
    "Dialect",
    "OpenPattern",
    "PeerCredentials",
    "SecretKey",
    "find_dialect",
    "matches",
    "matches_open",
]

_BANG = re.compile(rb"!(?![^/])(?<![^/]!)")
"""A segment ``!``. It begins with a byte to look for: the other way round, a key as long as a packet took 5 ms."""
_MOST_CREDENTIALS = 1_024
"""Credentials in one key, chained: to check these takes 2 ms, and as many as fit a packet 50 ms."""
_CREDENTIALS = re.compile(rb"!/cred/([^/]*)/([^/]*)/([^/]*)/")
_ID = re.compile(rb"(?:0|[1-9][0-9]{0,9})?")
_LARGEST_ID = 2**32 - 1
_USUAL = re.compile(rb"!/cred/(0|[1-9][0-9]{0,8}|)/(0|[1-9][0-9]{0,8}|)/(0|[1-9][0-9]{0,8}|)/([^!]*)")
"""Secret keys that need no closer look: a service of requests checks several for each."""


class PeerCredentials(NamedTuple):
    """The peer of a connection, as the kernel reports it (``SO_PEERCRED``, unix(7))."""

    pid: int
    uid: int
    gid: int


class SecretKey(NamedTuple):
    """The parts of a key or pattern ``!/cred/<gid>/<uid>/<pid>/<rest>``.

    An ID is empty or canonical decimal, so comparing IDs as bytes compares the numbers.
    """

    gid: bytes
    uid: bytes
    pid: bytes
    rest: bytes

    @property
    def ids(self) -> bytes:
        """The three IDs as in the key: ``<gid>/<uid>/<pid>``."""
        return b"%b/%b/%b" % self[:3]

    def readers(self, peer: PeerCredentials) -> list[bytes]:
        """Return the `ids` of all keys that `peer` receives through this pattern.

        An empty field in the pattern stands for an empty field and for the peer's own ID.
        """
        own = (b"%d" % peer.gid, b"%d" % peer.uid, b"%d" % peer.pid)
        gids, uids, pids = ((f,) if f else (b"", mine) for f, mine in zip(self[:3], own, strict=True))
        return [b"%b/%b/%b" % (g, u, p) for g in gids for u in uids for p in pids]

    def belongs_to(self, peer: PeerCredentials) -> bool:
        """Return whether each ID that is not empty is the peer's own."""
        own = (b"%d" % peer.gid, b"%d" % peer.uid, b"%d" % peer.pid)
        return all(not field or field == mine for field, mine in zip(self[:3], own, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class Dialect:
    """One revision of the protocol.

    :ivar name: the name for ``--dialect``.
    :ivar separator: the byte between segments of a key.
    :ivar control: whether it has control messages (``CMSG``) and secret keys.
    """

    name: str
    separator: bytes
    control: bool

    def check(self, key: bytes) -> SecretKey | None:
        """Check a key to publish, or a pattern to subscribe to.

        :returns: the parts of a secret key, or None for an open one.
        :raises Violation: for a reserved use of ``!``, or a bad ID.
        """
        if b"!" not in key:
            return None
        if not self.control:
            if key.startswith(b"!"):
                raise Violation(ViolationReason.RESERVED_KEY)
            return None
        return _check_reserved(key)

    def is_secret(self, key: bytes) -> bool:
        """Return whether the key is out of reach of open patterns (rule 5)."""
        return self.control and (key == b"!" or key.startswith(b"!/"))

    def shown(self, key: bytes) -> str:
        """Return a key as text for a log: escaped, and cut to 200 bytes.

        The ``<rest>`` of a secret key is left out.
        """
        if self.is_secret(key) and (match := _CREDENTIALS.match(key)):
            key = match[0] + (b"..." if match.end() < len(key) else b"")
        text = key[:200].decode("ascii", "backslashreplace")
        escaped = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
        return escaped + ("..." if len(key) > 200 else "")


CURRENT = Dialect("current", b"/", control=True)
EARLY = Dialect("early", b".", control=False)
DIALECTS = {dialect.name: dialect for dialect in (CURRENT, EARLY)}
"""The dialects by name, as ``--dialect`` takes them."""


def find_dialect(name: str) -> Dialect:
    """Return the dialect with this name.

    :raises UsageError: if there is none.
    """
    if name in DIALECTS:
        return DIALECTS[name]
    raise UsageError(f"dialect={name!r:.80}: use 'current' or 'early'")


def _check_reserved(key: bytes) -> SecretKey | None:
    """Apply rule 8: ``!`` only begins complete credentials.

    They stand at the start or within ``<rest>``.
    """
    if usual := _USUAL.fullmatch(key):
        return SecretKey(*usual.groups())
    secret, count = None, 0
    bang = _BANG.search(key)
    while bang:
        start = bang.start()
        count += 1
        credentials = _CREDENTIALS.match(key, start)
        if not credentials or (start and not secret) or count > _MOST_CREDENTIALS:
            raise Violation(ViolationReason.RESERVED_KEY)
        for field in credentials.groups():
            if not _ID.fullmatch(field) or (field and int(field) > _LARGEST_ID):
                raise Violation(ViolationReason.BAD_ID)
        if not start:
            gid, uid, pid = credentials.groups()
            secret = SecretKey(gid, uid, pid, key[credentials.end() :])
        bang = _BANG.search(key, credentials.end())
    return secret


class OpenPattern:
    """A pattern that is compared with many keys: rules 1 to 4, without reserved names.

    A key is split no further than the pattern goes, so a comparison takes time in proportion to `segments`, whatever
    the length of the key.

    :ivar segments: the number of segments that a key is compared with.
    """

    __slots__ = ("_below", "_is_everything", "_parts", "_separator", "segments")

    def __init__(self, pattern: bytes, separator: bytes = b"/") -> None:
        self._is_everything = not pattern
        self._separator = separator
        self._parts = pattern.split(separator)
        self._below = not self._parts[-1]
        if self._below:
            self._parts.pop()
        self.segments = len(self._parts)

    def matches(self, key: bytes) -> bool:
        """Return whether the pattern matches a key."""
        if self._is_everything:
            return True
        stars = b"*"
        segments = key.split(self._separator, self.segments)
        if len(segments) != self.segments + self._below:
            return False
        for part, segment in zip(self._parts, segments, strict=False):
            literal, star, rest = part.partition(stars)
            if not star:
                if segment != part:
                    return False
            elif rest.strip(stars) or not segment.startswith(literal):
                return False
        return True


def matches_open(pattern: bytes, key: bytes, separator: bytes = b"/") -> bool:
    """Apply rules 1 to 4: return whether the pattern matches the key.

    Reserved names are not considered.
    """
    return OpenPattern(pattern, separator).matches(key)


def matches(pattern: bytes, key: bytes, dialect: Dialect = CURRENT, subscriber: PeerCredentials | None = None) -> bool:
    """Return whether a subscriber with this pattern receives a message with this key.

    This is the reference for all rules.

    :param subscriber: the subscriber's credentials; without them, no secret key matches.
    :raises Violation: if the protocol forbids the pattern or the key.
    """
    wanted = dialect.check(pattern)
    secret = dialect.check(key)
    if not secret:
        return not wanted and matches_open(pattern, key, dialect.separator)
    if not wanted or not subscriber or not wanted.belongs_to(subscriber):
        return False
    return secret.ids in wanted.readers(subscriber) and matches_open(wanted.rest, secret.rest, dialect.separator)
