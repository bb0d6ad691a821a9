"""Publishers in a journal: what is stored, what readers get of it, and what is left after damage."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest

from sbus.journal.index import BATCH, RECORD_SIZE, read_index
from sbus.journal.layout import list_segments
from sbus.journal.lock import locked
from sbus.journal.reader import JournalReader, read
from sbus.journal.repair import repair
from sbus.journal.schema import FORMATS, Kind, decode, encode
from sbus.journal.senders import TYPES, Senders, split
from sbus.journal.verify import verify
from sbus.journal.writer import JournalWriter
from tests.support.journals import Clock, rows

DATA = Path(__file__).parent / "data"
ALICE, BOB, LINKED = b"17 !/cred/100/1000/42", b"18 !/cred/100/1001/43", b"5 !/cred/0/0/7/!/cred/0/0/8/!/cred/1/2/3"


def senders_of(*runs: tuple[bytes | None, int]) -> Senders:
    """Return publishers, each with the number of messages up to its last one."""
    names, ends = zip(*runs, strict=True)
    return Senders(pa.array(names, pa.binary()), pa.array(ends, pa.int32()))


def columns(count: int) -> tuple[pa.Array, pa.Array, list[int], list[int]]:
    values = pa.array([b"%d" % n for n in range(count)], pa.binary())
    return values, values, [0], [count]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (ALICE, (1000, 100, 42, 17, None)),
        (LINKED, (2, 1, 3, 5, "!/cred/0/0/7/!/cred/0/0/8")),
        (b"0 -", (None, None, None, 0, None)),
        (b"1 !/cred/4294967295/4294967295/0", (4294967295, 4294967295, 0, 1, None)),
        (b"", (None,) * len(TYPES)),
        (None, (None,) * len(TYPES)),
        (b"17", (None,) * len(TYPES)),
        (b"17 !/cred/100/1000/42/inbox", (None,) * len(TYPES)),
        (b"17 !/cred/100/99999999999/42", (None,) * len(TYPES)),
        (b"%d !/cred/1/2/3" % 2**63, (None,) * len(TYPES)),
        (b"17 !/cred/100/1000/42\n", (None,) * len(TYPES)),
        (b"17 \xff/!/cred/100/1000/42", (None,) * len(TYPES)),
        (b"17 !/\xff/!/cred/100/1000/42", (None,) * len(TYPES)),
        (b"17 !/cred/0/0/\xd9\xa7/!/cred/100/1000/42", (None,) * len(TYPES)),
    ],
)
def test_words_of_the_bus(name: bytes | None, expected: tuple[object, ...]) -> None:
    """The bus's words are taken apart; what says nothing, or what no column can hold, is unknown."""
    data = encode(Kind.MESSAGE, 0, 0, *columns(2)[:2], senders=senders_of((name, 2)))
    assert [tuple(row[name] for name in TYPES) for row in decode(data, "0" * 32).to_pylist()] == [expected] * 2


def test_runs(tmp_path: Path) -> None:
    """Each row has its publisher, in any part of a batch; gaps have none."""
    with JournalWriter.open(tmp_path, clock=Clock(0)) as journal:
        journal.append_gap(Kind.START, {})
        journal.append_columns(*columns(6), senders_of((None, 1), (ALICE, 3), (BOB, 4), (ALICE, 6)))
        journal.append([(b"k", b"of nobody known")])
        journal.append_lost(b"1 2 3 share")
    expected = [None, None, 42, 42, 43, 42, 42, None, None]
    assert [row["sender_pid"] for row in rows(tmp_path)] == expected
    assert [row["sender_pid"] for row in rows(tmp_path, 3, 6)] == expected[3:6]
    assert [found.problems for found in verify(tmp_path, pytest.fail)] == [[]]


def test_one_publisher_takes_nothing(tmp_path: Path) -> None:
    """A run has the size of a single message of that publisher."""
    one, many = (
        encode(Kind.MESSAGE, 0, 0, *columns(count)[:2], senders=senders_of((ALICE, count))).size
        - encode(Kind.MESSAGE, 0, 0, *columns(count)[:2], format_=FORMATS[3]).size
        for count in (1, 10_000)
    )
    assert one == many < 200


def test_only_those_who_ask_pay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Publishers are taken apart only for readers that ask for them, and then only the columns that they ask for."""
    with JournalWriter.open(tmp_path) as journal:
        journal.append_columns(*columns(3), senders_of((ALICE, 3)))
    asked: list[list[str]] = []

    def noting(stored: pa.RunEndEncodedArray, names: Sequence[str]) -> dict[str, pa.Array]:
        asked.append(list(names))
        return split(stored, names)

    monkeypatch.setattr("sbus.journal.schema.split", noting)
    reader = JournalReader(tmp_path)
    for names in (["seq", "key"], ["sender_uid", "key", "sender_number"]):
        (batch,) = read(reader.plan(0, 3)[0], names)
        assert batch.schema.names == names
    assert asked == [["sender_uid", "sender_number"]]


def test_without_their_record(tmp_path: Path) -> None:
    """A batch whose record in the index is damaged is found, with its publishers."""
    with JournalWriter.open(tmp_path) as journal:
        for _ in range(2):
            journal.append_columns(*columns(3), senders_of((ALICE, 1), (BOB, 3)))
    (segment,) = list_segments(str(tmp_path))
    with open(segment.path(".idx"), "r+b") as file:
        file.seek(RECORD_SIZE)
        file.write(b"\xff" * RECORD_SIZE)
    with locked(tmp_path):
        (found,) = repair(tmp_path)
    assert found.lost == []
    assert [row["sender_pid"] for row in rows(tmp_path)] == [42, 43, 43] * 2


@pytest.mark.parametrize("version", [3, 4])
def test_damage(version: int, tmp_path: Path) -> None:
    """A repair writes the row for what is lost in the format of the segment, so that any program reads it."""
    directory = Path(shutil.copytree(DATA / f"format-{version}", tmp_path / "journal"))
    segment = list_segments(str(directory))[0]
    batch = [record for record in read_index(segment).batches if record.type == BATCH][1]
    with open(segment.path(), "r+b") as file:
        file.seek(batch.end - 40)
        file.write(os.urandom(16))
    with locked(directory):
        (found,) = repair(directory)
    assert [(part.first_seq, part.rows) for part in found.lost] == [(1, 3)]
    table = pa.ipc.open_stream(pa.memory_map(segment.path())).read_all()
    assert table.column("kind").to_pylist() == ["start", "damaged", "reconnect"]
    assert [row["kind"] for row in rows(directory, 0, 5)] == ["start", "damaged", "reconnect"]
    assert [row["sender_uid"] for row in rows(directory, 0, 5)] == [None] * 3
