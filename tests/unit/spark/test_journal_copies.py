"""A journal that is copied in the documented order is a valid journal at every moment."""

from __future__ import annotations

import shutil
from pathlib import Path

from sbus.journal.reader import JournalReader
from tests.support.journals import rows


def test_a_copy_is_a_journal_after_every_file(new_journal, tmp_path):
    """The copy grows by closed segments until it has all of them; the open one is left out."""
    journal = new_journal(segment_bytes=3000)
    for number in range(20):
        journal.append([(b"k", b"%d %d" % (number, row)) for row in range(30)])
    journal.roll()
    closed = journal.next_seq
    journal.append([(b"open", b"")])
    journal.sync()
    here, there = Path(journal.directory), tmp_path / "copy"
    there.mkdir()
    names = sorted(path.stem for path in here.glob("*-*.json"))
    assert len(names) > 3
    order = ["journal.json", *(name + suffix for name in names for suffix in (".idx", ".json"))]
    order += [f"{name}.arrows" for name in names]
    seen = 0
    for name in order:
        shutil.copy(here / name, there / name)
        end = JournalReader(there).end()
        assert end >= seen
        assert rows(there) == rows(here, 0, end)
        seen = end
    assert seen == closed
