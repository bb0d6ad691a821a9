"""Keeps a log small whatever clients do: first lines at once, the rest in sums.

.. rubric:: Theory of operation

A `LogLimiter` stands between loggers and a log. It counts events by user and by kind. A *kind* is a short text, such as
``violations (BAD_ID)``. In each interval of 10 seconds it lets through

* the first event of each kind, and of each kind of a user, at once;
* more of a user's events, up to 0.25 s' worth of the log's rate: 2,500 bytes, or about 17 lines; or, of a kind that
  names a number of first lines, as an audit log does, exactly these;
* at the end one line for each user with the numbers of the other events, by kind.

A budget of bytes pays for all of these (`sbus.daemon.log_budget`). An event for which there is no budget is counted
instead, and a sum for which there is none stays and grows until the next interval. So each event is either in the log
or in a sum, and `stop` writes the rest.

At most 64 users are counted apart, and 40 kinds of each; the rest are *other users* and *other events*. Clients choose
neither: users are UIDs, and kinds come from the code.

====================  =================================================  =============================================
limiter               whose events                                       why
====================  =================================================  =============================================
of a bus              those of its clients                               a program that embeds a bus has a log of its
                      (`sbus.server.ops.log_observer`)                   own
of a bus's process    everything else: tracebacks, warnings, lines of    it lets the lines of the first pass; both
                      Twisted (`sbus.daemon.logs`)                       share one budget
====================  =================================================  =============================================

Rejected: limits for each connection, which a client that reconnects evades; a limit without sums, which hides what
happens.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import ILogObserver, LogEvent, Logger, LogLevel, formatEvent
from zope.interface import implementer

from sbus.daemon.log_budget import LogBudget, Rank

__all__ = ["INTERVAL", "LimitedLogger", "LogLimiter"]

INTERVAL = 10.0
"""Seconds between two sums."""
ALLOWANCE = 0.25
"""Seconds' worth of the rate that one user's lines may take in an interval, first lines and sums aside."""
_SHORTEST = 60
"""Bytes that every line has: an event is not formatted if not even these are left."""
_MAX_USERS = 64
_MAX_KINDS = 40
_MAX_FORMAT = 50
"""Characters of a log format in the kind that is made from it."""
_LOG_FIELDS = ("log_logger", "log_namespace", "log_level", "log_time", "log_system")
_KEPT = (*_LOG_FIELDS, "kind", "uid", "owner", "times", "firsts")
"""The fields of an event whose text is cut."""
_OTHER_USERS = "other users"
_OTHER_KINDS = "other events"
_SERVER = "the server"


@dataclass(slots=True)
class _Entry:
    """The events of one user in this interval.

    :ivar since: the time of the first event that was counted and is in no sum yet.
    :ivar left: bytes of lines that the user may still have.
    :ivar kinds: the kinds of which there is a line in this interval, with the number of lines.
    :ivar counts: the events without a line, by kind.
    :ivar level: the highest level of these.
    """

    since: float
    left: float
    kinds: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    level: LogLevel = LogLevel.debug


class LimitedLogger(Logger):
    """A logger whose events have their own limiter; other limiters let them pass.

    :param limiter: the limiter.
    """

    def __init__(self, namespace: str, limiter: LogLimiter) -> None:
        super().__init__(namespace, observer=limiter)
        self.limiter = limiter


@implementer(ILogObserver)
class LogLimiter:
    """An observer that passes on what its budget allows, and sums up the rest.

    :param clock: for the intervals.
    :param log: the observer that gets the events.
    :param budget: the bytes that the log may grow by.
    :param allowance: seconds' worth of the budget's rate that the lines of one user may take in an interval.
    """

    def __init__(
        self, clock: IReactorTime, log: ILogObserver, budget: LogBudget, *, allowance: float = ALLOWANCE
    ) -> None:
        self._clock = clock
        self._log = log
        self._budget = budget
        self._allowance = allowance * budget.rate
        self._sums = LimitedLogger("sbus.log", self)
        self._users: dict[int | str, _Entry] = {}
        self._kinds: set[str] = set()
        self._began = clock.seconds()
        self._timer: IDelayedCall | None = None

    def wants(self, user: int | str, kind: str, level: LogLevel, number: int = 1, firsts: int = 0) -> bool:
        """Return whether an event may be logged; count it if not, unless it is below the log's level.

        :param user: the UID of the client that caused it, or another name for its cause.
        :param kind: the kind of the event, as a sum is to name it, such as ``clients connected``.
        :param level: a `twisted.logger.LogLevel`.
        :param number: how often the event has happened.
        :param firsts: the lines of this kind in an interval; 0 for one, and more as far as the allowance goes.
        """
        if level < self._budget.level:
            return False
        entry = self._entry(user)
        may = _is_first(entry, kind) or _has_more(entry, kind, firsts)
        if may and self._budget.has(_SHORTEST, self._rank(entry, kind, firsts)):
            return True
        self._count(entry, kind, level, number)
        return False

    def __call__(self, event: LogEvent) -> None:
        """Pass an event on, or count it (`ILogObserver`).

        Its fields ``owner`` (a UID; else ``uid``), ``kind``, ``times`` and ``firsts`` say what it counts as; all are
        optional.
        """
        logger = event.get("log_logger")
        if isinstance(logger, LimitedLogger) and logger.limiter is not self:
            self._log(event)
            return
        kind = event.get("kind") or _kind(event)
        level = event.get("log_level", LogLevel.info)
        user = event["owner"] if "owner" in event else event.get("uid", _SERVER)
        times = event.get("times", 1)
        firsts = event.get("firsts", 0)
        if not self.wants(user, kind, level, times, firsts):
            return
        size = self._budget.size(event)
        if size > self._budget.longest:
            event = self._cut(event)
            size = self._budget.size(event)
        entry = self._entry(user)
        is_first = _is_first(entry, kind)
        is_allowed = is_first or firsts or size <= entry.left
        if not is_allowed:
            entry.left = 0  # else each further event of the interval would be formatted to find that it has no room
        if not is_allowed or not self._budget.take(size, self._rank(entry, kind, firsts)):
            self._count(entry, kind, level, times)
            return
        if not (is_first or firsts):
            entry.left -= size
        if is_first or kind in entry.kinds:
            entry.kinds[kind] = entry.kinds.get(kind, 0) + 1
        if len(self._kinds) < _MAX_KINDS:
            self._kinds.add(kind)
        self._log(event)

    def stop(self) -> None:
        """Write all sums, and stop the timer; the next event begins a new interval."""
        self._write_sums(Rank.SUM)
        unwritten = [entry for entry in self._users.values() if entry.counts]
        self._users.clear()
        if unwritten:
            merged = self._entry(_OTHER_USERS)
            for entry in unwritten:
                for kind, number in entry.counts.items():
                    self._count(merged, kind, entry.level, number)
            merged.since = min(entry.since for entry in unwritten)
            self._write_sums(Rank.LAST)
            self._users.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._new_interval()

    def _entry(self, user: int | str) -> _Entry:
        if self._timer is None and not 0 <= self._clock.seconds() - self._began < INTERVAL:
            self._new_interval()
        entry = self._users.get(user)
        if entry is None:
            if len(self._users) >= _MAX_USERS and user is not _OTHER_USERS:
                return self._entry(_OTHER_USERS)
            entry = self._users[user] = _Entry(self._clock.seconds(), self._allowance)
        return entry

    def _rank(self, entry: _Entry, kind: str, firsts: int) -> Rank:
        # A user can have as many kinds with a number of first lines as a policy has rules: more kinds than that number
        # are ordinary, or they would take what the first lines of others need.
        if not _is_first(entry, kind) or (firsts and len(entry.kinds) >= firsts):
            return Rank.ORDINARY
        return Rank.FIRST_OF_USER if kind in self._kinds or len(self._kinds) >= _MAX_KINDS else Rank.FIRST

    def _count(self, entry: _Entry, kind: str, level: LogLevel, number: int) -> None:
        if not entry.counts:
            entry.since = self._clock.seconds()
            entry.level = level
        if kind not in entry.counts and len(entry.counts) >= _MAX_KINDS:
            kind = _OTHER_KINDS
        entry.counts[kind] = entry.counts.get(kind, 0) + number
        entry.level = max(entry.level, level)
        if self._timer is None:
            self._timer = self._clock.callLater(INTERVAL, self._end_interval)

    def _end_interval(self) -> None:
        self._timer = None
        self._write_sums(Rank.SUM)
        self._new_interval()
        if self._users:
            self._timer = self._clock.callLater(INTERVAL, self._end_interval)

    def _new_interval(self) -> None:
        """Forget which lines there were; keep the events that no sum has reported yet."""
        self._began = self._clock.seconds()
        self._kinds.clear()
        self._users = {user: entry for user, entry in self._users.items() if entry.counts}
        for entry in self._users.values():
            entry.kinds.clear()
            entry.left = self._allowance

    def _write_sums(self, rank: Rank) -> None:
        """Write a line for each user with events that were counted, as far as the budget goes, the worst first."""
        for user, entry in sorted(self._users.items(), key=lambda item: item[1].level, reverse=True):
            if not entry.counts:
                continue
            event = self._sum(user, entry)
            if self._budget.take(self._budget.size(event), rank):
                entry.counts = {}
                self._log(event)

    def _sum(self, user: int | str, entry: _Entry) -> LogEvent:
        seconds = self._clock.seconds() - entry.since
        event = {
            "log_logger": self._sums,
            "log_namespace": self._sums.namespace,
            "log_level": entry.level,
            "log_time": time.time(),
            "log_format": "{user}: {events} in {seconds:.1f} s, which are not logged one by one",
            "user": f"user {user}" if isinstance(user, int) else user,
            "events": _in_words(entry.counts.items(), self._budget.longest // 2),
            "seconds": seconds,
        }
        if isinstance(user, int):
            event["uid"] = user
        return event

    def _cut(self, event: LogEvent) -> LogEvent:
        """Return an event with less text: its beginning, which names it, and the end of a traceback, which has the
        error."""
        text = formatEvent(event)
        if "log_failure" in event:
            text = f"{text}\n{event['log_failure'].getTraceback()}"
        keep = self._budget.longest // 2
        event = {name: event[name] for name in _KEPT if name in event}
        event["log_format"] = "{text}"
        while True:
            event["text"] = f"{text[:keep]} ... {text[-keep:]}" if 2 * keep < len(text) else text
            if keep < 16 or self._budget.size(event) <= self._budget.longest:
                return event
            keep //= 2


def _is_first(entry: _Entry, kind: str) -> bool:
    return kind not in entry.kinds and len(entry.kinds) < _MAX_KINDS


def _has_more(entry: _Entry, kind: str, firsts: int) -> bool:
    """Return whether a user may have a further line of a kind."""
    return entry.kinds.get(kind, firsts) < firsts if firsts else entry.left > 0


def _kind(event: LogEvent) -> str:
    """Return the kind of an event whose logger gave none."""
    kind = f"lines like {str(event.get('log_format'))[:_MAX_FORMAT]!r}"
    failure = event.get("log_failure")
    return kind if failure is None else f"{kind} ({failure.type.__name__:.{_MAX_FORMAT}})"


def _in_words(counts: Iterable[tuple[str, int]], longest: int) -> str:
    """Return counts in words, the largest first, in about `longest` characters; the last word is for all others."""
    words: list[str] = []
    others = 0
    for kind, number in sorted(counts, key=lambda item: -item[1]):
        if kind != _OTHER_KINDS and longest > 0:
            words.append(f"{number:,} {kind}")
            longest -= len(words[-1])
        else:
            others += number
    if others:
        words.append(f"{others:,} {_OTHER_KINDS}")
    return ", ".join(words)
