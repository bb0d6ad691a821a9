"""Subordinate UIDs: the user that a UID of a container belongs to, by ``/etc/subuid`` (subuid(5)).

Theory of operation
-------------------

An unprivileged user with a range of subordinate UIDs can run processes under each of them. Limits by user would grow
with that range, so with ``--subuid-as-owner`` each UID in a range counts as the range's owner. This is accounting
alone: credentials, secret keys and policies see the UID that the kernel reports.

Rules where the file leaves room:

* Where ranges overlap, the line that comes first counts.
* One step: the owner is not looked up again, if that UID itself lies in a range.
* Root and the server's own user are exempt from limits, and containers of theirs are not. A range of theirs counts as
  one separate user, whose UID is the first of the range.
* A line that is not ``owner:first:count``, or that names an unknown user, is skipped with a warning. Blank lines and
  lines that begin with ``#`` are skipped silently.

The file is read at the first question, and again when it has changed. The server looks for a change at most once in
`_LOOK_EVERY` seconds. Connected users keep their identity until their last client has left.
"""

from __future__ import annotations

import heapq
import os
import pwd
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import NamedTuple

from twisted.logger import Logger

from sbus.syscalls.names import is_number

__all__ = ["SUBUID_FILE", "Range", "SubordinateIds", "flatten", "parse"]

SUBUID_FILE = "/etc/subuid"

_LOOK_EVERY = 1.0
"""Seconds between two looks whether the file has changed."""
_MOST_COMPLAINTS = 10
"""Bad lines that are logged one by one."""
_IDS = 1 << 32


class Range(NamedTuple):
    """The UIDs from `first` up to `end`, which is not one of them.

    :ivar owner: the owner's UID.
    :ivar name: the UID of the range if it counts as a separate user.
    """

    first: int
    end: int
    owner: int
    name: int


def parse(lines: Iterable[str], find_user: Callable[[str], int]) -> tuple[list[Range], list[str]]:
    """Parse the lines of ``/etc/subuid``.

    :param find_user: returns the UID of a user name, or raises KeyError.
    :returns: the ranges, and a complaint about each bad line.
    """
    ranges: list[Range] = []
    complaints: list[str] = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        try:
            ranges.append(_range(text, find_user))
        except ValueError as e:
            complaints.append(f"line {number} ({text[:80]!r}): {e}")
    return ranges, complaints


def _range(text: str, find_user: Callable[[str], int]) -> Range:
    owner, *numbers = text.split(":")
    if len(numbers) != 2 or not all(map(is_number, numbers)):
        raise ValueError("write it as owner:first:count")
    first, count = map(int, numbers)
    if not count or first + count > _IDS - 1:
        raise ValueError("the range is empty, or goes past the last UID, 4294967294")
    if is_number(owner):
        if int(owner) > _IDS - 2:
            raise ValueError("the owner is no UID")
        return Range(first, first + count, int(owner), first)
    try:
        return Range(first, first + count, find_user(owner), first)
    except KeyError:
        raise ValueError(f"there is no user {owner!r}") from None


def flatten(ranges: Iterable[Range]) -> list[Range]:
    """Return ranges that do not overlap, sorted; where ranges do, the first one counts."""
    numbered = list(enumerate(ranges))
    edges = sorted({edge for _, each in numbered for edge in (each.first, each.end)})
    coming = sorted(numbered, key=lambda item: item[1].first, reverse=True)
    active: list[tuple[int, Range]] = []
    found: list[Range] = []
    for first, end in pairwise(edges):
        while coming and coming[-1][1].first == first:
            heapq.heappush(active, coming.pop())
        while active and active[0][1].end <= first:
            heapq.heappop(active)
        if active:
            found.append(active[0][1]._replace(first=first, end=end))
    return found


class SubordinateIds:
    """The owners of subordinate UIDs.

    :param path: the file.
    :param clock: seconds of the monotonic clock.
    """

    _log = Logger(namespace="sbus.server")

    def __init__(self, path: str = SUBUID_FILE, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._look_at = float("-inf")
        self._version: object = None
        self._ranges: list[Range] = []
        self._firsts: list[int] = []

    def owner(self, uid: int) -> int:
        """Return the UID that a UID counts as."""
        if self._clock() >= self._look_at:
            self._look_at = self._clock() + _LOOK_EVERY
            self._refresh()
        at = bisect_right(self._firsts, uid) - 1
        exempt = (0, os.geteuid())
        if at < 0 or uid >= self._ranges[at].end or uid in exempt:
            return uid
        found = self._ranges[at]
        return found.name if found.owner in exempt else found.owner

    def _refresh(self) -> None:
        """Read the file if it has changed; after an error the known ranges stay."""
        try:
            status = os.stat(self._path)
            version: object = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        except OSError as e:
            version = e.errno
        if version == self._version:
            return
        self._version = version
        try:
            with open(self._path, encoding="utf-8", errors="surrogateescape") as file:
                ranges, complaints = parse(file, lambda name: pwd.getpwnam(name).pw_uid)
        except OSError as e:
            self._log.warn(
                "{path} cannot be read: {why}: {ranges} ranges of subordinate UIDs are known",
                path=self._path,
                why=e.strerror,
                ranges=len(self._ranges),
            )
            return
        for complaint in complaints[:_MOST_COMPLAINTS]:
            self._log.warn("{path}, {complaint}; the line is skipped", path=self._path, complaint=complaint)
        if len(complaints) > _MOST_COMPLAINTS:
            self._log.warn("{path}: {more} more bad lines", path=self._path, more=len(complaints) - _MOST_COMPLAINTS)
        self._ranges = flatten(ranges)
        self._firsts = [each.first for each in self._ranges]
