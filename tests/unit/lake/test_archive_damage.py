"""Damaged journals: the archive takes what it can, names the rest, and holds up no other journal."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sbus.cli.main import cli
from sbus.errors import JournalError
from sbus.journal.consumers import consumers
from sbus.journal.following import Follower
from sbus.journal.index import read_index
from sbus.journal.layout import list_segments
from sbus.journal.reader import JournalReader
from sbus.journal.schema import Kind
from sbus.journal.writer import JournalWriter
from sbus.lake.archive import Archive
from sbus.lake.check import check
from sbus.lake.opening import open_table
from tests.support.archived import MIDNIGHT, archived, messages
from tests.support.journals import DAMAGE, FORGED, Clock, NewJournal, damage, forge
from tests.support.waiting import wait_until
from tests.unit.lake.archives import put_away


def test_a_damaged_batch_does_not_stop_the_archive(new_journal: NewJournal, tmp_path: Path) -> None:
    """64 damaged bytes end the job, and cost their batch alone if loss is allowed; a row in the lake counts it."""
    journal = new_journal(clock=Clock(MIDNIGHT))
    for _ in range(3):
        journal.append(messages(10))
    journal.roll()
    (segment,) = list_segments(journal.directory)
    batch = read_index(segment).batches[1]
    with open(segment.path(), "r+b") as file:
        file.seek((batch.start + batch.end) // 2)
        file.write(b"\xa5" * 64)
    lake = tmp_path / "lake"
    with pytest.raises(JournalError, match=r"10 rows from 10.*sbus journal repair"):
        put_away([journal], lake)
    for _ in range(2):
        put_away([journal], lake, fail_on_data_loss=False)
        rows = archived(lake)
        assert [row["seq"] for row in rows] == [*range(11), *range(20, 30)]
        assert [json.loads(row["payload"])["rows"] for row in rows if row["kind"] == "damaged"] == [10]
    assert consumers(journal.directory) == {"archive": 30}


@pytest.mark.parametrize("format_", ["parquet", "delta"])
def test_damaged_rows_are_named(format_: str, new_journal: NewJournal, tmp_path: Path) -> None:
    """Where loss is allowed, the log names the damaged rows, once, and the last line has their number."""
    for name in ("a", "b"):
        with new_journal(name, clock=Clock(MIDNIGHT)) as journal:
            for _ in range(4):
                journal.append(messages(10))
                journal.append_copies(Kind.CLOCK, [b""], [b'{"step": 1}'], [MIDNIGHT])
    (segment,) = list_segments(str(tmp_path / "a"))
    for batch in read_index(segment).batches[2:4]:
        with open(segment.path(), "r+b") as file:
            file.seek(batch.end - 8)
            file.write(b"\xa5" * 8)
    metrics = tmp_path / "metrics"
    arguments = ["archive", f"--journal={tmp_path}/[ab]", f"--lake={tmp_path}/lake", "--once", "--allow-loss"]
    arguments += [f"--format={format_}", f"--metrics-file={metrics}"]
    done = subprocess.run([sys.executable, "-m", "sbus", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    named, last = done.stderr.splitlines()
    assert named == (
        f"the rows 11 to 21 of the journal in {tmp_path}/a are damaged: in the lake, rows of the kind damaged stand "
        "for them"
    )
    assert last.startswith("archived 79 rows in 1 batch, ")
    assert last.endswith(" rows/s), 11 rows lost")
    lake = re.escape(str(tmp_path / "lake"))
    assert re.search(rf'^sbus_archive_lost_rows_total\{{lake="{lake}"\}} 11.0$', metrics.read_text(), re.M)
    done = subprocess.run([sys.executable, "-m", "sbus", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert re.fullmatch(r"archived 0 rows in 0 batches, \d+ s \(0 rows/s\)\n", done.stderr)


@pytest.mark.parametrize("what", [*DAMAGE, *FORGED])
def test_damaged_journals_do_not_hold_up_the_others(what: str, new_journal: NewJournal, tmp_path: Path) -> None:
    """A damaged journal is archived up to the damage, and from there on once it is whole again; each is reported."""
    names = ("a", "b", "c")
    for name in names:
        journal = new_journal(name, clock=Clock(MIDNIGHT))
        for _ in range(3):
            journal.append(messages(10))
        journal.close()
    shutil.copytree(tmp_path, tmp_path / "copy")
    for name in ("a", "b"):
        (forge if what in FORGED else damage)(tmp_path / name, what)
    lake = tmp_path / "lake"
    arguments = ["archive", f"--journal={tmp_path}/[abc]", f"--lake={lake}", "--once", "--max-rows=12"]
    kept = 10 if what == "rows" or what in FORGED else 0
    for _ in range(2):
        result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
        assert result.exit_code == 1
        assert result.stderr.endswith(
            f"sbus: 2 journals could not be archived beyond damage: {tmp_path}/a, {tmp_path}/b\n"
        )
        assert len(archived(lake)) == 2 * kept + 30
        assert consumers(str(tmp_path / "c")) == {"archive": 30}
    for name in ("a", "b"):
        shutil.copytree(tmp_path / "copy" / name, tmp_path / name, dirs_exist_ok=True)
    result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert sorted((row["journal"], row["seq"]) for row in archived(lake)) == sorted(
        (JournalReader(tmp_path / name).id, seq) for name in names for seq in range(30)
    )


@pytest.mark.parametrize("suffix", ["journal.json", "arrows", "idx"])
def test_a_journal_that_may_not_be_read(
    suffix: str, new_journal: NewJournal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds up no other one, and its rows follow once the user may read it."""
    for name in ("a", "b"):
        with new_journal(name, clock=Clock(MIDNIGHT)) as journal:
            journal.append(messages(10))
    real = os.open

    def fail(name: Any, *args: Any, **how: Any) -> int:
        if str(name).startswith(f"{tmp_path}/a/") and str(name).endswith(suffix):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)
        return real(name, *args, **how)

    lake = tmp_path / "lake"
    arguments = ["archive", f"--journal={tmp_path}/[ab]", f"--lake={lake}", "--once"]
    with monkeypatch.context() as patching:
        patching.setattr("sbus.journal.layout.os.open", fail)
        result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert (result.exit_code, len(archived(lake))) == (1, 10)
    assert result.stderr.endswith(f"sbus: 1 journal could not be archived beyond damage: {tmp_path}/a\n")
    result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert (result.exit_code, len(archived(lake))) == (0, 20)


def test_rows_that_wait_for_a_repair_fill_no_batch(new_journal: NewJournal, tmp_path: Path) -> None:
    """However many they are, the rows of other journals wait for the next batch as ever."""
    for name in ("a", "b"):
        with new_journal(name) as journal:
            for _ in range(3):
                journal.append(messages(10))
    damage(tmp_path / "a")
    follower = Follower([f"{tmp_path}/[ab]"], max_rows=15, max_delay=3600, leaves_damaged=True)
    ends = {JournalReader(tmp_path / name).id: end for name, end in (("a", 10), ("b", 30))}
    follower.next({})
    assert (follower.next(ends), len(follower.damaged)) == (ends, 1)
    with JournalWriter.open(tmp_path / "b") as journal:
        journal.append(messages(1))
    assert follower.next(ends) == ends


def test_a_repaired_journal_fills_a_batch(new_journal: NewJournal, tmp_path: Path) -> None:
    """Where loss is allowed, a journal that can be opened again is no longer damaged: all its rows can be read."""
    for name in ("a", "b"):
        with new_journal(name) as journal:
            for _ in range(3):
                journal.append(messages(10))
    a, b = (JournalReader(tmp_path / name).id for name in ("a", "b"))
    identity = (tmp_path / "a" / "journal.json").read_bytes()
    damage(tmp_path / "a", "journal.json")
    follower = Follower([f"{tmp_path}/[ab]"], max_rows=30, max_delay=3600, fail_on_data_loss=False, leaves_damaged=True)
    assert follower.next({b: 0}) == {b: 30}
    assert [*follower.damaged] == [f"{tmp_path}/a"]
    (tmp_path / "a" / "journal.json").write_bytes(identity)
    assert follower.next({a: 0, b: 30}) == {a: 30, b: 30}
    assert follower.damaged == {}


def test_damage_that_hides_the_size_of_a_batch(
    new_journal: NewJournal, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where loss is allowed, nothing waits for a repair, and no warning says that."""
    with new_journal() as journal:
        journal.append(messages(10))
    (segment,) = list_segments(journal.directory)
    os.unlink(segment.path())
    os.mkdir(segment.path())
    lake = tmp_path / "lake"
    put_away([journal], lake, max_bytes=1000, fail_on_data_loss=False, leaves_damaged=True)
    assert [json.loads(row["payload"])["rows"] for row in archived(lake)] == [10]
    (said,) = caplog.messages
    assert said.startswith("the rows 0 to 9 of the journal in ")


def test_journals_are_missing_beside_one_that_cannot_be_opened(new_journal: NewJournal, tmp_path: Path) -> None:
    """It may be one of those that are missing, but not two of them."""
    ids: dict[str, str] = {}
    for name in ("a", "b", "c"):
        with new_journal(name) as journal:
            ids[name] = journal.id
    follower = Follower([f"{tmp_path}/*"], leaves_damaged=True)
    start = follower.next({})
    os.mkdir(tmp_path / "x")
    (tmp_path / "x" / "journal.json").write_text("{")
    shutil.rmtree(tmp_path / "b")
    assert follower.next(start) == start
    shutil.rmtree(tmp_path / "c")
    with pytest.raises(JournalError) as caught:
        follower.next(start)
    first, second = sorted((ids["b"], ids["c"]))
    assert str(caught.value).startswith(
        f"the journal {first} is missing; it was read up to row 0; "
        f"the journal {second} is missing; it was read up to row 0; "
        "1 of them may be among those that cannot be opened: name its directory as well"
    )


def test_the_log_shows_no_control_characters(new_journal: NewJournal, tmp_path: Path) -> None:
    """It names directories of journals, which other users have named."""
    name = "j\x1b[31m\n"
    new_journal(name).close()
    (tmp_path / name / "consumers").touch()
    arguments = ["archive", f"--journal={tmp_path}/*", f"--lake={tmp_path}/lake", "--once"]
    done = subprocess.run([sys.executable, "-m", "sbus", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    said, _ = done.stderr.splitlines()
    assert said.startswith(f"{tmp_path}/j\\x1b[31m\\x0a: the progress of the consumer 'archive' cannot be written")


def test_an_archive_that_follows_takes_what_was_repaired(
    new_journal: NewJournal, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The damage is logged once, and the archive takes the rows behind it as soon as it is repaired."""
    for name in ("a", "b"):
        with new_journal(name, clock=Clock(MIDNIGHT)) as journal:
            for _ in range(3):
                journal.append(messages(10))
    identity = (tmp_path / "a" / "journal.json").read_bytes()
    with Archive([str(tmp_path / "[ab]")], open_table(str(tmp_path / "lake")), every=0.001, leaves_damaged=True) as job:

        def works(rows: int, *damaged: Path) -> bool:
            job.wait(0.001)
            return (job.rows, job.lag, job.damaged) == (rows, 0, [*map(str, damaged)])

        wait_until(lambda: works(60))
        damage(tmp_path / "a", "journal.json")
        with JournalWriter.open(tmp_path / "b", clock=Clock(MIDNIGHT)) as journal:
            journal.append(messages(10))
        wait_until(lambda: works(70, tmp_path / "a"))
        (tmp_path / "a" / "journal.json").write_bytes(identity)
        with JournalWriter.open(tmp_path / "a", clock=Clock(MIDNIGHT)) as journal:
            journal.append(messages(10))
        wait_until(lambda: works(80))
    (said,) = caplog.messages
    assert said == (
        f"{tmp_path}/a/journal.json: it is damaged (no JSON object): restore it from a copy; "
        "the rows of this journal from there on wait for that"
    )


def test_a_damaged_row_is_one_row_and_no_hole(new_journal: NewJournal, tmp_path: Path) -> None:
    """The archive counts the rows that the lake has; the check finds no row missing where one stands for many."""
    journal, lake = new_journal(clock=Clock(MIDNIGHT)), tmp_path / "lake"
    journal.append(messages(20))
    journal.append_copies(Kind.DAMAGED, [b""], [b'{"rows": 500}'], [MIDNIGHT])
    journal.append(messages(10))
    journal.sync()
    job = put_away([journal], lake)
    assert (job.rows, job.batches, job.lost) == (31, 1, 500)
    assert consumers(journal.directory) == {"archive": 530}
    (*_, found) = check(open_table(str(lake)))
    assert (found.rows, found.problems, found.holes) == (31, [], {})
