"""Formats on disk: each one stays readable, older rows are lifted to today's columns, newer formats are refused."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from sbus.errors import JournalError
from sbus.journal import schema
from sbus.journal.clock import to_datetime
from sbus.journal.consumers import consumers
from sbus.journal.digests import payload_lengths
from sbus.journal.index import Record, parse_records
from sbus.journal.layout import list_segments, read_identity
from sbus.journal.reader import JournalReader, Slice, read
from sbus.journal.schema import COLUMN_NAMES, FORMAT, FORMATS, KINDS, Column, Format, Kind
from sbus.journal.senders import TYPES
from sbus.journal.summary import read_summary
from sbus.journal.verify import verify
from sbus.journal.writer import JournalWriter
from tests.support.faults import let_go
from tests.support.journals import messages, rows

DATA = Path(__file__).parent / "data"
ID = "0123456789abcdef0123456789abcdef"
SECOND = 1_769_860_800  # 2026-01-31 12:00 UTC
EXPECTED = [
    (1.0, "start", b"", {"patterns": [""], "socket": "/run/sbus.sock", "version": "1.0", "ended": "new"}),
    (1.5, "message", b"sensors/kitchen/temperature", b"21.5"),
    (1.500001, "message", b"sensors/attic/temperature", b"14.25"),
    (2.0, "message", b"raw/\xff\\key", bytes(range(8))),
    (3.0, "reconnect", b"", {"since": 1_769_860_802_500_000, "reason": "the server closed the connection"}),
    (4.0, "message", "räume/küche".encode(), "warm ☀".encode()),
    (4.0, "message", b"sensors/attic/temperature", b""),
    (5.0, "full", b"", {"since": 1_769_860_804_250_000, "reason": "No space left on device", "lost": 2}),
    (6.0, "stop", b"", {}),
]
"""The rows of the committed journals: seconds after 12:00, kind, key, and payload or details."""
DIGEST = (
    *(5.5, "digest", b"camera/1"),
    {"length": 6_220_800, "sha256": hashlib.sha256(bytes(6_220_800)).hexdigest()},
)
"""The row before the last in formats that have this kind."""
SENDERS = {
    1: (1000, 100, 4242, 17, None),
    2: (1001, 100, 43, 9, "!/cred/0/0/4711"),
    3: (None, None, None, 0, None),
}
"""The publishers in formats that have them, by row; the bus had named none for the second segment."""


def expected(version: int) -> list[tuple[float, str, bytes, object]]:
    return [*EXPECTED[:-1], *[DIGEST] * (version >= 5), EXPECTED[-1]]


def problems_of(directory: Any) -> list[str]:
    problems: list[str] = []
    for verified in verify(directory, problems.append):
        problems += verified.problems
    return problems


@pytest.mark.parametrize("version", sorted(FORMATS))
class TestCommitted:
    """The journals that earlier versions of this package have written; one for each format."""

    def test_rows(self, version: int) -> None:
        """Every row is read with the columns of today and the content that was written."""
        found, written = rows(DATA / f"format-{version}"), expected(version)
        assert [tuple(row) for row in found] == [COLUMN_NAMES] * len(written)
        assert [(row["journal"], row["seq"]) for row in found] == [(ID, seq) for seq in range(len(written))]
        for row, (after, kind, key, content) in zip(found, written, strict=True):
            assert row["time"] == to_datetime(round((SECOND + after) * 1_000_000))
            assert (row["kind"], row["key"]) == (kind, key)
            assert (row["payload"] if kind == "message" else json.loads(row["payload"])) == content
            known = SENDERS if version >= 4 else {}
            assert tuple(row[name] for name in TYPES) == known.get(row["seq"], (None,) * len(TYPES))
            assert row["host"] == "pump-3"

    def test_everything_else(self, version: int) -> None:
        """The identity, summaries, consumers and checksums are those that were written."""
        directory = DATA / f"format-{version}"
        assert read_identity(str(directory))[:2] == (ID, FORMATS[version])
        assert consumers(directory) == {"archive": 5}
        first, second = map(read_summary, JournalReader(directory).segments())
        assert (first.rows, first.kinds) == (5, {"start": 1, "message": 3, "reconnect": 1})
        keys = [b"camera/1"] * (version >= 5)
        assert second.keys == [*keys, "räume/küche".encode(), b"sensors/attic/temperature"]
        assert problems_of(directory) == []

    def test_a_writer_continues(self, version: int, tmp_path: Path) -> None:
        """A writer of today appends to it, and raises the format in ``journal.json`` to its own."""
        directory = tmp_path / "journal"
        shutil.copytree(DATA / f"format-{version}", directory)
        with JournalWriter.open(directory) as journal:
            assert (journal.id, journal.next_seq, journal.ended) == (ID, len(expected(version)), "stop")
            journal.append([(b"new", b"row")])
        assert read_identity(str(directory)).format is FORMATS[FORMAT]
        assert messages(directory)[-2:] == [(b"", b"{}"), (b"new", b"row")]
        assert problems_of(directory) == []


@pytest.mark.parametrize("host", [None, "", 7])
def test_unknown_host(tmp_path: Path, host: object) -> None:
    """A journal whose ``journal.json`` names no host has nulls in that column, also if only that column is read."""
    directory = tmp_path / "journal"
    shutil.copytree(DATA / f"format-{FORMAT}", directory)
    fields = json.loads((directory / "journal.json").read_text())
    (directory / "journal.json").write_text(json.dumps({**fields, "host": host}))
    assert {row["host"] for row in rows(directory)} == {None}
    reader = JournalReader(directory)
    found = [batch for part in reader.plan(0, reader.end()) for batch in read(part, ["host"])]
    assert sum(batch.num_rows for batch in found) == reader.end()


class TestNewer:
    """A journal of a format that does not exist yet."""

    REFUSED = rf"written in format {FORMAT + 1}, but this version of sbus reads formats up to {FORMAT}: install a newer"

    def test_journal(self, tmp_path: Path) -> None:
        """Readers and writers refuse a journal of a newer format, and name the remedy."""
        with JournalWriter.open(tmp_path) as journal:
            journal.append([(b"k", b"")])
        fields = json.loads((tmp_path / "journal.json").read_text())
        (tmp_path / "journal.json").write_text(json.dumps({**fields, "format": FORMAT + 1}))
        for use in (JournalReader, JournalWriter.open):
            with pytest.raises(JournalError, match=self.REFUSED):
                use(tmp_path)

    def test_segment(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A segment of a newer format is refused by itself, whatever ``journal.json`` states."""
        newer = Format(FORMAT + 1, FORMATS[FORMAT].columns, tuple(KINDS))
        monkeypatch.setattr("sbus.journal.segment.header", newer.header)
        with JournalWriter.open(tmp_path) as journal:
            journal.append([(b"k", b"")])
        with pytest.raises(JournalError, match=self.REFUSED):
            rows(tmp_path)

    @pytest.mark.parametrize("version", [None, "1", -1, 1.5])
    def test_no_format(self, version: object, tmp_path: Path) -> None:
        """A format that never existed is damage."""
        JournalWriter.open(tmp_path).close()
        (tmp_path / "journal.json").write_text(json.dumps({"format": version, "id": ID}))
        with pytest.raises(JournalError, match=r"there is no journal format .*: restore it from a copy"):
            JournalReader(tmp_path)


@pytest.mark.parametrize("wrong", [None, 7, "", ID[1:], ID.upper(), f"{ID}\n", f"\x1b{ID[1:]}"])
def test_no_id(wrong: object, tmp_path: Path) -> None:
    """An ID is 32 hexadecimal digits; all else is damage."""
    JournalWriter.open(tmp_path).close()
    (tmp_path / "journal.json").write_text(json.dumps({"format": FORMAT, "id": wrong}))
    with pytest.raises(JournalError, match=r"it has no journal ID: restore it from a copy"):
        JournalReader(tmp_path)


def lift(batch: pa.RecordBatch) -> pa.RecordBatch:
    """From the format of the test to format 1: the column ``body`` is now ``payload``, and ``kind`` is new."""
    kinds = pa.DictionaryArray.from_arrays(pa.array([0] * batch.num_rows, pa.int8()), pa.array(KINDS, pa.utf8()))
    columns = {name: batch.column(name) for name in batch.schema.names}
    payload = columns.pop("body")
    return pa.RecordBatch.from_pydict({**columns, "kind": kinds, "payload": payload})


_FIRST = FORMATS[1].columns
OLD = Format(0, (*_FIRST[:3], _FIRST[4], Column("body", pa.binary(), "")), (), lift)


class TestOlder:
    """A format before the first one: other columns, in another order."""

    @pytest.fixture(autouse=True)
    def _with_an_older_format(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(FORMATS, 0, OLD)

    @pytest.fixture
    def directory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A journal of the older format; its second segment is open, as a crash leaves it."""

        def encode(
            kind: Kind, first_seq: int, times: int, keys: Sequence[bytes], bodies: Sequence[bytes], *unused: None
        ) -> pa.Buffer:
            indices, seqs = pa.array([0] * len(keys), pa.int8()), pa.arange(first_seq, first_seq + len(keys))
            stamps = pa.array([times] * len(keys), _FIRST[2].arrow_type)
            columns = [indices, seqs, stamps, pa.array(keys, pa.binary()), pa.array(bodies, pa.binary())]
            return pa.RecordBatch.from_arrays(columns, schema=OLD.stored_schema).serialize()

        with monkeypatch.context() as patch:
            patch.setattr("sbus.journal.writer.encode", encode)
            patch.setattr("sbus.journal.segment.header", OLD.header)
            journal = JournalWriter.open(tmp_path / "journal", clock=lambda: SECOND * 1_000_000)
            journal.append([(b"a", b"1"), (b"b", b"2")])
            journal.roll()
            journal.append([(b"c", b"3"), (b"d", b"4")])
            journal.sync()
            let_go(journal.directory)
        identity = tmp_path / "journal" / "journal.json"
        identity.write_text(json.dumps({**json.loads(identity.read_text()), "format": 0}))
        return tmp_path / "journal"

    def test_rows(self, directory: Path) -> None:
        """Rows of the older format come with the columns of today."""
        found = rows(directory)
        assert [tuple(row) for row in found] == [COLUMN_NAMES] * 4
        assert [(row["seq"], row["kind"], row["key"], row["payload"]) for row in found] == [
            (seq, "message", bytes([97 + seq]), b"%d" % (1 + seq)) for seq in range(4)
        ]
        assert {row["time"] for row in found} == {to_datetime(SECOND * 1_000_000)}

    def test_schema(self, directory: Path) -> None:
        """A batch of the older format has the very schema of a new one, also if only some columns are read."""
        reader = JournalReader(directory)
        (part, _) = reader.plan(0, 4)
        (batch,) = read(part)
        assert batch.schema.equals(schema.schema(reader.id), check_metadata=True)
        (batch,) = read(part, ["payload", "kind"])
        assert batch.to_pydict() == {"payload": [b"1", b"2"], "kind": ["message"] * 2}

    def test_a_part(self, directory: Path) -> None:
        """A slice that begins within a batch of the older format gives the same rows as of today's."""
        assert messages(directory, 1, 3) == [(b"b", b"2"), (b"c", b"3")]
        assert JournalReader(directory).seq_at_time(SECOND * 1_000_000 + 1) == 4

    def test_a_writer_continues(self, directory: Path) -> None:
        """A writer of today closes the open segment, with its keys, and goes on in today's format."""
        with JournalWriter.open(directory) as journal:
            assert json.loads((directory / "journal.json").read_text())["format"] == FORMAT
            journal.append([(b"e", b"5")])
        assert messages(directory) == [(bytes([97 + seq]), b"%d" % (1 + seq)) for seq in range(5)]
        assert [read_summary(segment).keys for segment in list_segments(str(directory))] == [
            [b"a", b"b"],
            [b"c", b"d"],
            [b"e"],
        ]
        assert problems_of(directory) == []

    def test_another_journal(self, directory: Path) -> None:
        """A segment of the older format is refused in another journal, like one of today's."""
        segment = list_segments(str(directory))[0]
        with pytest.raises(JournalError, match="a segment of another schema or journal"):
            list(read(Slice(segment, "f" * 32, 0, 2)))


def test_a_digest_that_states_no_length() -> None:
    """Rows of other programs can be imported: what is no digest counts with its own bytes."""
    payloads = [
        b'{"length": 7}',
        b"{}",
        b"[]",
        b"?",
        b'{"length": -1}',
        b'{"length": "x"}',
        b"\xff",
        b"[" * 100_000,
        b'{"length": true}',
    ]
    rows = pa.record_batch({"kind": ["digest"] * len(payloads), "payload": pa.array(payloads, pa.binary())})
    assert payload_lengths(rows).to_pylist() == [7, *map(len, payloads[1:])]


@pytest.mark.parametrize(
    "wrong",
    [
        {"start": 9, "end": 8},
        {"rows": 1 << 31},
        {"end": 1 << 40},
        {"start": 1 << 63, "end": (1 << 63) + 100},
        {"first_seq": (1 << 64) - 1},
        {"min_time": -(1 << 62)},
        {"max_time": 1 << 62},
    ],
)
def test_a_record_that_says_what_no_writer_does_is_damaged(wrong: dict[str, Any]) -> None:
    """A checksum does not make a record true: somebody else may have written it, to take memory or to raise errors."""
    record = Record(b"rows", Kind.MESSAGE, 0, 100, 0, 10, 0, 0, 0)
    damaged = record._replace(kind=Kind.DAMAGED, end=0)
    assert parse_records(record.pack() + damaged.pack()) == [record, damaged]
    assert parse_records(record._replace(**wrong).pack()) == [None]
