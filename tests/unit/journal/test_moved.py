"""A journal that is moved away while it is written or read: nothing is written elsewhere, and no row counts as lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sbus.errors import JournalMissing
from sbus.journal.place import JournalMoved
from sbus.journal.reader import JournalReader, read
from tests.support.journals import NewJournal, messages

ROWS = [(b"a/b", b"%d" % n) for n in range(10)]


def test_nothing_is_written_into_another_directory(new_journal: NewJournal, tmp_path: Path) -> None:
    """Neither a sync nor a new segment succeeds while another directory has the place; back in it, both do."""
    journal = new_journal(segment_bytes=1000)
    place, away = Path(journal.directory), tmp_path / "away"
    journal.append(ROWS)
    journal.sync()
    os.rename(place, away)
    for made in (False, True):
        if made:
            place.mkdir()
        for operation in (journal.sync, journal.roll, lambda: journal.append([(b"a", bytes(1000))])):
            with pytest.raises(JournalMoved, match="move it back, or make an empty directory there"):
                operation()
    assert not list(place.iterdir())
    place.rmdir()
    os.rename(away, place)
    journal.append(ROWS)
    journal.roll()
    assert messages(place) == ROWS * 2


def test_a_writer_can_follow_its_journal(new_journal: NewJournal, tmp_path: Path) -> None:
    """It goes on where the directory is now, also in the middle of a segment; not if it was removed."""
    journal = new_journal()
    place, away = Path(journal.directory), tmp_path / "away"
    journal.append(ROWS)
    os.rename(place, away)
    assert journal.follow()
    journal.append(ROWS)
    journal.roll()
    assert journal.directory == str(away)
    assert messages(away) == ROWS * 2
    journal.append(ROWS)
    for path in away.glob("*"):
        path.unlink()
    away.rmdir()
    assert not journal.follow()
    with pytest.raises(JournalMoved):
        journal.close()


def test_rows_of_a_journal_that_is_away_do_not_count_as_damaged(new_journal: NewJournal, tmp_path: Path) -> None:
    """A reader that skips damage raises an error, instead of handing out a row in place of all that is away."""
    journal = new_journal()
    journal.append(ROWS)
    journal.roll()
    reader = JournalReader(journal.directory, skip_damaged=True)
    [part] = reader.plan(0, reader.end())
    os.rename(journal.directory, tmp_path / "away")
    with pytest.raises(JournalMissing, match="this is no journal"):
        list(read(part))
    os.rename(tmp_path / "away", journal.directory)
    assert sum(rows.num_rows for rows in read(part)) == 10
