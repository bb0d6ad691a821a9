"""The database of one report: the messages by window and the other rows of both periods, in DuckDB, on disk.

Its memory is limited; beyond that it is on disk, in a directory of this process that only its user can read, because
keys can be confidential. Two things fill it: rows, which it counts as they come, and the counts of a lake's hours. From
then on nothing tells them apart.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from sbus.errors import StorageError
from sbus.journal.digests import is_message, payload_lengths
from sbus.lake.cube import publishers
from sbus.lake.hourly import Hourly
from sbus.report.engine.windows import Windows
from sbus.report.spans import Span

__all__ = ["Database", "add_missing", "load_counts", "load_rows", "opened", "select_keys"]

Database = duckdb.DuckDBPyConnection

_MEMORY = "512MB"
"""The limit of DuckDB's buffers; tables beyond it are on disk."""
_ROWS_AT_ONCE = 1 << 20
"""Rows that are counted at once: each count has a fixed cost, and this many take about 100 MB."""
_BYTES_AT_ONCE = 64 << 20
"""Bytes of such rows: keys can be long."""
_KEYS_AT_ONCE = 1 << 16
"""Keys that are matched with a pattern at once."""

_TABLES = """
CREATE TABLE rows (journal VARCHAR, host VARCHAR, seq BIGINT, us BIGINT, kind VARCHAR, payload BLOB);
CREATE TABLE journals (id BIGINT, name VARCHAR);
CREATE TABLE names (id BIGINT, name VARCHAR);
CREATE TABLE sent (journal BIGINT, id BIGINT, size BIGINT, publisher BIGINT, now BOOLEAN, number INTEGER,
    n BIGINT, bytes BIGINT, first BIGINT, last BIGINT)
"""

_NEW_NAMES = """
INSERT INTO {table}
SELECT (SELECT count(*) FROM {table}) + row_number() OVER () - 1, name FROM {found} ANTI JOIN {table} USING (name)
"""

_SENT = """
INSERT INTO sent
SELECT journal, id, size, publisher, first >= $begin AS now,
    ((CASE WHEN first >= $begin THEN first ELSE first + $length END - $origin) // $width)::INTEGER AS number,
    sum(n)::BIGINT, sum(bytes)::BIGINT, min(first), max(last)
FROM {source} WHERE first >= $start AND first < $until GROUP BY ALL
"""


def _literal(paths: Sequence[str]) -> list[str]:
    """Return paths for DuckDB to read, which takes unescaped ones for patterns."""
    return [re.sub(r"[*?\[]", r"[\g<0>]", path) for path in paths]


@contextmanager
def opened() -> Iterator[Database]:
    """Open an empty database; remove it at the end of the block.

    :raises sbus.errors.StorageError: if there is no room for it.
    """
    with ExitStack() as stack:
        try:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="sbus-report-"))
        except OSError as e:
            raise _no_room(e) from e
        try:
            yield stack.enter_context(_empty(directory))
        except (duckdb.IOException, duckdb.OutOfMemoryException) as e:
            raise _no_room(e) from e


def _no_room(error: Exception) -> StorageError:
    return StorageError(
        f"cannot compute the report: {str(error).partition(chr(10))[0]}: "
        f"make room in {tempfile.gettempdir()}, or set TMPDIR to another directory"
    )


@contextmanager
def _empty(directory: str) -> Iterator[Database]:
    settings: dict[str, str | bool | int | float | list[str]] = {
        "memory_limit": _MEMORY,
        "temp_directory": os.path.join(directory, "spilled"),
        "threads": min(4, len(os.sched_getaffinity(0))),
        "preserve_insertion_order": False,
        # A report needs no network.
        "autoinstall_known_extensions": False,
    }
    with duckdb.connect(os.path.join(directory, "report.duckdb"), config=settings) as database:
        database.execute("SET enable_progress_bar = false")
        database.execute("SET TimeZone = 'UTC'")
        # The first segments of a key, with a final "/" if more follow.
        database.execute(
            "CREATE MACRO shortened(key, depth) AS CASE WHEN len(string_split(key, '/')) > depth "
            "THEN array_to_string(string_split(key, '/')[1:depth], '/') || '/' ELSE key END"
        )
        yield database


def load_rows(database: Database, batches: Iterable[pa.RecordBatch], windows: Windows) -> None:
    """Make the tables ``rows`` and ``sent`` of rows.

    ``rows`` has those that are not messages, those beside them, and those at the ends of the batches; it is all that
    gaps and the extents of journals need. ``sent`` has the messages of each journal, key, size, publisher and window:
    ``journal`` and ``id`` (numbers, whose names are in the tables ``journals`` and ``names``), ``now`` (false for the
    period before), ``number`` (of the window), ``n``, ``bytes``, and ``first`` and ``last`` (times in µs).

    :param batches: with the columns that `sbus.report.engine.sources.Source.rows` has; rows of other times are left
        out.
    """
    database.execute(_TABLES)
    waiting: list[tuple[pa.RecordBatch, pa.RecordBatch]] = []
    rows = size = 0
    for batch in (_within(batch, windows.both) for batch in batches):
        if not batch.num_rows:
            continue
        waiting.append((_kept(batch), _messages(batch)))
        rows += batch.num_rows
        size += sum(part.nbytes for part in waiting[-1])
        if rows >= _ROWS_AT_ONCE or size >= _BYTES_AT_ONCE:
            _add(database, waiting, windows)
            waiting, rows, size = [], 0, 0
    _add(database, waiting, windows)


def _within(batch: pa.RecordBatch, span: Span) -> pa.RecordBatch:
    """Return the rows of a time."""
    us = batch.column("time").cast(pa.int64())
    ends = pc.min_max(us).as_py()
    if batch.num_rows and span.start <= ends["min"] and ends["max"] < span.end:
        return batch  # as nearly all
    return batch.filter(pc.and_(pc.greater_equal(us, span.start), pc.less(us, span.end)))


def _kept(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the rows to keep: all but messages between two messages with the numbers beside theirs."""
    count = batch.num_rows
    is_sent = is_message(batch.column("kind"))
    seq, journal, us = batch.column("seq"), batch.column("journal"), batch.column("time").cast(pa.int64())
    follows = pc.and_(
        pc.and_(is_sent[1:], is_sent[:-1]),
        pc.and_(pc.equal(pc.subtract(seq[1:], seq[:-1]), 1), pc.equal(journal[1:], journal[:-1])),
    )
    inner = pc.indices_nonzero(pc.invert(pc.and_(follows[1:], follows[:-1])))
    ends = pc.min_max(us)
    places = {0, count - 1, *(pc.index(us, ends[name]).as_py() for name in ("min", "max"))}
    places.update(place + 1 for place in inner.to_pylist())
    payload = pc.if_else(is_sent, pa.scalar(None, pa.binary()), batch.column("payload"))
    columns = {"journal": journal, "host": batch.column("host"), "seq": seq, "us": us, "kind": batch.column("kind")}
    return pa.RecordBatch.from_pydict(columns | {"payload": payload}).take(pa.array(sorted(places)))


def _messages(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return each message as a count of one."""
    messages = batch.filter(is_message(batch.column("kind")))
    size, us = payload_lengths(messages), messages.column("time").cast(pa.int64())
    return pa.RecordBatch.from_pydict({
        "journal": messages.column("journal"), "key": messages.column("key"), "size": size,
        "publisher": publishers(messages), "n": pa.repeat(pa.scalar(1, pa.int64()), messages.num_rows), "bytes": size,
        "first": us, "last": us,
    })  # fmt: skip


def _add(database: Database, parts: Sequence[tuple[pa.RecordBatch, pa.RecordBatch]], windows: Windows) -> None:
    if not parts:
        return
    _insert(database, "INSERT INTO rows SELECT * FROM found", pa.Table.from_batches([kept for kept, _ in parts]))
    messages = pa.Table.from_batches([messages for _, messages in parts])
    numbered = messages.drop_columns(["journal", "key"])
    for column, source, table in (("journal", "journal", "journals"), ("id", "key", "names")):
        numbered = numbered.append_column(column, _numbers(database, table, messages.column(source)))
    _insert(database, _SENT.format(source="found"), numbered, _numbering(windows))


def _numbers(database: Database, table: str, texts: pa.ChunkedArray) -> pa.Array:
    """Return the number of each text in a table of names; add those that it does not have."""
    coded = texts.combine_chunks().dictionary_encode()
    found = pa.table({"place": pa.array(range(len(coded.dictionary))), "name": coded.dictionary})
    _insert(database, _NEW_NAMES.format(table=table, found="found"), found)
    database.register("found", found)
    ids = database.execute(f"SELECT id FROM found JOIN {table} USING (name) ORDER BY place").fetchall()
    database.unregister("found")
    return pa.array([number for (number,) in ids], pa.int64()).take(coded.indices)


def _insert(database: Database, query: str, found: pa.Table, parameters: Mapping[str, int] | None = None) -> None:
    """Run a query that inserts from a table of Arrow, which is called ``found`` in it."""
    database.register("found", found)
    database.execute(query, parameters or {})
    database.unregister("found")


def load_counts(database: Database, counted: Hourly, windows: Windows) -> None:
    """Make the same tables of the counts of hours; the windows are whole hours.

    :raises FileNotFoundError: if some of the counts have been removed.
    """
    database.execute(_TABLES)
    files = "read_parquet($paths, hive_partitioning = false)"
    try:
        database.execute(
            "INSERT INTO rows SELECT journal, host, seq, epoch_us(time) AS us, kind, "
            f"CASE WHEN kind <> 'message' THEN payload END FROM {files}",
            {"paths": _literal(counted.rows)},
        )
        counts = {"paths": _literal(counted.counts)}
        for table, column in (("journals", "journal"), ("names", "key")):
            found = f"(SELECT DISTINCT {column} AS name FROM {files})"
            database.execute(_NEW_NAMES.format(table=table, found=found), counts)
        numbered = (
            "(SELECT counts.* REPLACE (journals.id AS journal), names.id AS id "
            f"FROM {files} AS counts JOIN names ON key = names.name JOIN journals ON journal = journals.name)"
        )
        database.execute(_SENT.format(source=numbered), counts | _numbering(windows))
    except duckdb.IOException:
        for path in (*counted.counts, *counted.rows):
            os.stat(path)  # raises FileNotFoundError: compaction removes counts of files that it has replaced
        raise


def _numbering(windows: Windows) -> dict[str, int]:
    period, whole = windows.period, windows.both
    return {
        "start": whole.start,
        "until": whole.end,
        "begin": period.start,
        "length": period.end - period.start,
        "origin": windows.origin,
        "width": windows.width,
    }


def select_keys(database: Database, wanted: Callable[[str], bool] | None) -> None:
    """Make tables of the messages whose keys are wanted: ``cube`` and ``keys``; others are dropped from ``names``.

    ``cube`` has a row for each journal, key and window, with the columns of ``sent``. ``keys`` has the sums of each key
    in both periods.

    :param wanted: says of a key whether its messages count; None: all count.
    """
    if wanted is not None:
        _drop_unwanted(database, wanted)
    database.execute(
        """
        CREATE TABLE cube AS
        SELECT journal, id, now, number,
            sum(n)::BIGINT AS n, sum(bytes)::BIGINT AS bytes, min(first) AS first, max(last) AS last
        FROM sent SEMI JOIN names USING (id) GROUP BY ALL
        """
    )
    database.execute(
        """
        CREATE TABLE keys AS
        SELECT id, name AS key, n, bytes, n_before, bytes_before FROM names JOIN (
            SELECT id,
                coalesce(sum(n) FILTER (now), 0)::BIGINT AS n, coalesce(sum(bytes) FILTER (now), 0)::BIGINT AS bytes,
                coalesce(sum(n) FILTER (NOT now), 0)::BIGINT AS n_before,
                coalesce(sum(bytes) FILTER (NOT now), 0)::BIGINT AS bytes_before
            FROM cube GROUP BY id
        ) USING (id)
        """
    )


def _drop_unwanted(database: Database, wanted: Callable[[str], bool]) -> None:
    """Drop the keys that are not wanted from ``names``."""
    database.execute("CREATE TABLE wanted (id BIGINT)")
    # A cursor of its own: the insertions end the one that they come from.
    with database.cursor() as found:
        found.execute("SELECT id, name FROM names")
        while rows := found.fetchmany(_KEYS_AT_ONCE):
            kept = pa.table({"id": pa.array([number for number, key in rows if wanted(key)], pa.int64())})
            _insert(database, "INSERT INTO wanted SELECT id FROM found", kept)
    database.execute("DELETE FROM names WHERE id NOT IN (SELECT id FROM wanted)")


def add_missing(database: Database, missing: Mapping[str, list[Span]]) -> None:
    """Make the table ``missing``: for each journal, the time in which messages may be missing.

    ``sum`` is the time of the spans before this one, in µs.
    """
    numbers = {name: number for number, name in database.execute("SELECT id, name FROM journals").fetchall()}
    database.execute("CREATE TABLE missing (journal BIGINT, start BIGINT, until BIGINT, sum BIGINT)")
    rows = []
    for journal, spans in missing.items():
        total = 0
        for span in spans if journal in numbers else ():
            rows.append((numbers[journal], span.start, span.end, total))
            total += span.end - span.start
    if rows:
        database.executemany("INSERT INTO missing VALUES (?, ?, ?, ?)", rows)
