"""Runs: consecutive messages with one route, found in one pass over a batch.

Theory of operation
-------------------

A busy publisher sends many messages in a row to the same receivers. The server reads up to 64 packets with one system
call; handling them one by one would cost a parse, a look-up and a delivery each. `next_run` finds how far the first
message's route extends, and the caller delivers that slice of the list in one step. Its relatives:

================  ====================================================================================================
function          what it does in one pass
================  ====================================================================================================
`next_run`        finds the end of a run, for the server
`next_messages`   the same for the client, which needs the keys and payloads as well
`build_messages`  builds the packets of ``publish_many``, up to the first message that needs a closer look: a key with
                  ``!`` or NUL, a packet that is too long, a wrong type. The caller applies the full set of rules to
                  that one, which raise the right error or build its packet, and calls again.
================  ====================================================================================================

Invariants:

* Two messages belong to one run only if the route cache holds *the same object* for both keys. The cache makes equal
  routes one object (`sbus.routing.cache`), so the comparison is one of two pointers.
* A run consists of well-formed ``MSG`` packets with cached keys. Another verb, a malformed packet, one that came with
  descriptors (it is not exactly ``bytes``) or an unknown key ends it, and the full parser handles that packet. So the
  fast path never reports an error.
* Keys that are judged differently have different routes (`sbus.routing.route`), so a run is judged as a whole.
* The server does not use runs at all while an observer of ``published``, or a credentials plugin whose verdicts hold
  for one message only, has to see each message by itself.

The compiled twin does not copy or hash a key that equals the key before it: it compares the bytes in place. Its objects
contain only ``bytes``, so it takes each message out of the garbage collector's list.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

from sbus.protocol.packets import Split
from sbus.speedups import choose

__all__ = [
    "Tally",
    "build_messages",
    "find_type",
    "newest",
    "next_messages",
    "next_run",
    "shortest",
    "total_size",
    "untracked",
]

S = TypeVar("S")
M = TypeVar("M", bound=tuple[bytes, bytes])


def _next_run(packets: list[bytes], start: int, end: int, routes: Mapping[bytes, S]) -> tuple[S | None, int]:
    """Find the run that begins at `start`.

    :param end: the index after the last packet to look at.
    :param routes: the route cache's table, key to route.
    :returns: the route of the run, and the index after its last packet. The route is None if there is no run: the first
        packet is not a well-formed message, or its key is not in `routes`.
    """
    route: S | None = None
    head = b""
    for at in range(start, end):
        packet = packets[at]
        if type(packet) is not bytes:
            return route, at
        if head:
            if packet.startswith(head):
                continue  # the key of the first packet, as in most runs: one step in place of four
            head = b""  # the keys differ: do not try again
        nul = packet.find(b"\0", 4)
        if nul < 0 or packet[:4] != b"MSG ":
            return route, at
        found = routes.get(packet[4:nul])
        if found is not route or found is None:
            if route is not None or found is None:
                return route, at
            route, head = found, packet[: nul + 1]
    return route, end


def _next_messages(
    packets: list[bytes], start: int, end: int, routes: Mapping[bytes, S], kind: type[M]
) -> tuple[S | None, list[M]]:
    """Find the run that begins at `start`, like `next_run`, and split its messages.

    :param end: the index after the last packet to look at; it may lie beyond the list.
    :param kind: the type of a message: a named tuple of key and payload.
    :returns: the route of the run (None without a run), and its messages.
    """
    route: S | None = None
    messages: list[M] = []
    for at in range(start, min(end, len(packets))):
        packet = packets[at]
        nul = packet.find(b"\0", 4)
        if nul < 0 or packet[:4] != b"MSG ":
            break
        key = packet[4:nul]
        found = routes.get(key)
        if found is None or (route is not None and found is not route):
            break
        route = found
        payload: bytes | memoryview = packet.payload if isinstance(packet, Split) else packet[nul + 1 :]
        messages.append(tuple.__new__(kind, (key, payload)))
    return route, messages


def _build_messages(messages: list[tuple[bytes | str, bytes]], start: int, longest: int) -> list[bytes]:
    """Build the packets for messages, up to the first that needs a closer look.

    That is a message with ``!`` or a NUL in its key, with a packet of more than `longest` bytes, or with anything but
    a tuple of bytes (or str that UTF-8 can encode) and bytes.

    :param messages: (key, payload) each.
    :param start: the index of the first message to build.
    :param longest: the limit for a packet, in bytes.
    """
    packets: list[bytes] = []
    for at in range(start, len(messages)):
        message = messages[at]
        if not isinstance(message, tuple) or len(message) != 2:
            break
        key, payload = message
        if isinstance(key, str):
            try:
                key = key.encode()
            except UnicodeEncodeError:
                break
        if not isinstance(key, bytes) or not isinstance(payload, bytes) or b"!" in key or b"\0" in key:
            break
        if 5 + len(key) + len(payload) > longest:
            break
        packets.append(b"MSG %b\0%b" % (key, payload))
    return packets


def _untracked(packets: list[bytes]) -> list[bytes]:
    """Take a list that waits out of the garbage collector's sight, and return it; the list need not be complete yet.

    A collection of young objects visits each item: with the queues of 1,000 receivers that took 120 ms (row
    ``fan-out``). Packets are in no cycle. This twin cannot do it.
    """
    return packets


def _total_size(packets: list[bytes]) -> int:
    """Return the size of all packets together, in bytes, by their own lengths (`sbus.flood.payloads`)."""
    return sum(map(len, packets))


def _shortest(packets: list[bytes]) -> int:
    """Return the size of the shortest packet, in bytes; there is at least one."""
    return min(map(len, packets))


def _newest(packets: list[bytes]) -> list[bytes]:
    """Return the last message of each key, in the order in which the keys came first.

    :param packets: well-formed ``MSG`` packets.
    """
    return list({packet.partition(b"\0")[0]: packet for packet in packets}.values())


def _find_type(items: list[bytes], kind: type, start: int) -> int:
    """Return the index of the first item from `start` on that has this type, or -1."""
    for at in range(start, len(items)):
        if isinstance(items[at], kind):
            return at
    return -1


_SMALL = 10
"""The binary logarithm of the bytes in a message up to which its size does not matter."""


class _Tally:
    """Counts the messages that were delivered, and their copies.

    It is one step of each delivery, so the compiled twin does it with one call.

    :ivar messages: the messages so far.
    :ivar size: the bytes of their packets.
    :ivar copies: the copies that were meant for a receiver.
    :ivar copied_size: the bytes of these.
    """

    __slots__ = ("copied_size", "copies", "messages", "size")

    def __init__(self) -> None:
        self.messages = self.size = self.copies = self.copied_size = 0

    def add(self, packets: list[bytes], copies: int) -> int:
        """Count a run of messages, each with a number of copies.

        :returns: their size beyond 1 KiB for each message, in KiB: their additional weight over small ones.
        """
        size = sum(map(len, packets))
        self.count(len(packets), size, copies)
        return max(0, size - (len(packets) << _SMALL)) >> _SMALL

    def count(self, messages: int, size: int, copies: int) -> None:
        """Count messages of `size` bytes together, each with a number of copies."""
        self.messages += messages
        self.size += size
        self.copies += messages * copies
        self.copied_size += size * copies


Tally = _Tally
build_messages, next_messages, next_run = _build_messages, _next_messages, _next_run
find_type, newest, shortest, total_size, untracked = _find_type, _newest, _shortest, _total_size, _untracked
if not TYPE_CHECKING:
    build_messages, find_type, newest, next_messages, next_run, shortest, total_size, untracked, Tally = choose(
        "sbus.routing._runs",
        build_messages=_build_messages,
        find_type=_find_type,
        newest=_newest,
        next_messages=_next_messages,
        next_run=_next_run,
        shortest=_shortest,
        total_size=_total_size,
        untracked=_untracked,
        Tally=_Tally,
    )
