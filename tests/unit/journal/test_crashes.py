"""Crashes, power cuts and failing disks in any order: synced rows stay, and readers see no row that could be lost."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sbus.journal.reader import JournalReader
from sbus.journal.schema import Kind
from sbus.journal.verify import verify
from sbus.journal.writer import JournalWriter
from tests.support.examples import examples
from tests.support.faults import Crash, FaultyDisk, let_go
from tests.support.journals import Clock, rows

BATCHES = st.lists(
    st.tuples(st.sampled_from([b"", b"a", b"a/b", b"\xff"]), st.binary(max_size=20)), min_size=1, max_size=4
)
STEPS = st.integers(0, 15)

Row = tuple[str, bytes, bytes]


class Crashes(RuleBasedStateMachine):
    """A state machine: a journal on a faulty disk, compared with a plain list of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.mkdtemp(prefix="sbus-journal-")
        self.disk = FaultyDisk()
        self.patch = self.disk()
        self.patch.__enter__()
        self.clock = Clock()
        self.rows: list[Row] = []  # the appended rows
        self.ends = {0}  # the seqs at which batches end
        self.pending: list[Row] = []  # the rows of an append that a crash interrupted
        self.safe = 0  # the number behind the last row that a sync made safe
        self.seen = 0  # the number behind the last row that a reader has read
        self.journal: JournalWriter | None = None

    def teardown(self) -> None:
        self.patch.__exit__(None, None, None)
        let_go(self.directory)
        shutil.rmtree(self.directory)

    @initialize()
    def begin(self) -> None:
        self.open()

    # Actions of a recorder.

    def open(self) -> None:
        self.clock.time += 1_000_000
        self.journal = JournalWriter.open(
            self.directory, clock=self.clock, segment_bytes=4000, segment_seconds=30, warn=lambda text: None
        )
        kept = self.journal.next_seq
        possible = self.rows + self.pending
        assert kept >= max(self.safe, self.seen)
        assert kept in self.ends | {len(possible)}
        self.rows = possible[:kept]
        self.ends = {end for end in self.ends if end <= kept} | {kept}
        self.pending = []
        self.safe = kept
        assert self.read() == self.rows
        self.check()

    def append(self, messages: list[tuple[bytes, bytes]]) -> None:
        self.add([("message", *message) for message in messages], lambda journal: journal.append(messages))

    def append_gap(self) -> None:
        self.add([("reconnect", b"", b"{}")], lambda journal: journal.append_gap(Kind.RECONNECT, {}))

    def add(self, new: list[Row], call: Callable[[JournalWriter], None]) -> None:
        assert self.journal
        self.pending = new
        before = self.journal.next_seq
        try:
            call(self.journal)
        except OSError:
            assert self.journal.next_seq == before
            self.pending = []
            raise
        self.rows += self.pending
        self.pending = []
        self.ends.add(len(self.rows))

    def sync(self) -> None:
        assert self.journal
        self.journal.sync()
        self.promise()

    def roll(self) -> None:
        assert self.journal
        self.journal.roll()
        self.promise()

    def promise(self) -> None:
        assert self.journal
        self.safe = len(self.rows)
        assert self.journal.unsynced_rows == 0
        assert JournalReader(self.directory).end() == self.safe

    def act(self, action: tuple[str, list[tuple[bytes, bytes]]]) -> None:
        name, messages = action
        if self.journal is None:
            self.open()
        elif name == "append":
            self.append(messages)
        else:
            getattr(self, name)()

    actions = st.tuples(st.sampled_from(["append", "append", "append_gap", "sync", "roll"]), BATCHES)

    @rule(action=actions, passed=st.sampled_from([0, 0, 1, 40_000_000]))
    def go_on(self, action: tuple[str, list[tuple[bytes, bytes]]], passed: int) -> None:
        self.clock.time += passed
        self.act(action)

    @rule()
    @precondition(lambda self: self.journal)
    def stop(self) -> None:
        assert self.journal
        self.journal.close()
        self.safe = len(self.rows)
        self.journal = None
        self.check()

    def check(self) -> None:
        """Verify the files: there is no problem."""
        problems: list[str] = []
        for verified in verify(self.directory, problems.append):
            problems += verified.problems
        assert problems == []

    # Accidents.

    @rule(action=actions, at=STEPS, part=st.integers(0, 255), power=st.booleans(), data=st.data())
    def crash(
        self, action: tuple[str, list[tuple[bytes, bytes]]], at: int, part: int, power: bool, data: st.DataObject
    ) -> None:
        """The process dies in the middle of an action or after it; perhaps there is a power cut as well."""
        self.disk.crash_at(at)
        self.disk.part = part
        try:
            self.act(action)
        except Crash:
            pass
        self.disk.work_again()
        let_go(self.directory)
        self.journal = None
        if power:
            self.disk.cut_power(lambda count: data.draw(st.integers(0, count - 1)))

    @rule(
        action=actions,
        at=STEPS,
        count=st.sampled_from([1, 2, 100]),
        part=st.integers(0, 255),
        kinds=st.sampled_from([("pwrite",), ("open",), ("fdatasync", "fsync"), ("ftruncate", "pwrite"), ()]),
    )
    def fail(
        self, action: tuple[str, list[tuple[bytes, bytes]]], at: int, count: int, part: int, kinds: tuple[str, ...]
    ) -> None:
        """The disk fails for some steps; a refused action can be repeated later."""
        self.disk.fail_from(at, count, *kinds)
        self.disk.part = part
        try:
            self.act(action)
        except OSError:
            pass
        self.disk.work_again()

    @invariant()
    def readers(self) -> None:
        """Readers see a prefix of the appended rows, and at least the synced ones."""
        if self.journal is None:
            return
        found = self.read()
        assert found == self.rows[: len(found)]
        assert len(found) >= self.safe
        self.seen = max(self.seen, len(found))

    def read(self) -> list[Row]:
        found = rows(self.directory)
        assert [row["seq"] for row in found] == list(range(len(found)))
        assert all(row["time"] <= after["time"] for row, after in itertools.pairwise(found))
        return [(row["kind"], row["key"], row["payload"]) for row in found]


TestCrashes = Crashes.TestCase
# SBUS_CRASHES=100000 is a soak by hand.
TestCrashes.settings = settings(max_examples=int(os.environ.get("SBUS_CRASHES", examples(60))), stateful_step_count=20)
