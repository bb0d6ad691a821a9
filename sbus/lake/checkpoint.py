"""The checkpoint of an archive, in the form of Spark's streams: read, write, sync and repair it.

Theory of operation
-------------------

Each batch has two small files. Spark writes them for ``sbus spark archive``, and `Checkpoint.plan` and
`Checkpoint.mark` for ``sbus archive``, so that either continues where the other was::

    <checkpoint>/offsets/<number>    before the batch runs: the offset that it reads up to
    <checkpoint>/commits/<number>    after the batch has run
    <checkpoint>/metadata            once: the ID of the stream

A batch is *done* when its file in ``commits`` is there. After a crash the first batch without one runs again, up to the
same offset. Spark puts a checksum beside each of its files, ``.<number>.crc``; a file without one is as good.

Spark never syncs these files, which is not enough here:

* The archive lets the recorder delete rows that are done. If a power cut then took back the file in ``commits``, Spark
  would ask for rows that are gone. So `Checkpoint.sync` syncs both files and their directories before the archive
  reports a batch to a journal.
* After a power cut a file can be empty or torn, and Spark refuses to start. `Checkpoint.repair` removes the newest
  files back to the last whole one. Their batches are planned again, and the lake replaces their files
  (`sbus.lake.plain`). A commit without its offsets, and a checksum without its file, go as well: Spark takes them for
  the work of another stream.

A repair loses nothing that was reported, because that was synced before.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from pathlib import Path
from typing import Any

from sbus.journal import disk
from sbus.journal.following import Offset

__all__ = ["KEPT", "Checkpoint"]

KEPT = 100
"""The batches that Spark keeps, and can go back."""


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

    def done_at(self, batch: int) -> float:
        """Return when a batch was done, in seconds since the epoch; 0 if it is not, or is no longer kept."""
        try:
            return os.stat(self._commits / str(batch)).st_mtime
        except FileNotFoundError:
            return 0.0

    def offsets(self, batch: int) -> Offset:
        """Return the offset that a batch reads up to.

        For each journal it is the sequence number after the last row.

        The offset is empty for a batch that is not planned yet, or that is older than the hundred that Spark keeps.
        """
        lines = _lines(self._offsets / str(batch))
        return dict(lines[-1]) if lines else {}

    def is_planned(self, batch: int) -> bool:
        """Return whether a batch has an offset."""
        return (self._offsets / str(batch)).exists()

    def plan(self, batch: int, offset: Offset, mode: int) -> None:
        """Write the offset that a batch reads up to, and sync it.

        :param mode: the permissions of the file.
        """
        if not (self._directory / "metadata").exists():
            self._write(self._directory / "metadata", json.dumps({"id": str(uuid.uuid4())}), mode)
        now = {"batchWatermarkMs": 0, "batchTimestampMs": time.time_ns() // 1_000_000, "conf": {}}
        self._write(self._offsets / str(batch), f"v1\n{json.dumps(now)}\n{json.dumps(offset)}", mode)

    def mark(self, batch: int, mode: int) -> None:
        """Write that a batch is done, and sync that with all that Spark has left unsynced."""
        self._write(self._commits / str(batch), 'v1\n{"nextBatchWatermarkMs":0}', mode)
        self.sync(batch)
        for log in (self._offsets, self._commits):
            _remove(log / str(batch - KEPT))

    def _write(self, path: Path, text: str, mode: int) -> None:
        disk.remove(str(_checksum(path)))
        disk.replace(str(path), text.encode(), mode)

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
        found = [json.loads(line) for line in lines]
    except ValueError:
        return []
    return found if all(isinstance(each, dict) for each in found) else []


def _checksum(path: Path) -> Path:
    """Return the path of Spark's checksum of a file."""
    return path.with_name(f".{path.name}.crc")


def _remove(path: Path) -> None:
    disk.remove(str(path))
    disk.remove(str(_checksum(path)))


def _remove_checksums(log: Path) -> None:
    """Remove checksums without files, which Spark would report as a second writer."""
    for path in log.glob(".*.crc"):
        if not path.with_name(path.name.removeprefix(".").removesuffix(".crc")).exists():
            disk.remove(str(path))


def _sync(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # Spark has removed it in the meantime
        disk.sync_file(path)
