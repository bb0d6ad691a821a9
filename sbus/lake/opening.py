"""Choose the table format of a lake."""

from __future__ import annotations

import os
from pathlib import Path

from sbus.distribution import needs
from sbus.errors import LakeError, UsageError
from sbus.lake.place import Place
from sbus.lake.plain import PlainTable
from sbus.lake.state import State
from sbus.lake.table import Table

__all__ = ["DELTA", "FORMATS", "PARQUET", "open_existing", "open_table"]

PARQUET = "parquet"
DELTA = "delta"
FORMATS = (PARQUET, DELTA)


def open_table(location: str, *, format: str | None = None, state: str | os.PathLike[str] | None = None) -> Table:
    """Open a lake, which need not exist yet.

    :param location: a directory, or the URL of a lake in object storage.
    :param format: the format of a new lake; None: the one that the lake has, or ``parquet``; for a URL ``delta``.
    :param state: the directory of the lake's state, for a URL.
    :raises sbus.errors.LakeError: if the lake has another format, or object storage cannot have this one.
    :raises sbus.errors.StorageError: if the lake is gone, and its state is not.
    :raises sbus.errors.UsageError: if the extra of the format is not installed, there is no such format, or the path is
        empty, not UTF-8, or that of a file.
    """
    if format is not None and format not in FORMATS:
        raise UsageError(f"there is no table format {format!r}: choose from {', '.join(FORMATS)}")
    if not location:
        raise UsageError("a lake has no empty name: name its directory, or its URL")
    if "://" not in location:
        location = os.path.abspath(location)
    if any("\udc80" <= c <= "\udcff" for c in location):
        raise UsageError(f"{location}: Arrow cannot open files in a path that is not UTF-8: name another directory")
    if "://" in location:
        if format == PARQUET:
            raise LakeError(
                f"{location}: a lake of plain Parquet is a directory, not a URL, because it needs atomic renames: "
                "mount it on all machines, and give its path, or use --format=delta"
            )
        return _delta(location, state)
    directory = Path(location)
    place = Place(directory)
    place.check_there()
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"{location}: it is no directory: name another one for the lake")
    if state is not None:
        raise UsageError(f"{location}: the state of a lake in a directory is beside it: leave out --state")
    found = State(place).fields().get("format")
    if found is None and (directory / "_delta_log").exists():
        found = DELTA
    if found is not None and format is not None and found != format:
        raise LakeError(f"{location}: this lake has the format {found}, not {format}: leave out --format")
    if (found or format) == DELTA:
        return _delta(str(directory), None)
    return PlainTable(directory)


def _delta(location: str, state: str | os.PathLike[str] | None) -> Table:
    with needs("delta"):
        from sbus.lake.delta import DeltaLake
    return DeltaLake(location, None if state is None else Path(os.path.abspath(state)))


def open_existing(location: str, state: str | os.PathLike[str] | None = None) -> Table:
    """Open a lake that is there, for maintenance.

    :raises sbus.errors.LakeError: if there is none.
    :raises sbus.errors.StorageError: if its rows are gone, and its state is not.
    """
    table = open_table(location, state=state)
    if not table.files():
        if not table.state.directory.exists():
            raise LakeError(f"{table.location}: there is no lake: name the one that sbus archive writes")
        table.state.check_mark()
    return table
