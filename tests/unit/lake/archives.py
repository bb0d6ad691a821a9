"""Runs of the archive to the end of the journals, and faults in between."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from sbus.lake import plain
from sbus.lake.archive import Archive
from sbus.lake.opening import open_table

HOUR = 3_600_000_000


def put_away(journals: Any, lake: Path, **how: Any) -> Archive:
    """Archive the rows that are there now."""
    with Archive([str(getattr(each, "directory", each)) for each in journals], open_table(str(lake)), **how) as job:
        while not job.wait():
            pass
    return job


@contextmanager
def failing(name: str, after: int) -> Iterator[None]:
    """Let a file operation of the lake fail after some that succeed."""
    left, real = [after], getattr(plain, name)

    def run(*args: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.EIO, "the disk is broken")
        real(*args)

    with mock.patch.object(plain, name, run):
        yield
