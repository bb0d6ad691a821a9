"""The interface between a lake and its table format.

Theory of operation
-------------------

A lake is rows in Parquet files, each of one hour (UTC). A *table format* decides which files are the table, and how
that set changes without a reader ever seeing half of a change. `Table` is all that the rest of this package knows of a
format; `sbus.lake.plain` and `sbus.lake.delta` implement it. Archives, maintenance and jobs are written once, against
this class.

Two operations change a table:

* `Table.commit` adds a batch of the archive. It is called again with the same number after a crash, and must then
  leave the rows of that batch in the table once.
* `Table.replace` puts other files in the place of some. Of the rows that a reader sees, only those change that it is
  asked to drop. It fails without an effect if one of the old files has been replaced in the meantime.

A format promises:

1. *Each row once.* A reader that lists the files of an hour gets the old ones or the new ones.
2. *A listed file stays readable* for at least `GRACE` after it was replaced. A reader that is slower gets an error,
   and never other rows: no name is used twice.
3. *Durable before reported.* When `commit` or `replace` returns, a power cut cannot take it back.

`Table.vacuum` deletes files that no reader needs any longer, and `Table.history` lists the changes of the table.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sbus.errors import LakeError
from sbus.journal.schema import Kind, damaged_rows
from sbus.lake.state import State

__all__ = [
    "GRACE",
    "DataFile",
    "Event",
    "Hour",
    "Lost",
    "Staged",
    "Table",
    "look_at_staged",
    "lost_rows",
    "open_parquet",
    "staged_files",
]

_COLUMNS = frozenset({"journal", "seq", "time", "kind", "key", "payload"})
"""The columns that files of a lake have had from the first version on."""

GRACE = 3600.0
"""The least time in seconds for which a file that was replaced can still be read."""


class Hour(NamedTuple):
    """An hour of UTC.

    :ivar date: such as ``2026-01-31``.
    :ivar hour: 0 to 23.
    """

    date: str
    hour: int

    @property
    def directory(self) -> str:
        """Its directory in a lake."""
        return f"date={self.date}/hour={self.hour:02}"

    @property
    def start(self) -> datetime:
        """Its beginning."""
        return datetime.fromisoformat(self.date).replace(hour=self.hour, tzinfo=UTC)

    @classmethod
    def of(cls, time: datetime) -> Hour:
        """Return the hour that a time of UTC is in."""
        return cls(f"{time:%Y-%m-%d}", time.hour)

    @classmethod
    def parse(cls, directory: str) -> Hour:
        """Return the hour of a directory ``date=…/hour=…``.

        :raises ValueError: if the directory is named otherwise.
        """
        date, _, hour = directory.partition("/")
        if not date.startswith("date=") or not hour.startswith("hour="):
            raise ValueError(directory)
        return cls(date.removeprefix("date="), int(hour.removeprefix("hour=")))


@dataclass(frozen=True, slots=True)
class DataFile:
    """One Parquet file of a lake.

    :ivar name: its path in the lake.
    :ivar hour: the hour of its rows.
    :ivar size: its length in bytes.
    :ivar changed: when it was written, in seconds since the epoch.
    :ivar batch: the batch whose file it is, and that may replace it as long as it is not settled; None: it never
        changes.
    """

    name: str
    hour: Hour
    size: int
    changed: float
    batch: int | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """A change of a table.

    :ivar version: its number, in formats that count versions.
    :ivar time: in seconds since the epoch.
    :ivar what: ``batch``, ``compact``, ``prune``, ``forget`` or the format's own word.
    :ivar note: details, for people.
    """

    version: int | None
    time: float
    what: str
    note: str


class Table(abc.ABC):
    """A lake in one table format.

    :ivar format: the name of the format.
    :ivar grace: the seconds for which it keeps files that were replaced; at least `GRACE`.
    :ivar location: a directory, or a URL.
    :ivar state: the local directory with the progress of the archive, its locks, and staged files.
    """

    format: str
    grace: float = GRACE
    location: str
    state: State

    @contextlib.contextmanager
    def writing(self) -> Iterator[list[DataFile]]:
        """Lock the table for an archive, remove the staged files of an interrupted one, and yield the table's files.

        :raises sbus.errors.LakeError: if another archive holds the lock, or the checkpoint is missing.
        :raises OSError: if the lake cannot be written.
        """
        state = self.state
        refusal = f"{self.location}: another job writes to this lake: stop it, or name another lake"
        state.move_out()
        with state.locked("lock", refusal):
            files = self.files()
            if files and not (state.checkpoint / "offsets").exists():
                raise LakeError(
                    f"{self.location}: it has rows, but nothing says from where ({state.checkpoint} is missing): "
                    "restore that from a copy, or name another lake"
                )
            state.settle(self.format, has_rows=bool(files))
            state.make_directories(state.staging)
            with state.inside("staging") as staging:
                for left in staging.iterdir():
                    shutil.rmtree(left, ignore_errors=True)  # an executor may still be writing there
            state.apply_mode()
            state.make_checkpoint()
            for name in ("checkpoint", "checkpoint/offsets", "checkpoint/commits", "batches"):
                with contextlib.suppress(FileNotFoundError), state.inside(name):
                    pass  # the archive removes files there, so it must be no link
            yield files

    @abc.abstractmethod
    def commit(self, batch: int, staged: Path) -> None:
        """Add a batch; committed again, it is there once.

        Only the holder of the writer's lock calls this.

        :param batch: the number of the batch; no batch has a higher one yet, unless a power cut took back what Spark
            had planned.
        :param staged: a local directory with Parquet files in subdirectories ``date=…/hour=…``; it is removed.
        :raises sbus.errors.LakeError: if the batch was archived and rewritten, so that the state must be an old copy,
            or if the lake is no longer in its place.
        """

    @abc.abstractmethod
    def last_batch(self, done: int, files: Sequence[DataFile]) -> int:
        """Return the number of the last batch that the checkpoint must have as done: `commit` would add its rows again.

        :param done: the last batch that is done according to the checkpoint; the result is at least this.
        :param files: the files of the table.
        """

    @abc.abstractmethod
    def replace(self, old: Sequence[DataFile], new: Mapping[Hour, Sequence[Path]], what: str, note: str) -> bool:
        """Replace files, beside readers and beside the archive.

        Only the holder of the maintenance lock calls this.

        :param old: settled files of the hours in `new`; all of an hour, or some.
        :param new: for each hour local files, which are moved; none, if the rows of `old` are to go.
        :param what: the word for the history.
        :param note: details for the history.
        :returns: false, without an effect, if a file of `old` is no longer there.
        """

    @abc.abstractmethod
    def files(self) -> list[DataFile]:
        """Return the files of the table as they are now, by hour and name."""

    @abc.abstractmethod
    def open(self, name: str) -> pa.NativeFile:
        """Open a file of the table for reading, by its name."""

    @abc.abstractmethod
    def pin(self, files: Sequence[DataFile]) -> list[str]:
        """Return paths under which Spark can read files for as long as this process lives.

        :raises FileNotFoundError: if a file has been replaced in the meantime: list them again.
        """

    @abc.abstractmethod
    def vacuum(self, grace: float) -> int:
        """Delete files that were replaced more than `grace` seconds ago, and the leftovers of killed processes.

        Only the holder of the maintenance lock calls this.

        :returns: the number of files.
        """

    @abc.abstractmethod
    def unnamed(self) -> list[DataFile]:
        """Return the files in the place of the table that it does not name: of changes that were never finished."""

    @abc.abstractmethod
    def sweep(self) -> list[DataFile]:
        """Delete unnamed files at once, however young they are; return those that another machine may be writing.

        Only the holder of both the writer's and the maintenance lock calls this.
        """

    @abc.abstractmethod
    def history(self) -> list[Event]:
        """Return what happened to the table, the newest last."""


def staged_files(staged: Path) -> Iterator[tuple[str, list[Path]]]:
    """Yield the directory of each hour that has staged files, with these files in order."""
    paths = sorted(staged.glob("*/*/*.parquet"))
    for hour, files in itertools.groupby(paths, lambda path: str(path.parent.relative_to(staged))):
        yield hour, list(files)


class Lost(NamedTuple):
    """Damaged rows of a journal, for which one row stands in the lake.

    :ivar journal: the ID of the journal.
    :ivar first_seq: the number of the first of them.
    :ivar rows: their number.
    """

    journal: str
    first_seq: int
    rows: int


class Staged(NamedTuple):
    """What the staged files of a batch have.

    :ivar rows: the number of their rows.
    :ivar lost: the rows that they lack because they are damaged, in order.
    """

    rows: int
    lost: list[Lost]


def look_at_staged(staged: Path) -> Staged:
    """Return what the staged files of a batch have; only row groups that may have a ``damaged`` row are read."""
    rows = 0
    lost: list[Lost] = []
    for _, paths in staged_files(staged):
        for path in paths:
            with pq.ParquetFile(path) as file:
                rows += file.metadata.num_rows
                groups = [number for number in range(file.num_row_groups) if _may_have_damaged(file, number)]
                if not groups:
                    continue
                found = file.read_row_groups(groups, ["journal", "seq", "kind", "payload"])
            lost += lost_rows(found)
    return Staged(rows, sorted(lost))


def lost_rows(rows: pa.Table | pa.RecordBatch) -> list[Lost]:
    """Return the lost rows that the ``damaged`` rows among these stand for."""
    damaged = rows.filter(pc.equal(rows.column("kind").cast(pa.utf8()), Kind.DAMAGED.value))
    found = damaged.select(["journal", "seq", "payload"]).to_pylist()
    return [Lost(row["journal"], row["seq"], damaged_rows(row["payload"])) for row in found]


def _may_have_damaged(file: pq.ParquetFile, group: int) -> bool:
    column = file.metadata.row_group(group).column(file.metadata.schema.names.index("kind"))
    kinds = column.statistics
    return kinds is None or not kinds.has_min_max or bool(kinds.min <= Kind.DAMAGED <= kinds.max)


@contextlib.contextmanager
def open_parquet(table: Table, file: DataFile) -> Iterator[pq.ParquetFile]:
    """Yield a file of a table with bounded memory: pages are read as they are needed.

    :raises FileNotFoundError: if it is gone.
    :raises sbus.errors.LakeError: if it is damaged, also where the block reads it, or is no file of a lake.
    """
    try:
        with pq.ParquetFile(table.open(file.name), buffer_size=1 << 16, pre_buffer=False) as parquet:
            if missing := _COLUMNS - set(parquet.schema_arrow.names):
                raise LakeError(
                    f"{table.location}/{file.name}: it is no file of a lake (it has no {', '.join(sorted(missing))}): "
                    "move it away"
                )
            yield parquet
    except (pa.ArrowException, UnicodeDecodeError, OSError) as e:
        # For damage, Arrow raises errors without an errno; errors of object storage have none, either.
        if isinstance(e, (MemoryError, FileNotFoundError)):
            raise
        if isinstance(e, OSError) and (e.errno or "://" in table.location):
            raise
        why = " ".join(str(e).split())
        raise LakeError(f"{table.location}/{file.name}: it cannot be read ({why}): restore it from a copy") from e
