"""Rows of journals for a replay: their order, and their times over a clock that is set."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest

from sbus.errors import JournalError
from sbus.journal.clock import SECOND
from sbus.replay import JournalRows, Replay, publish
from tests.support.journals import Clock, NewJournal


class Lists:
    """Stands for a bus: keeps the lists that are published together."""

    def __init__(self) -> None:
        self.chunks: list[list[tuple[bytes, bytes]]] = []

    def publish_many(self, messages: list[tuple[bytes, bytes]]) -> None:
        self.chunks.append(messages)

    def fence(self, timeout: float) -> None:
        """Wait for nothing."""


def replay(rows: JournalRows, **how: Any) -> tuple[Lists, Replay]:
    bus = Lists()
    return bus, publish(rows, rows.total(), bus, speed=None, **how)  # type: ignore[arg-type]


def written(new_journal: NewJournal, step: int, before: int, name: str = "journal") -> None:
    """Write four messages, a second from each other; the clock is set by `step` seconds behind the first `before`."""
    clock, elapsed = Clock(), Clock(0)
    journal = new_journal(name, clock=clock, elapsed=elapsed)
    for number in range(4):
        if number == before:
            clock.time += step * SECOND
        journal.append([(b"%b %d" % (name.encode(), number), b"")])
        clock.time += SECOND
        elapsed.time += SECOND
    journal.close()


@pytest.mark.parametrize(
    ("step", "pauses", "end"),
    [
        *((step, [1, 0, 1], 3 + step) for step in (1_000_000, 3600, -3600)),  # what is between two epochs is unknown
        (30, [1, 1, 1], 33),
        (0, [1, 1, 1], 3),
        (-30, [1, 0, 0], 1),  # until the clock has caught up, rows have the time of the one before
    ],
)
def test_steps_of_the_clock_are_left_out(
    new_journal: NewJournal, tmp_path: Path, step: int, pauses: list[int], end: int
) -> None:
    """Messages keep their order, and their distances as far as they are known, when the clock is set."""
    written(new_journal, step, 2)
    rows = JournalRows([str(tmp_path / "journal")])
    total = rows.total()
    assert total is not None
    found = [(us, key) for us, kind, key, _ in rows() if kind == "message"]
    assert [key for _, key in found] == [b"journal %d" % number for number in range(4)]
    assert [(after[0] - before[0]) / SECOND for before, after in itertools.pairwise(found)] == pauses
    assert found[-1][0] == Clock().time + end * SECOND
    assert total == (4, found[0][0], found[-1][0])


def test_journals_whose_clock_was_set_are_merged(new_journal: NewJournal, tmp_path: Path) -> None:
    """A journal from before the clock was set, and one from after, are one sequence by the last clock."""
    written(new_journal, 3600, 2, "long")
    clock = Clock(Clock().time + 3602 * SECOND + SECOND // 2)
    journal = new_journal("short", clock=clock, elapsed=Clock(0))
    journal.append([(b"short", b"")])
    journal.close()
    bus, done = replay(JournalRows([str(tmp_path / "*")]))
    assert [key for chunk in bus.chunks for key, _ in chunk] == [b"long 0", b"long 1", b"long 2", b"short", b"long 3"]
    assert done.span == 2 * SECOND


def test_large_messages_are_read_a_few_at_a_time(new_journal: NewJournal, tmp_path: Path) -> None:
    """A chunk ends at 16 MiB: a thousand of the longest messages would be 4 GiB."""
    journal = new_journal()
    for _ in range(10):
        journal.append([(b"k", bytes(4 << 20))])
    journal.close()
    bus, done = replay(JournalRows([str(tmp_path / "journal")]))
    assert [len(chunk) for chunk in bus.chunks] == [4, 4, 2]
    assert done.is_complete


def test_a_copy_is_refused(new_journal: NewJournal, tmp_path: Path) -> None:
    """Each message is published once: a pattern that finds a journal and its copy is an error."""
    written(new_journal, 0, 2)
    shutil.copytree(tmp_path / "journal", tmp_path / "copy")
    with pytest.raises(JournalError, match=r"are the same journal .* leave out the copy"):
        JournalRows([str(tmp_path / "*")])
