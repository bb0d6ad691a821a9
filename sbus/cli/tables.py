"""Results in rows: as columns on a terminal, or in a CSV, JSON or Parquet file."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import IO, TYPE_CHECKING, Any, Protocol

import click

from sbus.cli.output import escape
from sbus.cli.stopping import unwinding
from sbus.distribution import needs
from sbus.errors import UsageError
from sbus.journal import clock
from sbus.ownership import growing, replacing

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Row", "Writer", "format_table", "open_writer", "schema"]

Row = dict[str, Any]
"""Values by column name: numbers, text, None, or times with a zone."""


def format_table(rows: Iterable[Sequence[str]], alignment: str, min_widths: Sequence[int] = ()) -> list[str]:
    """Lay out rows of cells in columns, two spaces apart.

    :param alignment: for each column ``<`` (left) or ``>`` (right); the last one applies to all columns after it.
    :param min_widths: the least width of each column, in characters; 0 for those after the last.
    :returns: one line per row.
    """
    table = list(rows)
    columns = list(zip(*table, strict=True))
    sides = alignment.ljust(len(columns), alignment[-1])[: len(columns)]
    least = [*min_widths, *[0] * len(columns)]
    widths = [max(least[at], *map(len, cells)) for at, cells in enumerate(columns)]
    return [
        "  ".join(
            cell.ljust(width) if side == "<" else cell.rjust(width)
            for cell, side, width in zip(row, sides, widths, strict=True)
        ).rstrip()
        for row in table
    ]


class Writer(Protocol):
    """Writes rows; each has the same columns."""

    def write(self, rows: Iterable[Row]) -> int:
        """Write the rows, and return their number."""

    def close(self) -> None:
        """Write the end of the file."""


@contextlib.contextmanager
def open_writer(path: str | None, *, grows: bool = False) -> Iterator[Writer]:
    """Open a writer for the terminal or for a file.

    :param path: a file whose suffix names its format (``.csv``, ``.json``, ``.parquet``); None for the terminal.
    :param grows: append to an existing file, where each row is visible at once. Otherwise the file appears when it is
        complete, and replaces an older one.
    :raises UsageError: for another suffix, or a Parquet file that is to grow.
    """
    if path is None:
        yield _Terminal()
        return
    kind = _FORMATS.get(os.path.splitext(path)[1])
    if kind is None:
        raise UsageError(f"--output {path}: name a file that ends with {', '.join(_FORMATS)}")
    if grows and kind is _Parquet:
        raise UsageError(f"--output {path}: a Parquet file cannot grow: use .csv or .json with --live")
    with unwinding(), growing(path) if grows else replacing(path) as file:
        writer = kind(file)
        yield writer
        writer.close()


class _Terminal:
    """Columns, each row as soon as it comes; text to the left, numbers to the right."""

    _MIN_WIDTHS = {"time": 24, "prefix": 28, "bytes": 14}
    _MIN_WIDTH = 9

    def __init__(self) -> None:
        self._has_header = False

    def write(self, rows: Iterable[Row]) -> int:
        count = 0
        for row in rows:
            if not self._has_header:
                self._print(row, list(row))
                self._has_header = True
            self._print(row, list(map(_format_value, row.values())))
            count += 1
        return count

    def close(self) -> None:
        pass

    def _print(self, row: Row, cells: list[str]) -> None:
        alignment = "".join("<" if name in ("time", "prefix") else ">" for name in row)
        min_widths = [self._MIN_WIDTHS.get(name, self._MIN_WIDTH) for name in row]
        [line] = format_table([cells], alignment, min_widths)
        click.echo(line)


class _Csv:
    """A line of column names, then a line per row."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._has_header = file.tell() > 0

    def write(self, rows: Iterable[Row]) -> int:
        import csv

        text = io.TextIOWrapper(self._file, encoding="utf-8", newline="", write_through=True)
        writer = csv.writer(text, lineterminator="\n")
        count = 0
        for row in rows:
            if not self._has_header:
                writer.writerow(row)
                self._has_header = True
            writer.writerow(_with_text_times(row).values())
            count += 1
        text.detach()
        self._file.flush()
        return count

    def close(self) -> None:
        pass


class _Json:
    """One JSON object per line."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, rows: Iterable[Row]) -> int:
        count = 0
        for row in rows:
            self._file.write(json.dumps(_with_text_times(row)).encode() + b"\n")
            count += 1
        self._file.flush()
        return count

    def close(self) -> None:
        pass


class _Parquet:
    """A Parquet file of traffic, in row groups."""

    _GROUP_ROWS = 65_536

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._writer: Any = None
        self._schema: Any = None

    def write(self, rows: Iterable[Row]) -> int:
        count = 0
        group: list[Row] = []
        for row in rows:
            group.append(row)
            count += 1
            if len(group) == self._GROUP_ROWS:
                self._write_group(group)
                group = []
        if group or not count:
            self._write_group(group)
        return count

    def _write_group(self, rows: list[Row]) -> None:
        with needs("spark"):
            import pyarrow as pa
            import pyarrow.parquet
        if self._writer is None:
            # The schema cannot come from the rows: there may be none, or the first ones may have only None in a column.
            self._schema = schema()
            self._writer = pyarrow.parquet.ParquetWriter(self._file, self._schema, compression="zstd")
        self._writer.write_table(pa.Table.from_pylist(rows, schema=self._schema))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def schema() -> pa.Schema:
    """Return the columns of a Parquet file: those of `sbus.spark.jobs.traffic`."""
    with needs("spark"):
        import pyarrow as pa
    return pa.schema([
        ("time", pa.timestamp("us", tz="UTC")), ("prefix", pa.utf8()), ("messages", pa.int64()), ("bytes", pa.int64()),
        ("rate", pa.float64()), ("keys", pa.int64()), ("p50", pa.int64()), ("p95", pa.int64()), ("p99", pa.int64()),
        ("gaps", pa.int64()),
        ("lost", pa.int64()),
    ])  # fmt: skip


_FORMATS: dict[str, Callable[[IO[bytes]], Writer]] = {".csv": _Csv, ".json": _Json, ".parquet": _Parquet}


def _format_value(value: object) -> str:
    """Return a value as text that cannot harm a terminal."""
    if value is None:
        return "-"
    if isinstance(value, datetime):
        return _iso(value)
    if isinstance(value, float):
        return f"{value:,.1f}"
    if isinstance(value, int):
        return f"{value:,}"
    return escape(str(value).encode())


def _with_text_times(row: Row) -> Row:
    return {name: _iso(value) if isinstance(value, datetime) else value for name, value in row.items()}


def _iso(time: datetime) -> str:
    precision = "milliseconds" if time.microsecond else "seconds"
    return clock.format_utc(clock.from_datetime(time), precision)
