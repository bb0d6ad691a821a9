"""A clock that is set, or was wrong once: later rows have the right times, and retention goes by what really passed."""

from __future__ import annotations

import itertools
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sbus.errors import JournalError
from sbus.journal.clock import DAY, HOUR, SECOND, from_datetime
from sbus.journal.consumers import advance
from sbus.journal.layout import LATEST, list_segments
from sbus.journal.reader import JournalReader
from sbus.journal.retention import retain
from sbus.journal.verify import verify
from sbus.journal.writer import JournalWriter
from tests.support.examples import examples
from tests.support.faults import FaultyDisk
from tests.support.journals import rows

NOON = from_datetime(datetime(2026, 11, 22, 12, tzinfo=UTC))
FUTURE = from_datetime(datetime(2099, 1, 1, tzinfo=UTC))


class Machine:
    """A machine whose clock can be set: `time` is what it shows, `passed` what has really passed, in µs."""

    def __init__(self, time: int = NOON) -> None:
        self.time = time
        self.passed = 0
        self.warnings: list[str] = []

    def wait(self, micros: int) -> None:
        self.time += micros
        self.passed += micros

    def record(self, directory: Path, **how: object) -> JournalWriter:
        return JournalWriter.open(
            directory,
            clock=lambda: self.time,
            elapsed=lambda: self.passed,
            warn=self.warnings.append,
            **how,  # type: ignore[arg-type]
        )


def put(journal: JournalWriter, *times: int) -> None:
    """Append a row with the present time, or with each of the times."""
    journal.append([(b"k", b"")] * max(1, len(times)), list(times) or None)


def seen(directory: Path) -> list[tuple[str, int]]:
    return [(row["kind"], from_datetime(row["time"])) for row in rows(directory)]


def check(directory: Path) -> None:
    assert [problem for found in verify(directory, pytest.fail) for problem in found.problems] == []


class TestTooFar:
    """A clock that shows a time for which the names of segments have no room: no reader would find them."""

    REFUSED = r"the clock shows a time of 100000000\d\d s since 1970, and a journal has room for .* 2286: set the clock"

    def test_at_the_start(self, tmp_path: Path) -> None:
        """No journal is begun."""
        with pytest.raises(JournalError, match=self.REFUSED):
            Machine(LATEST + 1).record(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["lock"]

    @pytest.mark.parametrize("is_set", [False, True], ids=["it gets there", "it is set"])
    def test_while_recording(self, tmp_path: Path, is_set: bool) -> None:
        """The last µs is recorded, and no row after it; the journal stays as it is, and goes on with a clock that is
        right.
        """
        machine = Machine(LATEST - SECOND)
        with machine.record(tmp_path) as journal:
            put(journal)
            machine.wait(SECOND)
            put(journal)
            if is_set:
                machine.time += 61 * SECOND
            else:
                machine.wait(1)
            for _ in range(2):
                with pytest.raises(JournalError, match=self.REFUSED):
                    put(journal)
            machine.time = NOON
            put(journal)
        assert [time for kind, time in seen(tmp_path) if kind == "message"] == [LATEST - SECOND, LATEST, NOON]
        check(tmp_path)

    def test_before_1970(self, tmp_path: Path) -> None:
        """The same at the other end."""
        machine = Machine()
        with machine.record(tmp_path) as journal:
            put(journal)
            with pytest.raises(JournalError, match="a time of -61 s since 1970"):
                put(journal, -61 * SECOND)
        assert seen(tmp_path) == [("message", NOON)]


class TestRows:
    def test_once_in_2099(self, tmp_path: Path) -> None:
        """Rows of a run with the clock far ahead keep its time; those of the next run have the right one."""
        for time in (FUTURE, NOON, NOON + SECOND):
            machine = Machine(time)
            with machine.record(tmp_path) as journal:
                put(journal)
        assert seen(tmp_path) == [
            ("message", FUTURE),
            ("clock", NOON),
            ("message", NOON),
            ("message", NOON + SECOND),
        ]
        assert [segment.epoch for segment in list_segments(str(tmp_path))] == [0, 1, 1]
        details = json.loads(rows(tmp_path)[1]["payload"])
        assert details == {"since": FUTURE, "step": (NOON - FUTURE) / SECOND, "epoch": 1}
        check(tmp_path)

    def test_set_back_while_recording(self, tmp_path: Path) -> None:
        """A step back of more than 60 s begins an epoch with a segment of its own; one of 60 s does not."""
        machine = Machine()
        with machine.record(tmp_path) as journal:
            put(journal)
            machine.time -= 60 * SECOND
            put(journal)
            machine.time -= 60 * SECOND + 1
            put(journal)
            assert [segment.epoch for segment in list_segments(str(tmp_path))] == [0, 1]
        late = NOON - 120 * SECOND - 1
        assert seen(tmp_path) == [
            ("message", NOON),
            ("clock", NOON),
            ("message", NOON),
            ("clock", late),
            ("message", late),
        ]
        assert len([text for text in machine.warnings if "a new epoch begins" in text]) == 1
        check(tmp_path)

    def test_set_forward_while_recording(self, tmp_path: Path) -> None:
        """A machine without a battery starts in 1970, and its clock is set when there is a network."""
        machine = Machine(30 * SECOND)
        with machine.record(tmp_path) as journal:
            put(journal)
            machine.wait(SECOND)
            machine.time = NOON
            put(journal)
            machine.wait(HOUR)
            put(journal)
            assert journal.now() == machine.time
        assert seen(tmp_path) == [
            ("message", 30 * SECOND),
            ("clock", NOON),
            ("message", NOON),
            ("message", NOON + HOUR),
        ]
        check(tmp_path)

    def test_step_within_a_batch(self, tmp_path: Path) -> None:
        """If the clock is set back between two messages of a batch, the earlier ones get the time behind the step."""
        machine = Machine()
        with machine.record(tmp_path) as journal:
            put(journal)
            put(journal, NOON + 5, NOON + 6, NOON - DAY, NOON - DAY + 1)
        behind = NOON - DAY + 1
        assert seen(tmp_path) == [
            ("message", NOON),
            ("clock", behind),
            *[("message", behind)] * 2,
            ("message", behind),
            ("message", behind),
        ]
        check(tmp_path)

    def test_rows_that_waited(self, tmp_path: Path) -> None:
        """Rows that waited for the disk while the clock was set forward belong before the step."""
        machine = Machine()
        with machine.record(tmp_path) as journal:
            put(journal)
            machine.wait(SECOND)
            machine.time += DAY
            put(journal, NOON + SECOND)
            put(journal)
        assert [kind for kind, _ in seen(tmp_path)] == ["message", "message", "clock", "message"]

    def test_slewing(self, tmp_path: Path) -> None:
        """A clock that drifts, as NTP lets it, makes no rows."""
        machine = Machine()
        with machine.record(tmp_path) as journal:
            for _ in range(50):
                machine.wait(SECOND)
                machine.time += SECOND // 10
                put(journal)
        assert {kind for kind, _ in seen(tmp_path)} == {"message"}

    def test_full_disk(self, tmp_path: Path) -> None:
        """A disk that fails at any step of a new epoch doubles no row and no step."""
        for failing in range(40):
            machine, directory = Machine(), tmp_path / f"{failing}"
            with machine.record(directory) as journal:
                put(journal)
                journal.sync()
                machine.time -= DAY
                disk = FaultyDisk()
                disk.fail_from(failing, 1, "pwrite", "open", "ftruncate", "fdatasync")
                with disk():
                    try:
                        put(journal)
                    except OSError:
                        put(journal)
            assert [kind for kind, _ in seen(directory)] == ["message", "clock", "message"]
            check(directory)


class TestLooking:
    def test_since(self, tmp_path: Path) -> None:
        """The first row at or after a time is found across epochs, and no later row is left out by a plan."""
        machine = Machine()
        with machine.record(tmp_path) as journal:
            for time in (NOON, NOON + HOUR, FUTURE, NOON + 2 * HOUR, NOON + 3 * HOUR):
                machine.time = time
                put(journal)
        found = seen(tmp_path)
        reader = JournalReader(tmp_path)
        for moment in (0, NOON, NOON + 1, NOON + 2 * HOUR, NOON + 3 * HOUR + 1, FUTURE, FUTURE + 1):
            expected = next((seq for seq, (_, time) in enumerate(found) if time >= moment), len(found))
            assert reader.seq_at_time(moment) == expected
            parts = reader.plan(0, reader.end(), min_time=moment)
            planned = {seq for part in parts for seq in range(part.start_seq, part.end_seq)}
            assert planned >= {seq for seq, (_, time) in enumerate(found) if time >= moment}


class TestRetention:
    def kept(self, directory: Path, journal: JournalWriter, days: float) -> list[int]:
        advance(directory, "archive", journal.next_seq)
        retain(directory, keep_days=days, clock=journal.now)
        return [segment.first_seq for segment in list_segments(str(directory))]

    def test_once_in_2099(self, tmp_path: Path) -> None:
        """Segments of a run with the clock far ahead are deleted when they are old, not in 73 years."""
        with Machine(FUTURE).record(tmp_path) as journal:
            put(journal)
        machine = Machine()
        with machine.record(tmp_path) as journal:
            put(journal)
            machine.wait(5 * DAY)
            journal.roll()
            put(journal)
            assert self.kept(tmp_path, journal, 6) == [0, 1, 3]
            machine.wait(2 * DAY)
            assert self.kept(tmp_path, journal, 6) == [1, 3]

    def test_ahead_for_a_while(self, tmp_path: Path) -> None:
        """A clock that is ahead deletes nothing early, neither meanwhile nor after it was set right."""
        machine = Machine()
        with machine.record(tmp_path) as journal:
            for _ in range(3):
                put(journal)
                journal.roll()
                machine.wait(DAY)
            machine.time += 73 * 365 * DAY
            # No row shows the step yet.
            assert self.kept(tmp_path, journal, 4) == [0, 1, 2]
            put(journal)
            assert self.kept(tmp_path, journal, 4) == [0, 1, 2, 3]
            machine.wait(SECOND)
            machine.time -= 73 * 365 * DAY
            put(journal)
            assert self.kept(tmp_path, journal, 4) == [0, 1, 2, 3, 5]

    def test_without_a_battery(self, tmp_path: Path) -> None:
        """A machine that starts in 1970 each time counts the days that it ran."""
        day = NOON
        for _ in range(4):
            machine = Machine(10 * SECOND)
            with machine.record(tmp_path) as journal:
                put(journal)
                machine.wait(SECOND)
                machine.time = day
                put(journal)
                machine.wait(DAY // 2)
                journal.roll()
                put(journal)
            day += DAY
        ages = len(list_segments(str(tmp_path)))
        assert len(self.kept(tmp_path, journal, 3)) == ages
        first = self.kept(tmp_path, journal, 1.2)[0]
        assert 0 < first < rows(tmp_path)[-1]["seq"]

    @example([(43_201_737_229, 1_000_001), (43_198_607_413, 0)])  # a small step behind a long pause
    @settings(max_examples=examples(60), deadline=None)
    @given(steps=st.lists(st.tuples(st.integers(0, 3 * DAY), st.integers(-400 * DAY, 400 * DAY)), max_size=8))
    def test_never_early(self, tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int]]) -> None:
        """However the clock is set while it records, no segment is deleted before it is old enough; times fall only
        where an epoch begins.
        """
        directory = tmp_path_factory.mktemp("never") / "journal"
        machine = Machine()
        born: dict[int, int] = {}
        with machine.record(directory) as journal:
            for wait, step in [(0, 0), *steps, (0, 0)]:
                machine.wait(wait)
                machine.time += step if machine.time + step > 0 else 0
                put(journal)
                journal.sync()
                for segment in list_segments(str(directory)):
                    born.setdefault(segment.first_seq, machine.passed)
                journal.roll()
            check(directory)
            for days in (1, 2, 5):
                before = [segment.first_seq for segment in list_segments(str(directory))]
                left = self.kept(directory, journal, days)
                for seq, after in itertools.pairwise(before):
                    if seq not in left:
                        # Steps of up to 60 s stay within an epoch and count as time.
                        assert machine.passed - born[after] > days * DAY - 61 * SECOND * len(steps)
