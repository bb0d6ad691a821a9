"""The figures of a report: plain data, bounded in size however much was recorded.

Times are in µs since the epoch, keys in their text form (`sbus.journal.keytext`). "Before" is the span of the same
length that ends where the period begins.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sbus.report.spans import Span

__all__ = [
    "Change",
    "Changes",
    "ClockStep",
    "Gap",
    "KeyTraffic",
    "Loss",
    "Publisher",
    "Recording",
    "Report",
    "Silence",
    "Sizes",
    "Totals",
    "Traffic",
]


@dataclass(frozen=True, slots=True)
class Totals:
    """The traffic of a whole period.

    :ivar recorded: µs of the period in which at least one journal was written.
    :ivar rate: messages per second; those of each journal count by its own recorded time. `byte_rate` likewise.
    """

    messages: int
    bytes: int
    keys: int
    recorded: int
    rate: float
    byte_rate: float


@dataclass(frozen=True, slots=True)
class Recording:
    """A journal in the period.

    :ivar host: the host that it was recorded on; empty if that is not known.
    :ivar extent: the time from its first row to its last, in both periods.
    :ivar recorded: µs of the period in which it was written; time in which the bus dropped messages for the recorder
        counts.
    """

    host: str
    extent: Span
    recorded: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """Messages and payload bytes over time, per key prefix.

    :ivar width: the length of a window, in µs.
    :ivar origin: the beginning of the first window, at or before the start of the period.
    :ivar labels: the prefixes, the busiest first; a last label of None stands for all other keys.
    :ivar messages: for each label, the messages in each window; `bytes` likewise.
    :ivar before: the messages of all keys in each window of the period before; None if nothing was recorded then;
        `bytes_before` likewise.
    """

    width: int
    origin: int
    labels: list[str | None]
    messages: list[list[int]]
    bytes: list[list[int]]
    before: list[int] | None
    bytes_before: list[int] | None


@dataclass(frozen=True, slots=True)
class KeyTraffic:
    """The traffic of a key, and its shape over the period in at most 60 counts.

    :ivar rate: messages per second; those of each journal count by its own recorded time.
    """

    key: str
    messages: int
    bytes: int
    rate: float
    shape: list[int]


@dataclass(frozen=True, slots=True)
class Publisher:
    """The messages that a user has published in the period.

    :ivar uid: the user, according to the kernel; `sbus.lake.cube.PROGRAM` and `UNKNOWN` are not users.
    :ivar keys: the number of keys.
    :ivar prefixes: the prefixes with the most of these messages, and how many.
    """

    uid: int
    messages: int
    bytes: int
    keys: int
    prefixes: list[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The payload sizes, in bytes, of the messages under a label (None: of all)."""

    label: str | None
    messages: int
    mean: float
    p50: int
    p95: int
    p99: int
    largest: int


@dataclass(frozen=True, slots=True)
class Silence:
    """A pause that is far longer than the usual pauses of a key or prefix.

    :ivar scope: the key; or a prefix with its final ``/`` under which no key had a message.
    :ivar is_prefix: whether the scope is a prefix; a key can end with ``/``, too.
    :ivar keys: the number of keys that fell silent together.
    :ivar end: the time of the next message; None if there was none in the period.
    :ivar unrecorded: µs of the pause in which nothing was recorded; they do not count.
    :ivar interval: the usual time between two messages, in µs.
    :ivar longest_before: the longest pause in the period before, in µs; None if there is none.
    :ivar activity: the messages in each window of the period.
    """

    journal: str
    scope: str
    is_prefix: bool
    keys: int
    start: int
    end: int | None
    length: int
    unrecorded: int
    interval: int
    longest_before: int | None
    activity: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Gap:
    """A time in which messages may be missing.

    :ivar kind: ``start``, ``reconnect``, ``full`` or ``lost`` as in the journal; ``stop`` if the recorder is
        stopped; ``end`` if no row follows and the reason is unknown.
    :ivar ended: for ``start``, how the recording before it ended: ``stop``, ``crash``, or ``new`` if there was none.
    :ivar reason: the reason that the recorder gives; for ``lost``, the number of messages and the bus's reason; empty
        if there is none.
    """

    journal: str
    start: int
    end: int
    kind: str
    ended: str
    reason: str

    @property
    def is_loss(self) -> bool:
        """Whether the recording was interrupted, and did not only begin."""
        return not (self.kind == "start" and self.ended == "new")

    @property
    def is_interruption(self) -> bool:
        """Whether nothing was recorded for a time, and not only some of the messages."""
        return self.is_loss and self.kind not in ("lost", "damaged")

    @property
    def is_unrecorded(self) -> bool:
        """Whether the time does not count as recorded. Beside messages that the bus dropped, others were recorded."""
        return self.kind != "lost"


@dataclass(frozen=True, slots=True)
class Loss:
    """The losses of the period for one cause, by the rows of the journal that report them.

    :ivar kind: ``lost`` if the bus dropped messages for the recorder, ``damaged`` if recorded rows cannot be read.
    :ivar reason: the bus's reason in its receipts, such as ``queue-full``; empty for ``damaged``.
    :ivar number: the messages, or the rows; those of unknown number are not in it.
    :ivar times: the rows that report it.
    :ivar unknown: how many of these rows do not know a number.
    :ivar first: the time of the first of these rows.
    :ivar last: the time of the last one.
    """

    kind: str
    reason: str
    number: int
    times: int
    unknown: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class ClockStep:
    """The recorder's clock was set: times before and after this one cannot be compared.

    :ivar time: the time of the row that reports it, by the new clock.
    :ivar step: how far it was set, in µs; negative: back; None if the row does not say.
    """

    journal: str
    time: int
    step: int | None


@dataclass(frozen=True, slots=True)
class Change:
    """The messages of a key or prefix in both periods, and their rates.

    Rates are per second of the time in which the journals of the key were written.

    :ivar keys: the number of keys under the prefix; 1 for a key.
    """

    scope: str
    keys: int
    messages: int
    before: int
    rate: float
    rate_before: float


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes against the period before; lists are bounded, counts are complete.

    A key is new or gone only if one of its journals was written in the other period.
    """

    prefixes: list[Change]
    new: list[Change]
    new_count: int
    vanished: list[Change]
    vanished_count: int
    up: list[Change]
    down: list[Change]


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of a report.

    :ivar pattern: the pattern of the messages that count, in text form; empty for all.
    :ivar depth: the number of segments of a prefix.
    :ivar before: the totals of the period before; None if nothing was recorded then.
    :ivar gaps: the gaps of both periods, in order; at most `sbus.report.engine.gaps.MAX_GAPS`.
    :ivar histogram: (lower bound, upper bound, number of messages) of payload sizes, in bytes.
    :ivar journals: each journal, by its ID.
    :ivar losses: the losses of the period, the largest number first; of many causes, these.
    :ivar lost_share: the part of the period's messages, of all keys, that the bus is known to have dropped for the
        recorder.
    :ivar steps: the steps of clocks in the period, in order; of many, the newest.
    :ivar publishers: the users with the most messages, the busiest first; none if no publisher is known.
    :ivar publisher_count: the number of all publishers.
    :ivar ahead: rows that are more than an hour ahead of this machine's clock; the period ends before them unless it
        was named.
    """

    period: Span
    pattern: str
    depth: int
    totals: Totals
    before: Totals | None
    traffic: Traffic
    top_messages: list[KeyTraffic]
    top_bytes: list[KeyTraffic]
    sizes: list[Sizes]
    histogram: list[tuple[int, int, int]]
    silences: list[Silence]
    silence_count: int
    journals: dict[str, Recording]
    gaps: list[Gap]
    changes: Changes | None
    losses: list[Loss] = field(default_factory=list)
    lost_share: float = 0.0
    steps: list[ClockStep] = field(default_factory=list)
    publishers: list[Publisher] = field(default_factory=list)
    publisher_count: int = 0
    ahead: int = 0

    def name_of(self, journal: str) -> str:
        """Return the name of a journal for readers: its host, unless another one has the same, or its ID."""
        host = self.journals[journal].host if journal in self.journals else ""
        if not host:
            return f"journal {journal[:8]}"
        is_alone = sum(other.host == host for other in self.journals.values()) == 1
        return host if is_alone else f"{host} (journal {journal[:8]})"
