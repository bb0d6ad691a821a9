"""What a report is drawn from: plain figures, bounded in number however much was recorded.

Times are µs since 1970 (UTC), keys are in their text form (`sbus.journal.keytext`), "before" is the span of the
same length that ends where the period begins.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sbus.spark.report.analysis.spans import Span

__all__ = ["Change", "Changes", "Gap", "KeyTraffic", "Report", "Silence", "Sizes", "Totals", "Traffic"]


@dataclass(frozen=True, slots=True)
class Totals:
    """A period's traffic as a whole.

    :ivar recorded: µs of it in which at least one journal was being written.
    """

    messages: int
    bytes: int
    keys: int
    recorded: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """Messages and payload bytes over time, per key prefix.

    :ivar width: µs in a window; the first window begins at or before the period's start.
    :ivar origin: when the first window begins.
    :ivar labels: prefixes, the busiest first; a last one of None stands for all other keys.
    :ivar messages: for each label, the number in each window; `bytes` likewise.
    :ivar before: messages of all keys in each window of the period before, or None if it has none; `bytes_before`
        likewise.
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
    """One key's traffic, and how it spread over the period (about 60 counts)."""

    key: str
    messages: int
    bytes: int
    shape: list[int]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Payload sizes in bytes, of the messages under a label (None: of all)."""

    label: str | None
    messages: int
    mean: float
    p50: int
    p95: int
    p99: int
    largest: int


@dataclass(frozen=True, slots=True)
class Silence:
    """A pause that is far longer than a key's, or a prefix's, usual ones.

    :ivar scope: the key; or a prefix with its final ``/``, of which no key was heard.
    :ivar is_prefix: which of them it is: a key may end with ``/`` too.
    :ivar keys: how many keys fell silent together.
    :ivar end: when it spoke again, or None if it had not at the end.
    :ivar unrecorded: µs of the pause in which nothing was recorded; they are not held against it.
    :ivar interval: its usual time between two messages, µs.
    :ivar longest_before: its longest pause in the period before, µs, or None if it has no such period.
    :ivar activity: messages in each window of the period.
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
    """A time in which messages may have been missed: no silence, but a loss.

    :ivar kind: ``start``, ``reconnect`` or ``full`` as in the journal; ``stop`` if it has not ended; ``end`` if there
        is no row any more, for no reason that is known.
    :ivar ended: for ``start``, how the recording had ended before: ``stop``, ``crash``, or ``new`` if there was none.
    :ivar reason: what the recorder says about it, if anything.
    """

    journal: str
    start: int
    end: int
    kind: str
    ended: str
    reason: str

    @property
    def is_loss(self) -> bool:
        """Whether something was interrupted: not if recording only began."""
        return not (self.kind == "start" and self.ended == "new")


@dataclass(frozen=True, slots=True)
class Change:
    """Messages of a key or prefix (of so many keys), and the rates, per second of recorded time, now and before."""

    scope: str
    keys: int
    messages: int
    before: int
    rate: float
    rate_before: float


@dataclass(frozen=True, slots=True)
class Changes:
    """What is different from the period before; each list is bounded, each count is of all."""

    prefixes: list[Change]
    new: list[Change]
    new_count: int
    vanished: list[Change]
    vanished_count: int
    up: list[Change]
    down: list[Change]


@dataclass(frozen=True, slots=True)
class Report:
    """All that a report shows.

    :ivar pattern: what was looked at, in text form; empty for everything.
    :ivar before: the period before, or None if nothing was recorded then.
    :ivar gaps: of both periods, in order; at most `measure.MAX_GAPS`.
    :ivar histogram: (lower bound, upper bound, number of messages) of payload sizes.
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
    journals: dict[str, Span]
    gaps: list[Gap]
    changes: Changes | None
