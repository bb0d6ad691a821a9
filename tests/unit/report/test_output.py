"""The file of a report: written as a whole, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sbus.cli.report import check_writable, write
from sbus.errors import StorageError
from tests.support.disks import filled, mounted


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
