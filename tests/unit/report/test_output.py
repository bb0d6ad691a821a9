"""The file of a report: written as a whole, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from sbus.cli.main import cli
from sbus.cli.report import check_writable, write
from sbus.errors import StorageError
from tests.support.disks import filled, mounted
from tests.support.journals import DAMAGE, Clock, NewJournal, damage


def test_a_report_on_a_full_disk(tmp_path: Path) -> None:
    """The page from before stays, nothing half-written does, and the error says what to do."""
    with mounted(tmp_path / "disk", "64k") as disk:
        page = str(disk / "report.html")
        write(page, "before")
        with filled(disk), pytest.raises(StorageError, match=r"No space left on device: make room there.*--output"):
            write(page, "after" * 10_000)
        assert Path(page).read_text() == "before"
        check_writable(page)
        assert Path(page).read_text() == "before"
        assert os.listdir(disk) == ["report.html"]
        write(page, "after")
        assert Path(page).read_text() == "after"
    with pytest.raises(StorageError, match="No such file or directory: name another"):
        check_writable(str(tmp_path / "none" / "report.html"))


def test_a_title_that_is_not_utf_8(new_journal: NewJournal, tmp_path: Path) -> None:
    """A byte of a title that is not UTF-8 is shown as an escape."""
    with new_journal() as journal:
        journal.append([(b"k", b"v")])
    page = tmp_path / "page.html"
    arguments = [f"--journal={tmp_path / 'journal'}", f"--output={page}", "--title=a\udcff\u200d"]
    result = CliRunner().invoke(cli, ["report", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "<title>a\\xff\u200d" in page.read_text()


def test_the_former_name_says_what_took_its_place(new_journal, tmp_path: Path) -> None:
    """``sbus spark report`` makes the same page for one more release, also with options that were for Spark."""
    journal = new_journal()
    journal.append([(b"a/b", b"")])
    journal.close()
    page = str(tmp_path / "page.html")
    arguments = [f"--journal={tmp_path / 'journal'}", "report", "--last=1h", f"--output={page}", "--master=local[2]"]
    result = CliRunner().invoke(cli, ["spark", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    assert "will be gone in the next release: use sbus report" in result.output
    assert "1 message of 1 key" in result.output
    assert os.path.exists(page)
    result = CliRunner().invoke(cli, ["report", "--lake=x", f"--journal={tmp_path / 'journal'}"])
    assert (result.exit_code, "use either --lake=DIR or --journal=DIR" in result.output) == (2, True)


@pytest.mark.parametrize("what", DAMAGE)
def test_damaged_journals_do_not_cost_the_report(what: str, new_journal: NewJournal, tmp_path: Path) -> None:
    """The page has what can be read of all journals; each damaged one is reported, and the status is 1."""
    for name in ("a", "b", "c"):
        with new_journal(name, clock=Clock(1_700_000_000_000_000)) as journal:
            for number in range(3):
                journal.append([(b"%s/%d" % (name.encode(), number), b"")] * 10)
    for name in ("a", "b"):
        damage(tmp_path / name, what)
    page, metrics = tmp_path / "page.html", tmp_path / "metrics"
    arguments = ["report", f"--journal={tmp_path}/*", f"--output={page}", f"--metrics-file={metrics}"]
    result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert result.exit_code == 1, result.output
    *said, counts, end = result.stderr.splitlines()
    assert [line.startswith(f"sbus: {tmp_path}/{name}/") for line, name in zip(said, "ab", strict=True)] == [True] * 2
    assert all("restore it from a copy" in line for line in said)
    messages = {"rows": 70, "index": 90, "no index": 30, "journal.json": 30}[what]
    assert f"{messages} messages" in counts
    assert end == f"sbus: the report is written, but 2 journals are damaged: {tmp_path}/a, {tmp_path}/b"
    text = page.read_text()
    assert "c/2" in text
    assert ("a part of the journal is damaged" in text) == (what == "rows")
    (success,) = [line for line in metrics.read_text().splitlines() if line.startswith("sbus_job_success{")]
    assert success.endswith("} 0.0")


def test_no_journal_can_be_read(new_journal: NewJournal, tmp_path: Path) -> None:
    """A report on nothing but damage is no report; a page from before stays."""
    with new_journal() as journal:
        journal.append([(b"k", b"")])
        journal.append([(b"k", b"")])
    damage(tmp_path / "journal", "journal.json")
    page = tmp_path / "page.html"
    page.write_text("before")
    result = CliRunner().invoke(cli, ["report", f"--journal={tmp_path}/journal", f"--output={page}"])
    assert (result.exit_code, page.read_text()) == (1, "before")
    assert "journal.json: it is damaged (no JSON object): restore it from a copy\n" in result.stderr
    assert result.stderr.endswith("sbus: none of the journals can be read\n")
