"""Rows come through every format as they were."""

from __future__ import annotations

import importlib
import tempfile
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbus.interchange.importing import append, new_journal
from sbus.interchange.rows import Selection
from sbus.journal.digests import Digest
from sbus.journal.schema import Kind
from sbus.journal.senders import Senders
from sbus.journal.verify import verify
from sbus.journal.writer import JournalWriter
from tests.support.examples import examples
from tests.support.journals import Clock, rows

FORMATS = ("mcap", "jsonl", "parquet")

keys = st.binary(min_size=1, max_size=12).filter(lambda key: b"\0" not in key) | st.sampled_from(
    [b"a/b", b"\\x41", b"\xff\\", b"!/lost", "ä/ö".encode(), b"*", b" "]
)
payloads = st.binary(max_size=20) | st.sampled_from(
    [
        b"",
        b"21.5",
        b" 1 ",
        b'{"a": 1}',
        b'{"a": NaN}',
        b'"text"',
        b"text",
        b"[]",
        b"null",
        b"\xef\xbb\xbf1",
        b"9" * 5000,
    ]
)
senders = st.sampled_from(
    [b"", b"0 -", b"17 !/cred/100/1000/42", b"9 !/cred/0/0/7/!/cred/100/1001/43", b"18 !/cred/0/0/1"]
)
messages = st.lists(st.tuples(keys, payloads, senders), min_size=1, max_size=6)
details = st.dictionaries(st.text(max_size=3), st.text(max_size=5) | st.integers() | st.none(), max_size=2)
receipts = st.sampled_from([b"3 300 5 queue-full", b"? ? ? reconnect", b"1 2 3 \xff", b"", b"007 1 1 x", b"{}"])
steps = st.integers(-200, 200)
"""Seconds by which the clock is set: more than 60 begin an epoch."""
entries = st.lists(
    st.one_of(
        st.tuples(st.just("message"), messages),
        st.tuples(st.sampled_from(["start", "stop", "reconnect", "full"]), details),
        st.tuples(st.just("lost"), receipts),
        st.tuples(st.just("digest"), keys),
        st.tuples(st.just("clock"), steps),
        st.tuples(st.just("damaged"), st.integers(1, 2**33)),
    ),
    max_size=12,
)


def record(directory: Path, recording) -> None:
    clock, elapsed = Clock(), Clock()
    with JournalWriter.open(directory, clock=clock, elapsed=elapsed, warn=lambda text: None) as journal:
        for kind, what in recording:
            elapsed.time += 1_234_567
            clock.time += 1_234_567
            if kind == "clock":
                clock.time += what * 1_000_000
            elif kind == "message":
                ends = pa.array(range(1, len(what) + 1), pa.int32())
                names = pa.array([name or None for _, _, name in what], pa.binary())
                keys, payloads = (pa.array([message[n] for message in what], pa.binary()) for n in (0, 1))
                journal.append_columns(keys, payloads, [clock.time], [len(what)], Senders(names, ends))
            elif kind == "digest":
                journal.append_digest(what, Digest(70_000, "ab" * 32))
            elif kind == "damaged":
                journal.append_copies(Kind.DAMAGED, [b""], [b'{"rows": %d}' % what], [clock.time])
            elif kind == "lost":
                journal.append_lost(what)
            else:
                journal.append_gap(Kind(kind), what)


def through(format_: str, source: Path, target: Path, **limits) -> None:
    """Export a journal, and import it."""
    module = importlib.import_module(f"sbus.interchange.{format_}")
    chosen = Selection(str(source))
    chosen.limit(**limits)
    path = target.with_suffix(f".{format_}")
    with open(path, "wb") as file:
        written = module.write(file, chosen)
    with new_journal(str(target), "", pytest.fail) as writer:
        assert append(writer, module.read(str(path)), str(path)) == written


def plain(directory: Path) -> list[dict]:
    """Return the rows without what is of their journal alone."""
    found = rows(directory)
    for row in found:
        row.pop("journal")
        row.pop("host", None)
    return found


@given(entries)
@settings(max_examples=examples(40), deadline=None)
def test_every_row_survives(recording):
    """Every key, payload, publisher, gap and step of the clock is the same after each format, and so is its place."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        home = Path(name)
        record(home / "source", recording)
        expected = plain(home / "source")
        for format_ in FORMATS:
            through(format_, home / "source", home / format_)
            assert plain(home / format_) == expected, format_
            problems: list[str] = []
            assert not [one for found in verify(home / format_, problems.append) for one in found.problems]
            assert not problems


@pytest.mark.parametrize("format_", FORMATS)
def test_a_part(format_, tmp_path):
    """Rows of a part are numbered anew; a step of the clock begins an epoch there too."""
    record(tmp_path / "source", [("message", [(b"a", b"1", b"")]), ("clock", -100), ("stop", {}), ("lost", b"1 1 1 x")])
    through(format_, tmp_path / "source", tmp_path / "copy", first=1)
    expected = plain(tmp_path / "source")[1:]
    found = plain(tmp_path / "copy")
    assert [row["kind"] for row in found] == ["clock", "stop", "lost"]
    assert [{**row, "seq": row["seq"] + 1} for row in found] == expected


@pytest.mark.parametrize("format_", FORMATS)
def test_nothing(format_, tmp_path):
    """A journal without rows is exported and imported like others."""
    record(tmp_path / "source", [])
    through(format_, tmp_path / "source", tmp_path / "copy")
    assert plain(tmp_path / "copy") == []
