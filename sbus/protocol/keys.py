"""Routing keys, patterns and secret keys; and one pattern against one key, as the plain reference.

The index (`sbus.routing.trie`) must find what `matches` finds; this module says what that is, and which
keys and patterns a peer may use at all. Numbers in the comments are the rules of the protocol's
section on matching.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from sbus.errors import Violation, ViolationReason

__all__ = ["CURRENT", "EARLY", "Dialect", "PeerCredentials", "SecretKey", "matches", "matches_open"]

_BANG = re.compile(rb"(?<![^/])!(?![^/])")
_CREDENTIALS = re.compile(rb"!/cred/([^/]*)/([^/]*)/([^/]*)/")
_ID = re.compile(rb"(?:0|[1-9][0-9]{0,9})?")
_LARGEST_ID = 2**32 - 1


class PeerCredentials(NamedTuple):
    """Who is at the other end of a connection, by the kernel's word (``SO_PEERCRED``, unix(7))."""

    pid: int
    uid: int
    gid: int


class SecretKey(NamedTuple):
    """A key or pattern ``!/cred/<gid>/<uid>/<pid>/<rest>`` taken apart.

    The IDs are decimal and canonical, or empty; so comparing them as bytes compares the numbers.
    """

    gid: bytes
    uid: bytes
    pid: bytes
    rest: bytes

    @property
    def ids(self) -> bytes:
        """The three IDs as they stand in the key: ``<gid>/<uid>/<pid>``."""
        return b"%b/%b/%b" % self[:3]

    def readers(self, peer: PeerCredentials) -> list[bytes]:
        """For a pattern of this peer's: the `ids` of all keys whose secrets it is to get.

        An empty field stands for an empty field or for the subscriber's own ID.
        """
        own = (b"%d" % peer.gid, b"%d" % peer.uid, b"%d" % peer.pid)
        gids, uids, pids = ((f,) if f else (b"", mine) for f, mine in zip(self[:3], own, strict=True))
        return [b"%b/%b/%b" % (g, u, p) for g in gids for u in uids for p in pids]

    def belongs_to(self, peer: PeerCredentials) -> bool:
        """Whether every ID that is given is the peer's own."""
        own = (b"%d" % peer.gid, b"%d" % peer.uid, b"%d" % peer.pid)
        return all(not field or field == mine for field, mine in zip(self[:3], own, strict=True))


@dataclass(frozen=True, slots=True)
class Dialect:
    """One revision of the protocol: its separator, and what it reserves.

    :ivar name: what ``--dialect`` calls it.
    :ivar separator: the byte between two segments of a key.
    :ivar control: whether there are control messages (``CMSG``) and secret keys.
    """

    name: str
    separator: bytes
    control: bool

    def check(self, key: bytes) -> SecretKey | None:
        """Check a key or a pattern that a peer publishes or subscribes to.

        :returns: its parts if it is secret, else None.
        :raises Violation: if it uses ``!`` in a way that is reserved.
        """
        if b"!" not in key:
            return None
        if not self.control:
            if key.startswith(b"!"):
                raise Violation(ViolationReason.RESERVED_KEY)
            return None
        return _check_reserved(key)

    def is_secret(self, key: bytes) -> bool:
        """Whether the key is reserved, so that no open pattern may reach it (rule 5)."""
        return self.control and (key == b"!" or key.startswith(b"!/"))

    def shown(self, key: bytes) -> str:
        """A key for people to read in a log: escaped, cut to a length, and a secret one cut after ``<pid>``."""
        if self.is_secret(key) and (match := _CREDENTIALS.match(key)):
            key = match[0] + (b"..." if match.end() < len(key) else b"")
        text = key[:200].decode("ascii", "backslashreplace")
        escaped = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
        return escaped + ("..." if len(key) > 200 else "")


CURRENT = Dialect("current", b"/", control=True)
EARLY = Dialect("early", b".", control=False)


def _check_reserved(key: bytes) -> SecretKey | None:
    """Rule 8: a segment ``!`` stands only where complete credentials begin, at the start or in ``<rest>``."""
    secret = None
    bang = _BANG.search(key)
    while bang:
        start = bang.start()
        credentials = _CREDENTIALS.match(key, start)
        if not credentials or (start and not secret):
            raise Violation(ViolationReason.RESERVED_KEY)
        for field in credentials.groups():
            if not _ID.fullmatch(field) or (field and int(field) > _LARGEST_ID):
                raise Violation(ViolationReason.BAD_ID)
        if not start:
            gid, uid, pid = credentials.groups()
            secret = SecretKey(gid, uid, pid, key[credentials.end() :])
        bang = _BANG.search(key, credentials.end())
    return secret


def matches_open(pattern: bytes, key: bytes, separator: bytes = b"/") -> bool:
    """Rules 1 to 4, on text alone: does the pattern match the key if nothing in it is reserved?"""
    if not pattern:
        return True
    stars = b"*"
    parts = pattern.split(separator)
    segments = key.split(separator)
    below = not parts[-1]
    if below:
        parts.pop()
        if len(segments) <= len(parts):
            return False
    elif len(segments) != len(parts):
        return False
    for part, segment in zip(parts, segments, strict=False):
        literal, star, rest = part.partition(stars)
        if not star:
            if segment != part:
                return False
        elif rest.strip(stars) or not segment.startswith(literal):
            return False
    return True


def matches(pattern: bytes, key: bytes, dialect: Dialect = CURRENT, subscriber: PeerCredentials | None = None) -> bool:
    """Whether a subscriber with this pattern gets a message with this key: all rules, the plain reference.

    :param subscriber: who subscribes; without one, nobody, who can have no secrets.
    :raises Violation: if the pattern or the key is one that no peer may use.
    """
    wanted = dialect.check(pattern)
    secret = dialect.check(key)
    if not secret:
        return not wanted and matches_open(pattern, key, dialect.separator)
    if not wanted or not subscriber or not wanted.belongs_to(subscriber):
        return False
    return secret.ids in wanted.readers(subscriber) and matches_open(wanted.rest, secret.rest, dialect.separator)
