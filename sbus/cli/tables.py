"""Rows of results as a table on the terminal, or in a file of a format that others read."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import IO, TYPE_CHECKING, Any, Protocol

import click

from sbus.cli.output import shown
from sbus.errors import UsageError
from sbus.extras import needs

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Writer", "output_to", "schema"]

Row = dict[str, Any]


class Writer(Protocol):
    """Takes rows: the same names in each, the values numbers, text, None or times with a zone."""

    def write(self, rows: Iterable[Row]) -> int:
        """Write them all; returns how many there were."""

    def close(self) -> None:
        """Write what comes at the end."""


@contextlib.contextmanager
def output_to(path: str | None, *, grows: bool = False) -> Iterator[Writer]:
    """
    :param path: a file whose ending says its format (``.csv``, ``.json``, ``.parquet``); None: a table on the terminal.
    :param grows: whether rows are added to what is there, and to be seen at once; else a file is there when it is
        complete, and takes the place of an older one.
    :raises UsageError: for another ending, or Parquet that is to grow.
    """
    if path is None:
        yield _Table()
        return
    kind = _KINDS.get(os.path.splitext(path)[1])
    if kind is None:
        raise UsageError(f"--output {path}: name a file that ends with {', '.join(_KINDS)}")
    if grows and kind is _Parquet:
        raise UsageError(f"--output {path}: a Parquet file cannot grow: use .csv or .json for what is live")
    written = path if grows else f"{path}.tmp"
    try:
        with open(written, "ab" if grows else "wb") as file:
            writer = kind(file)
            yield writer
            writer.close()
        if not grows:
            os.replace(written, path)
    except BaseException:
        if not grows:
            with contextlib.suppress(OSError):  # it may never have been made; what went wrong is to be told
                os.unlink(written)
        raise


class _Table:
    """Columns side by side; text to the left, numbers to the right."""

    _WIDTHS = {"time": 24, "prefix": 28, "bytes": 15}

    def __init__(self) -> None:
        self._is_new = True

    def write(self, rows: Iterable[Row]) -> int:
        count = 0
        for row in rows:
            if self._is_new:
                click.echo(self._line({name: name for name in row}))
                self._is_new = False
            click.echo(self._line({name: _told(value) for name, value in row.items()}))
            count += 1
        return count

    def close(self) -> None:
        pass

    def _line(self, cells: dict[str, str]) -> str:
        return " ".join(
            text.ljust(self._WIDTHS[name]) if name in ("time", "prefix") else text.rjust(self._WIDTHS.get(name, 10))
            for name, text in cells.items()
        )


class _Csv:
    """A line for each row, under a line with the names."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._is_new = not file.tell()

    def write(self, rows: Iterable[Row]) -> int:
        text = io.TextIOWrapper(self._file, encoding="utf-8", newline="", write_through=True)
        writer = csv.writer(text, lineterminator="\n")
        count = 0
        for row in rows:
            if self._is_new:
                writer.writerow(row)
                self._is_new = False
            writer.writerow(_plain(row).values())
            count += 1
        text.detach()
        self._file.flush()
        return count

    def close(self) -> None:
        pass


class _Json:
    """An object a line."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, rows: Iterable[Row]) -> int:
        count = 0
        for row in rows:
            self._file.write(json.dumps(_plain(row)).encode() + b"\n")
            count += 1
        self._file.flush()
        return count

    def close(self) -> None:
        pass


class _Parquet:
    """A Parquet file of traffic, written in parts."""

    _ROWS = 65_536

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._writer: Any = None
        self._schema: Any = None

    def write(self, rows: Iterable[Row]) -> int:
        count = 0
        part: list[Row] = []
        for row in rows:
            part.append(row)
            count += 1
            if len(part) == self._ROWS:
                self._put(part)
                part = []
        if part or not count:
            self._put(part)
        return count

    def _put(self, rows: list[Row]) -> None:
        with needs("spark"):
            import pyarrow as pa
            import pyarrow.parquet
        if self._writer is None:
            # Rows would not tell: there may be none, or at first only such with None.
            self._schema = schema()
            self._writer = pyarrow.parquet.ParquetWriter(self._file, self._schema, compression="zstd")
        self._writer.write_table(pa.Table.from_pylist(rows, schema=self._schema))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def schema() -> pa.Schema:
    """The columns of a Parquet file: those of `sbus.spark.jobs.traffic`."""
    with needs("spark"):
        import pyarrow as pa
    return pa.schema([
        ("time", pa.timestamp("us", tz="UTC")), ("prefix", pa.utf8()), ("messages", pa.int64()), ("bytes", pa.int64()),
        ("rate", pa.float64()), ("keys", pa.int64()), ("p50", pa.int64()), ("p95", pa.int64()), ("p99", pa.int64()),
        ("gaps", pa.int64()),
    ])  # fmt: skip


_KINDS: dict[str, Callable[[IO[bytes]], Writer]] = {".csv": _Csv, ".json": _Json, ".parquet": _Parquet}


def _told(value: Any) -> str:
    """A value as it is shown on a terminal, which nothing in it can harm."""
    if value is None:
        return "-"
    if isinstance(value, datetime):
        return _iso(value)
    if isinstance(value, float):
        return f"{value:,.1f}"
    if isinstance(value, int):
        return f"{value:,}"
    return shown(str(value).encode())


def _plain(row: Row) -> Row:
    return {name: _iso(value) if isinstance(value, datetime) else value for name, value in row.items()}


def _iso(time: datetime) -> str:
    precision = "milliseconds" if time.microsecond else "seconds"
    return time.astimezone(UTC).replace(tzinfo=None).isoformat(timespec=precision) + "Z"
