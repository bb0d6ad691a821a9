"""The hourly cube: its counts are those of the rows, and are never those of other rows."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from sbus.journal.clock import from_datetime
from sbus.journal.digests import Digest
from sbus.lake.cube import clean, update
from sbus.lake.maintenance import by_hour, compact, forget
from sbus.lake.plain import PlainTable
from sbus.lake.table import Hour
from tests.support.lakes import archive, row, rows_of


@pytest.fixture
def lake(tmp_path: Path) -> PlainTable:
    table = PlainTable(tmp_path / "lake")
    for batch in range(4):
        rows = [row(j, 100 * batch + n, n // 50, f"k/{n % 3}", b"x" * (n * 7)) for j in ("a", "b") for n in range(100)]
        gap = ("a", 100 * batch + 50, *row("a", 100 * batch + 50, 1)[2:3], "reconnect", "", b"{}")
        archive(table, batch, [each for each in rows if each[:2] != gap[:2]] + [gap])
    return table


def hours(table):
    return dict(by_hour(table.files()))


def test_counts_are_those_of_the_rows(lake):
    """Messages, bytes and times agree with the rows; sizes are exact up to 63, and at most 1.6 % too small above."""
    made = update(lake, hours(lake))
    for hour, (counts, _) in made.items():
        messages = [each for each in rows_of(lake) if Hour.of(each[2]) == hour and each[3] == "message"]
        found = pq.read_table(counts).to_pylist()
        n: Counter[tuple[str, str]] = Counter()
        size: Counter[tuple[str, str]] = Counter()
        for each in found:
            n[each["journal"], each["key"]] += each["n"]
            size[each["journal"], each["key"]] += each["bytes"]
        assert n == Counter((each[0], each[4]) for each in messages)
        assert size.total() == sum(len(each[5]) for each in messages)
        assert min(each["first"] for each in found) == min(from_datetime(each[2]) for each in messages)
        sizes = {each["size"] for each in found}
        for each in messages:
            assert any(s <= len(each[5]) <= s * 1.032 for s in sizes)
            assert len(each[5]) > 63 or len(each[5]) in sizes


def test_a_digest_counts_as_what_was_sent(tmp_path):
    """A message of which the lake has only a digest counts with its full length, and is kept by no count as a gap."""
    table = PlainTable(tmp_path / "lake")
    digest = (*row("a", 1, 0)[:3], "digest", "a/b", Digest(6_220_800, "ab" * 32).pack())
    archive(table, 0, [row("a", 0, 0), digest, *(row("a", 2 + n, 0) for n in range(20)), row("b", 0, 0)])
    ((counts, kept),) = update(table, hours(table)).values()
    assert pc.sum(pq.read_table(counts)["bytes"]).as_py() == 22 + 6_220_800
    assert pc.sum(pq.read_table(counts)["n"]).as_py() == 23
    assert "digest" not in pq.read_table(kept)["kind"].to_pylist()


def test_gaps_and_their_neighbours_are_kept(lake):
    """Of the rows, a gap, the row before it and the one behind it are kept, and the first and last of each journal."""
    made = update(lake, hours(lake))
    kept = {(each["journal"], each["seq"]) for _, path in made.values() for each in pq.read_table(path).to_pylist()}
    for batch in range(4):
        assert {("a", 100 * batch + at) for at in (50, 51)} <= kept
    assert {("b", 0), ("b", 349), ("b", 50), ("b", 399), ("a", 0), ("a", 399)} <= kept
    assert len(kept) < 30


def test_counts_of_other_files_are_not_used(lake):
    """After compaction the counts are made again, and equal; those of a key that was forgotten are gone."""
    before = {hour: pq.read_table(counts).sort_by("bytes") for hour, (counts, _) in update(lake, hours(lake)).items()}
    stamps = {path: path.stat().st_mtime_ns for path in (lake.state.directory / "cube").iterdir()}
    update(lake, hours(lake))
    assert stamps == {path: path.stat().st_mtime_ns for path in (lake.state.directory / "cube").iterdir()}
    compact(lake)
    assert not list((lake.state.directory / "cube").iterdir())
    after = {hour: pq.read_table(counts).sort_by("bytes") for hour, (counts, _) in update(lake, hours(lake)).items()}
    assert {hour: table.num_rows for hour, table in before.items()} == {h: table.num_rows for h, table in after.items()}
    forget(lake, b"k/1")
    assert not list((lake.state.directory / "cube").iterdir())
    update(lake, hours(lake))
    clean(lake, hours(lake))
    assert len(list((lake.state.directory / "cube").iterdir())) == 4
