"""Where reading begins and ends, and how far a query is behind."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sbus.errors import JournalError, UsageError
from sbus.journal.reader import JournalReader
from sbus.spark import lag
from sbus.spark.datasource.positions import EARLIEST, LATEST, Positions
from tests.support.journals import NewJournal


@pytest.fixture
def reader(new_journal: NewJournal) -> JournalReader:
    """A journal of ten rows, one a second since 1970."""
    journal = new_journal(clock=lambda: 0)
    for second in range(10):
        journal.append([(b"k", b"")], second * 1_000_000)
    journal.close()
    return JournalReader(journal.directory)


@pytest.mark.parametrize(
    ("text", "row"),
    [
        ("earliest", 0),
        ("Latest", 10),
        ("1970-01-01T00:00:03.5Z", 4),
        ("2100-01-01", 10),
        ("1960-01-01", 0),
        ('{"%s": 7}', 7),
        ('{"%s": 10}', 10),
        ('{"%s": -1}', 10),
        ('{"%s": -2}', 0),
        ('{"%s": "1970-01-01T00:00:02Z"}', 2),
        ('{"%s": "latest"}', 10),
        ("{}", 0),
    ],
)
def test_positions(reader: JournalReader, text: str, row: int) -> None:
    """A position is a row of the journal, from its first to behind its last."""
    assert Positions.parse(text.replace("%s", reader.id), EARLIEST).resolve(reader) == row


def test_a_row_that_is_not_there(reader: JournalReader) -> None:
    """A row past the end is an error with the rows that there are; so is a journal that is not read."""
    with pytest.raises(
        JournalError, match=r"the row 11 .* is not there yet: it has the rows 0 to 9; give a position from"
    ):
        Positions.parse(json.dumps({reader.id: 11}), LATEST).resolve(reader)
    Positions.parse(json.dumps({reader.id: 11}), LATEST).check([reader.id])
    with pytest.raises(UsageError, match=f"there is no journal 'x'; those that are read are {reader.id}"):
        Positions.parse('{"x": 1}', LATEST).check([reader.id])


@pytest.mark.parametrize(
    "text", ["soon", '{"a": 1', '{"a": true}', '{"a": -3}', '{"a": 1.5}', '{"a": "soon"}', '{"a": null}']
)
def test_no_positions(text: str) -> None:
    """Anything else is a ValueError, which becomes an error with the remedy."""
    with pytest.raises(ValueError, match=r"."):
        Positions.parse(text, LATEST)


def test_lag() -> None:
    """The lag is what a report has as the newest offset without what was read, for journals alone."""
    one, two = "a" * 32, "b" * 32
    report: dict[str, Any] = {
        "sources": [
            {"endOffset": json.dumps({one: 5, two: 9}), "latestOffset": json.dumps({one: 8, two: 9, "c" * 32: 4})},
            {"endOffset": {"topic": {"0": 1}}, "latestOffset": {"topic": {"0": 2}}},
            {"endOffset": "17", "latestOffset": None},
        ]
    }
    assert lag(report) == {one: 3, two: 0}
    assert lag(None) == {}
