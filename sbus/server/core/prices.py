"""Prices of what the server does for users, in units of work of about 1 µs (`sbus.server.core.turns`).

A price is for one, unless its text says how many things cost one unit.
"""

from __future__ import annotations

from sbus.syscalls.batch import COMPILED

__all__ = [
    "BUNDLED_COPIES",
    "CONNECTION",
    "COPIED_KIB",
    "COPIES",
    "DECIDED",
    "FULL_SOCKET",
    "LOOK_UP_STEPS",
    "PACKET",
    "POSTPONED",
    "READ",
    "READING",
    "REFUSED",
    "REORDERED",
    "REPLACED",
    "REPLY",
    "SENDING",
    "SHARED",
    "SUBSCRIPTION",
    "UNSHARED",
    "subscription_work",
]

PACKET = 2
"""The price of a packet that is handled by itself."""
READ = 8 if COMPILED else 24
"""The price of a read from one of several sockets that can be read, from a stream socket, or from a peer that sends
bundles. The price of any other read is part of the other prices."""
READING = 0 if COMPILED else 1
"""The price of a packet that is read without the compiled helper: that takes 2 µs, and 1 µs with it."""
COPIES = 2
"""Copies of messages for one unit of work; reading a message counts as one copy."""
BUNDLED_COPIES = 24
"""As `COPIES`, for a client that uses bundles: a copy in a bundle costs 0.03 to 0.06 µs."""
COPIED_KIB = 4
"""KiB of copies for one unit of work, beyond the first KiB of each message; to read them costs one unit each."""
SENDING = 1
"""The price of a system call that sends one receiver's copies of a run."""
FULL_SOCKET = 3
"""The price of deciding about a run of messages for a receiver with a full socket."""
DECIDED = 128
"""Lists that are put into a backlog for one unit of work, where queues share them: they are not copied."""
UNSHARED = 48
"""Messages that wait for one receiver alone and are put into a backlog for one unit of work."""
REPLACED = 1
"""The price of each key of the messages that are put in their places for a receiver of the newest ones only."""
REFUSED = 12
"""The price of finding out that a socket is full."""
CONNECTION = 50
"""The price of a connection that comes and goes."""
SUBSCRIPTION = 15
"""The price of a subscription that comes or goes, before its segments and the routes that it changes."""
_WILDCARD = 20
"""The price of the count of the steps that a pattern with a wildcard can add to a look-up."""
_WILDCARD_SEGMENT = 3
"""The price of each segment of such a pattern: a step is counted for each."""
_FREE_SEGMENTS = 16
"""Segments of other patterns, of which each further one has a price of 1."""
LOOK_UP_STEPS = 4
"""Steps of a look-up, or forgotten routes, for one unit of work."""
POSTPONED = 2
"""Work of having one run wait for one late receiver, or one cohort, of another user; nobody pays it."""
SHARED = 4
"""The price of having one run wait for a cohort of the publisher's own user."""
REORDERED = 2
"""Messages of a backlog whose order is changed, for one unit of work."""
REPLY = 5
"""The price of a reply."""


def subscription_work(pattern: bytes, separator: bytes) -> int:
    """Return the price of a subscription to a pattern that comes or goes, before the routes that it changes."""
    segments = pattern.count(separator)
    work = SUBSCRIPTION + segments // 4 + max(0, segments - _FREE_SEGMENTS)
    if b"*" in pattern:
        work += _WILDCARD + _WILDCARD_SEGMENT * segments
    return work
