"""The section that says who publishes what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sbus.lake.cube import PROGRAM, UNKNOWN
from sbus.report.figures import Publisher, Report
from sbus.report.page.charts import Bar, bar_of
from sbus.report.page.format import amount, number, share
from sbus.syscalls.names import user_name

__all__ = ["publishers"]


class PublisherRow(NamedTuple):
    """A user, its part of the messages, and its busiest prefixes with their messages."""

    name: str
    messages: str
    share: str
    bytes: str
    keys: str
    prefixes: list[tuple[str, str]]
    bar: Bar


@dataclass(frozen=True, slots=True)
class PublisherSection:
    """The users with the most messages.

    :ivar more: the number of other users, in words; empty if there are none.
    """

    rows: list[PublisherRow]
    more: str


def publishers(report: Report) -> PublisherSection | None:
    """Return who publishes what; None if no publisher is known."""
    if not report.publishers:
        return None
    largest = report.publishers[0].messages
    more = report.publisher_count - len(report.publishers)

    def row(found: Publisher) -> PublisherRow:
        return PublisherRow(
            _name(found.uid),
            number(found.messages),
            share(found.messages, report.totals.messages),
            amount(found.bytes),
            number(found.keys),
            [(text, number(n)) for text, n in found.prefixes],
            bar_of(found.messages, largest, "relative to the largest"),
        )

    return PublisherSection([row(found) for found in report.publishers], number(more) if more > 0 else "")


def _name(uid: int) -> str:
    if uid == PROGRAM:
        return "the program around the bus"
    if uid == UNKNOWN:
        return "not known"
    name = user_name(uid)
    return f"{name} ({uid})" if name else str(uid)
