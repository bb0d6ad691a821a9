"""A report with fixed figures, made without Spark."""

from __future__ import annotations

from dataclasses import replace

from sbus.journal.clock import HOUR, MINUTE, SECOND
from sbus.report.figures import (
    Change,
    Changes,
    ClockStep,
    Gap,
    KeyTraffic,
    Loss,
    Publisher,
    Recording,
    Report,
    Silence,
    Sizes,
    Totals,
    Traffic,
)
from sbus.report.spans import Span

__all__ = ["HOSTILE", "JOURNAL", "PERIOD", "calm_report", "hostile_report", "lossy_report", "new_report"]

JOURNAL = "ab" * 16
PERIOD = Span(1_772_366_400 * SECOND, 1_772_373_600 * SECOND)
"""2026-03-01, 12:00 to 14:00 UTC."""
HOST = "pump-1"
_WINDOWS = 120
HOSTILE = "</script><img src='x' onerror=\"alert(1)\">{{ 7 * 7 }}{% raw %}{#&amp;/\x1b\u202e--><!--"
"""A key that tries to end what it stands in."""


def new_report() -> Report:
    """Two hours in windows of a minute: one key is steady, one fell silent, and the recording had one gap."""
    steady, stopped = [6] * _WINDOWS, [6] * 90 + [0] * 30
    lengths = (30 * MINUTE, MINUTE, 10 * SECOND, 9 * SECOND)
    silence = Silence(JOURNAL, "plant/stops", False, 1, PERIOD.start + 90 * MINUTE, None, *lengths, stopped)
    gap = Gap(JOURNAL, PERIOD.start + 66 * MINUTE, PERIOD.start + 72 * MINUTE, "reconnect", "", "the queue was full")
    new, gone = Change("office", 1, 36, 0, 0.005, 0), Change("gone/", 2, 0, 90, 0, 0.01)
    up = Change("plant/steady", 1, 720, 240, 0.1, 0.033)
    return Report(
        period=PERIOD,
        pattern="",
        depth=2,
        totals=Totals(1260, 10_080, 2, 2 * HOUR - 6 * MINUTE, 0.184, 1.474),
        before=Totals(960, 7_680, 3, 2 * HOUR, 0.133, 1.067),
        traffic=Traffic(
            MINUTE,
            PERIOD.start,
            ["plant/steady", "plant/stops", None],
            [steady, stopped, [0] * _WINDOWS],
            [[8 * n for n in steady], [8 * n for n in stopped], [0] * _WINDOWS],
            [8] * _WINDOWS,
            [64] * _WINDOWS,
        ),
        top_messages=[
            KeyTraffic("plant/steady", 720, 5760, 0.105, steady[::2]),
            KeyTraffic("plant/stops", 540, 4320, 0.079, [5, 0]),
        ],
        top_bytes=[KeyTraffic("plant/steady", 720, 5760, 0.105, steady[::2])],
        sizes=[Sizes(None, 1260, 8.0, 8, 8, 1000, 1000), Sizes("plant/stops", 540, 8.0, 8, 8, 8, 8)],
        histogram=[(0, 0, 1), (8, 11, 1250), (724, 1023, 9)],
        silences=[silence],
        silence_count=1,
        journals={JOURNAL: Recording(HOST, PERIOD, 2 * HOUR - 6 * MINUTE)},
        gaps=[gap],
        changes=Changes([up], [new], 1, [gone], 2, [up], []),
    )  # fmt: skip


def calm_report() -> Report:
    """A period in which nothing stands out, and without an earlier one."""
    report = replace(new_report(), before=None, changes=None, silences=[], silence_count=0, gaps=[], pattern="plant/")
    return replace(report, journals={JOURNAL: Recording(HOST, PERIOD, 2 * HOUR)})


def lossy_report() -> Report:
    """A calm period in which the bus dropped messages for the recorder, rows were damaged, and the clock was set."""
    at = PERIOD.start + 30 * MINUTE
    return replace(
        calm_report(),
        gaps=[Gap(JOURNAL, at - 1, at, "lost", "", "1,024 (queue-full)")],
        losses=[
            Loss("lost", "queue-full", 1024, 2, 0, at, at + MINUTE),
            Loss("damaged", "", 10, 1, 0, at, at),
            Loss("lost", "discard", 0, 1, 1, at, at),
        ],
        lost_share=1024 / (1024 + 1260),
        steps=[ClockStep(JOURNAL, at, 2 * SECOND), ClockStep(JOURNAL, at + MINUTE, -2 * HOUR)],
    )


def hostile_report() -> Report:
    """The same figures with hostile text wherever a publisher or a recorder chooses it."""
    report = new_report()
    assert report.changes is not None
    change = replace(report.changes.new[0], scope=HOSTILE)
    prefix = replace(change, scope=f"{HOSTILE}/", keys=2)
    return replace(
        report,
        pattern=HOSTILE,
        journals={JOURNAL: replace(report.journals[JOURNAL], host=HOSTILE)},
        traffic=replace(report.traffic, labels=[HOSTILE, f"{HOSTILE}/", None]),
        top_messages=[KeyTraffic(HOSTILE, 1, 1, 1.0, [1])],
        top_bytes=[KeyTraffic(HOSTILE, 1, 1, 1.0, [1])],
        sizes=[report.sizes[0], replace(report.sizes[1], label=HOSTILE)],
        silences=[replace(report.silences[0], scope=HOSTILE)],
        gaps=[replace(report.gaps[0], reason=HOSTILE), replace(report.gaps[0], kind=HOSTILE)],
        changes=Changes([prefix], [change], 1, [prefix], 2, [change], [change]),
        losses=[Loss("lost", HOSTILE, 1, 1, 0, PERIOD.start, PERIOD.start)],
        publishers=[Publisher(65_533, 1, 1, 1, [(HOSTILE, 1), (f"{HOSTILE}/", 1)])],
    )
