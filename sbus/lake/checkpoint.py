"""Spark's checkpoint of a stream: read, sync, and repair it after a power cut.

Theory of operation
-------------------

Spark writes two small files for each batch::

    <checkpoint>/offsets/<number>    before the batch runs: the offset that it reads up to
    <checkpoint>/commits/<number>    after the batch has run
    <checkpoint>/metadata            once: the ID of the stream

A batch is *done* when its file in ``commits`` is there. After a crash Spark runs the first batch without such a file
again, up to the same offset. Each file has a checksum beside it, ``.<number>.crc``.

Spark never syncs these files. That is enough for its own purposes, because a batch that is planned again is written
again. It is not enough here, for two reasons:

* The archive lets the recorder delete rows that are done. If a power cut then took back the file in ``commits``, Spark
  would ask for rows that are gone. So `Checkpoint.sync` syncs both files and their directories before the archive
  reports a batch to a journal.
* A power cut can leave a file that is empty or torn, and Spark then refuses to start. `Checkpoint.repair` removes the
  newest files back to the last one that is whole. Their batches are planned again; the lake replaces their files
  (`sbus.lake.plain`). A commit without its offsets, and a checksum without its file, go as well: Spark takes them
  for the work of another stream that writes to the same checkpoint.

Nothing that was reported can be lost in a repair, because it was synced before.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from sbus.journal import disk

__all__ = ["Checkpoint"]

Offsets = dict[str, int]


class Checkpoint:
    """The checkpoint of a stream that reads only journals.

    :param directory: the checkpoint, in a local file system.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._offsets = directory / "offsets"
        self._commits = directory / "commits"
        self._last_synced = -1

    def last_done(self) -> int:
        """Return the number of the last batch that is done; -1 before the first."""
        return max(_numbers(self._commits), default=-1)

    def offsets(self, batch: int) -> Offsets:
        """Return the offset that a batch reads up to.

        For each journal it is the sequence number after the last row.

        The offset is empty for a batch that is not planned yet, or that is older than the hundred that Spark keeps.
        """
        lines = _lines(self._offsets / str(batch))
        return dict(lines[-1]) if lines else {}

    def sync(self, batch: int) -> None:
        """Sync the files of all batches up to this one.

        After that, a power cut cannot undo them.
        """
        for log in (self._offsets, self._commits):
            for number in _numbers(log):
                if self._last_synced < number <= batch:
                    _sync(log / str(number))
            disk.sync_directory(str(log))
        _sync(self._directory / "metadata")
        disk.sync_directory(str(self._directory))
        self._last_synced = batch

    def sync_plan(self, batch: int) -> None:
        """Sync the offset of a batch that is running.

        After that, a power cut cannot make Spark plan it with other rows.
        """
        _sync(self._offsets / str(batch))
        disk.sync_directory(str(self._offsets))

    def repair(self) -> None:
        """Remove the files that a power cut has torn.

        Spark then plans and runs their batches again.
        """
        for log in (self._offsets, self._commits):
            for number in sorted(_numbers(log), reverse=True):
                if _lines(log / str(number)):
                    break
                _remove(log / str(number))
            _remove_checksums(log)
        last = max(_numbers(self._offsets), default=-1)
        for number in _numbers(self._commits):
            if number > last:  # Spark would report a second writer
                _remove(self._commits / str(number))
        metadata = self._directory / "metadata"
        if metadata.exists() and not _objects([metadata.read_text(errors="replace")]):
            _remove(metadata)


def _numbers(log: Path) -> list[int]:
    try:
        return [int(name) for name in os.listdir(log) if name.isdecimal()]
    except FileNotFoundError:
        return []


def _lines(path: Path) -> list[Any]:
    """Return the JSON objects in a file of a log; none if the file is torn or missing."""
    try:
        version, *lines = path.read_text(errors="replace").splitlines() or [""]
    except FileNotFoundError:
        return []
    return _objects(lines) if version.startswith("v") else []


def _objects(lines: list[str]) -> list[Any]:
    try:
        return [json.loads(line) for line in lines]
    except ValueError:
        return []


def _remove(path: Path) -> None:
    disk.remove(str(path))
    disk.remove(str(path.with_name(f".{path.name}.crc")))


def _remove_checksums(log: Path) -> None:
    """Remove checksums without files, which Spark would report as a second writer."""
    for path in log.glob(".*.crc"):
        if not path.with_name(path.name.removeprefix(".").removesuffix(".crc")).exists():
            disk.remove(str(path))


def _sync(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # Spark has removed it in the meantime
        disk.sync_file(path)
