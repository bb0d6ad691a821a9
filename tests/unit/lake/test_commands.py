"""``sbus lake``: what its commands print, and the status they end with."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from sbus import ownership
from sbus.cli.main import cli
from sbus.journal.writer import JournalWriter
from sbus.lake.plain import PlainTable
from tests.support.disks import filled, mounted
from tests.support.lakes import archive, row, rows_of


def sbus(*arguments: object, status: int = 0) -> str:
    """Run ``sbus lake`` to its end; return its output."""
    done = CliRunner().invoke(cli, ["lake", *map(str, arguments)])
    assert done.exit_code == status, done.output
    return done.output


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    table = PlainTable(tmp_path / "lake")
    for batch in range(3):
        archive(table, batch, [row("one", 10 * batch + n, n // 5) for n in range(10)])
    return tmp_path / "lake"


def test_a_lake_is_listed_compacted_and_pruned(lake):
    """Each command says what it has done; ls has a line for each day; history has what was done."""
    assert json.loads(sbus("ls", "--json", lake)) == {
        "date": "2026-01-31", "hours": 2, "files": 6, "rows": 30, "rows_ahead": 0, "compact_hours": 0,
        "bytes": sum(path.stat().st_size for path in lake.glob("date=*/*/*")),
    }  # fmt: skip
    assert "compacted 2 hours: 6 files into 2, 30 rows" in sbus("compact", lake)
    assert "2026-01-31      2        2      2    30" in sbus("ls", lake)
    assert "no problems" in sbus("check", lake)
    assert sbus("history", lake).count("compact") == 2
    assert json.loads(sbus("history", "--json", lake).splitlines()[0])["what"] == "compact"
    assert "deleted 6 files" in sbus("vacuum", "--older-than=0s", lake)


def test_rows_ahead_of_the_clock_are_marked(lake):
    """A day that is far in the future is marked, and a sentence says why; other days are not."""
    assert "(ahead)" not in sbus("ls", lake)
    archive(PlainTable(lake), 3, [row("one", 30 + n, 24 * 365 * 74) for n in range(2)])
    listed = sbus("ls", lake)
    assert "2100-01-13 (ahead)      1        1      1     2" in listed
    assert "2026-01-31 " in listed
    assert "2 rows ahead of this machine's clock" in listed
    assert json.loads(sbus("ls", "--json", lake).splitlines()[-1])["rows_ahead"] == 2


def test_forget_and_prune(lake):
    """Both report the rows removed and, as compaction does, the files left because their batch is not done."""
    archive(PlainTable(lake), 3, [row("one", 30, 0, "people/jo")], done=False)
    assert "1 file left, because a batch is not done" in sbus("compact", lake)
    assert "1 file left, because a batch is not done" in sbus("forget", "--key=people/", lake, status=1)
    (lake.with_name("lake.sbus") / "checkpoint/commits/3").write_text("v1\n{}\n")
    assert "removed 1 message from 1 hour" in sbus("forget", "--key=people/", lake)
    assert "removed 2 hours with 30 rows" in sbus("prune", "--keep-days=0", lake)


def test_an_age_that_is_no_number(lake):
    """NaN is no age, of which every hour would be older."""
    assert "'nan' is not a number" in sbus("prune", "--keep-days=nan", lake, status=2)
    assert len(rows_of(PlainTable(lake))) == 30


def test_a_path_that_is_not_utf_8(tmp_path):
    """A lake in a directory whose name is not UTF-8 is refused before anything is made there."""
    JournalWriter.open(tmp_path / "journal").close()
    arguments = ["archive", "--once", f"--journal={tmp_path}/journal", f"--lake={tmp_path}/lake\udcff"]
    done = CliRunner().invoke(cli, arguments)
    assert (done.exit_code, "lake\\xff: Arrow cannot open files in a path that is not UTF-8" in done.output) == (
        2,
        True,
    )
    assert os.listdir(tmp_path) == ["journal"]


@pytest.mark.parametrize(("lake", "said"), [("", "a lake has no empty name"), ("{}/file", "/file: it is no directory")])
def test_no_place_for_a_lake(tmp_path, lake, said):
    """An empty name, as of a variable that is not set, is not the directory of the process; a file is no lake."""
    JournalWriter.open(tmp_path / "journal").close()
    (tmp_path / "file").touch()
    lake = lake.format(tmp_path)
    done = CliRunner().invoke(cli, ["archive", "--once", f"--journal={tmp_path}/journal", f"--lake={lake}"])
    assert (done.exit_code, said in done.output) == (2, True)


def test_compaction_on_a_full_disk(tmp_path):
    """It ends with status 1 and the remedy, no row is lost, and with space again it does what is left."""
    with mounted(tmp_path / "disk", "2m") as disk:
        table = PlainTable(disk / "lake")
        for batch in range(3):
            archive(table, batch, [row("one", 10 * batch + n, n // 5) for n in range(10)])
        before = rows_of(table)
        with filled(disk):
            text = sbus("compact", disk / "lake", status=1)
            assert "No space left on device" in text
            assert "no row is lost" in text
            assert "make room there" in text
            assert rows_of(table) == before
        assert "compacted 2 hours: 6 files into 2, 30 rows" in sbus("compact", disk / "lake")
        assert rows_of(table) == before


@pytest.mark.parametrize("command", [("compact",), ("forget", "--key=a/"), ("prune", "--keep-days=1"), ("vacuum",)])
def test_a_user_who_may_not(lake, command, monkeypatch):
    """A command that this user may not run says who may."""

    def refuse(path, *_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(ownership, "open_or_create", refuse)
    text = sbus(*command, lake, status=1)
    assert "maintenance.lock: Permission denied: run this as the owner of the lake, or as root" in text


def test_check_finds_damage(lake):
    """A row that is there twice, one in the wrong hour, one that is missing, and a file that is damaged."""
    assert "30 rows: no problems" in sbus("check", lake)
    table = PlainTable(lake)
    archive(table, 4, [row("one", 3, 1), row("one", 40, 1)])
    (name,) = [file.name for file in table.files() if file.batch == 4]
    (lake / name).rename(lake / "date=2026-01-31/hour=00" / "0000000004.parquet")
    (lake / "date=2026-01-31/hour=01/0000000001.parquet").write_bytes(b"PAR1 damaged PAR1")
    found = json.loads(sbus("check", "--json", lake, status=1))
    problems = "\n".join(found["problems"])
    assert "hour=00/0000000004.parquet: 2 of 2 rows are of another hour" in problems
    assert "hour=01/0000000001.parquet: it cannot be read" in problems
    assert "journal one: rows 3 to 3 are there twice" in problems
    assert found["missing"] == {"one": 5 + 10}


def test_a_damaged_file_holds_up_no_other_hour(lake):
    """Each command names it, and does the rest; what is too old goes, damaged or not."""
    archive(PlainTable(lake), 3, [row("one", 30, 1, key="b")])
    bad = lake / "date=2026-01-31/hour=00/0000000001.parquet"
    bad.write_bytes(b"PAR1 damaged PAR1")
    bad.with_name("foreign.parquet").write_bytes(b"")
    pq.write_table(pa.table({"x": [1]}), bad.with_name("foreign.parquet"))
    foreign = (
        "foreign.parquet: it is no file of a lake (it has no journal, key, kind, payload, seq, time): move it away"
    )
    listed = sbus("ls", lake, status=1)
    assert (f"sbus: {bad}: it cannot be read (" in listed, foreign in listed) == (True, True)
    assert "2026-01-31      2        0      8    26" in listed
    assert f"{bad}: it cannot be read (" in sbus("compact", lake, status=1)
    assert [path.name for path in (lake / "date=2026-01-31/hour=01").iterdir()] != []
    assert len(list((lake / "date=2026-01-31/hour=01").iterdir())) == 1
    assert len(list((lake / "date=2026-01-31/hour=00").iterdir())) == 4
    assert f"{bad}: it cannot be read (" in sbus("forget", "--key=b", lake, status=1)
    assert "b" not in {each["key"] for each in pq.read_table(lake / "date=2026-01-31/hour=01").to_pylist()}
    page = CliRunner().invoke(cli, ["report", f"--lake={lake}", f"--output={lake}.html"])
    assert (page.exit_code, f"sbus: {bad}: it cannot be read (" in page.output) == (1, True)
    assert "removed 2 hours with 25 rows" in sbus("prune", "--keep-days=1", lake)


def test_a_footer_that_is_no_text(lake, monkeypatch):
    """Damage in a footer can look like text that is none: the file is named."""

    def unreadable(*_: object, **__: object) -> None:
        b"\xff".decode()

    monkeypatch.setattr(pq, "ParquetFile", unreadable)
    assert "0000000001.parquet: it cannot be read ('utf-8' codec can't decode" in sbus("check", lake, status=1)


def test_names_and_notes_of_other_users(lake):
    """They show no control characters, and a line without a time is left out."""
    (lake / "date=2026-01-31/hour=00/a\x1b[31m\nb.parquet").write_bytes(b"")
    assert "/a\\x1b[31m\\x0ab.parquet: it cannot be read" in sbus("check", lake, status=1)
    with open(f"{lake}.sbus/history.jsonl", "w") as file:
        for time in (1, "x", 1e30, None):
            file.write(json.dumps({"time": time, "what": "\x1b[31m", "note": "a\nb"}) + "\n")
        file.write("{}\n")
    assert sbus("history", lake) == "1970-01-01T00:00:01.000Z  \\x1b[31m  a\\x0ab\n"


def test_bad_usage(tmp_path, lake):
    """A directory without a lake, and a pattern for everything, are refused with the remedy."""
    assert "there is no lake" in sbus("ls", tmp_path / "nothing", status=1)
    page = tmp_path / "page.html"
    done = CliRunner().invoke(cli, ["report", f"--lake={tmp_path}/nothing", f"--output={page}"])
    assert (done.exit_code, "/nothing: there is no lake" in done.output, page.exists()) == (1, True, False)
    assert "an empty pattern matches every key" in sbus("forget", "--key=", lake, status=2)
    assert "leave out --state" in sbus("ls", "--state=/tmp", lake, status=2)
