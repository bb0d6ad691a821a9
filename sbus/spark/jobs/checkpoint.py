"""Spark's checkpoint of a stream: which batches are done, up to where they read, and whether that is on the disk.

Spark writes two small files a batch and never asks the disk to keep them. Before rows are deleted because the archive
has them, what says so must be safe; and files that a power cut has torn must not keep a stream from starting again.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from sbus.journal import disk

__all__ = ["Checkpoint"]

Offsets = dict[str, int]


class Checkpoint:
    """The checkpoint of a stream that reads journals and nothing else.

    :param directory: it, in a file system of this machine's.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._offsets = directory / "offsets"
        self._commits = directory / "commits"
        self._safe = -1

    def done(self) -> int:
        """The number of the last batch that is done; -1 before the first."""
        return max(_numbers(self._commits), default=-1)

    def offsets(self, batch: int) -> Offsets:
        """Up to where a batch reads: for each journal the seq behind the last.

        Nothing for one that is not planned yet, or that Spark has forgotten; it remembers the last hundred.
        """
        lines = _lines(self._offsets / str(batch))
        return dict(lines[-1]) if lines else {}

    def keep(self, batch: int) -> None:
        """Return when it is on the disk for good that this batch is done."""
        for log in (self._offsets, self._commits):
            for number in _numbers(log):
                if self._safe < number <= batch:
                    _sync(log / str(number))
            disk.sync_directory(str(log))
        _sync(self._directory / "metadata")
        disk.sync_directory(str(self._directory))
        self._safe = batch

    def mend(self) -> None:
        """Remove what a power cut has torn: the newest files, up to the last that are whole.

        The batches that these told of are then planned and written anew.
        """
        for log in (self._offsets, self._commits):
            for number in sorted(_numbers(log), reverse=True):
                if _lines(log / str(number)):
                    break
                _remove(log / str(number))
            _remove_checksums(log)
        last = max(_numbers(self._offsets), default=-1)
        for number in _numbers(self._commits):
            if number > last:  # Spark would take it for that of another job which writes here
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
    """The objects in a file of a log; none if it is torn, or not there."""
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
    """Remove those of files that are gone: Spark would take them for another stream's that writes here."""
    for path in log.glob(".*.crc"):
        if not path.with_name(path.name.removeprefix(".").removesuffix(".crc")).exists():
            disk.remove(str(path))


def _sync(path: Path) -> None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # Spark has forgotten it meanwhile
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
