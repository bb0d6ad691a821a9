"""A database for one report: counts and rows of a lake's hours, in DuckDB, on disk.

Its memory is limited; what does not fit is on disk, in a directory of this process that only its user can read, because
keys can be confidential. Names are stored once: other tables have numbers for keys and journals.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import duckdb
import pyarrow as pa

from sbus.errors import StorageError
from sbus.lake.hourly import Hourly
from sbus.spark.report.analysis.cube import Windows
from sbus.spark.report.analysis.spans import Span

__all__ = ["READ", "Database", "add_missing", "fill", "literal", "load_rows", "opened"]

Database = duckdb.DuckDBPyConnection

_MEMORY = "512MB"
"""The limit of DuckDB's buffers; tables beyond it are on disk."""
_KEYS_AT_ONCE = 1 << 16
"""Keys that are matched with a pattern at once."""
READ = "read_parquet($paths, hive_partitioning = false)"
"""The files that the parameter `paths` names."""


def literal(paths: Sequence[str]) -> list[str]:
    """Return paths for DuckDB to read, which takes unescaped ones for patterns."""
    return [re.sub(r"[*?\[]", r"[\g<0>]", path) for path in paths]


@contextmanager
def opened(counted: Hourly) -> Iterator[Database]:
    """Open an empty database; remove it at the end of the block.

    :param counted: what is read into it.
    :raises FileNotFoundError: if the block fails, and some of the counts have been removed.
    :raises sbus.errors.StorageError: if it fails otherwise, such as on a full disk.
    """
    try:
        with _empty() as database:
            yield database
    except (OSError, duckdb.IOException, duckdb.OutOfMemoryException) as e:
        for path in (*counted.counts, *counted.rows):
            os.stat(path)  # raises FileNotFoundError: compaction removes counts of files that it has replaced
        raise StorageError(
            f"cannot compute the report: {str(e).partition(chr(10))[0]}: "
            f"make room in {tempfile.gettempdir()}, or set TMPDIR to another directory"
        ) from e


@contextmanager
def _empty() -> Iterator[Database]:
    with tempfile.TemporaryDirectory(prefix="sbus-report-") as directory:
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


def load_rows(database: Database, counted: Hourly) -> tuple[int, int] | None:
    """Make the table ``rows`` of the rows that are not messages, and those beside them.

    :returns: the least and the greatest time of all rows, in µs; None if there are none.
    """
    database.execute(
        "CREATE TABLE rows AS SELECT journal, seq, epoch_us(time) AS us, kind, "
        f"CASE WHEN kind <> 'message' THEN payload END AS payload FROM {READ}",
        {"paths": literal(counted.rows)},
    )
    first, last = database.execute("SELECT min(us), max(us) FROM rows").fetchall()[0]
    return None if first is None else (first, last)


def fill(database: Database, counted: Hourly, windows: Windows, wanted: Callable[[str], bool] | None) -> None:
    """Make tables of the messages of both periods: ``journals``, ``names``, ``cube`` and ``keys``.

    ``cube`` has a row for each journal, key and window: ``journal`` and ``id`` (numbers), ``now`` (false for the period
    before), ``number`` (of the window), ``n``, ``bytes``, and ``first`` and ``last`` (times in µs). ``keys`` has the
    sums of each key in both periods, and the IDs of its journals, joined by commas.

    :param wanted: says of a key whether its messages count; None: all count.
    """
    period, whole = windows.period, windows.both
    paths = {"paths": literal(counted.counts)}
    within = "first >= $start AND first < $until"
    span = {"start": whole.start, "until": whole.end}
    database.execute(
        f"CREATE TEMP TABLE counted AS SELECT DISTINCT journal, key FROM {READ} WHERE {within}", paths | span
    )
    database.execute(
        "CREATE TABLE journals AS SELECT row_number() OVER (ORDER BY journal) - 1 AS number, journal AS name "
        "FROM (SELECT DISTINCT journal FROM counted)"
    )
    database.execute(
        "CREATE TABLE names AS SELECT row_number() OVER (ORDER BY key) - 1 AS id, key "
        "FROM (SELECT DISTINCT key FROM counted)"
    )
    database.execute("DROP TABLE counted")
    if wanted is not None:
        _drop_unwanted(database, wanted)
    database.execute(
        f"""
        CREATE TABLE cube AS
        SELECT journals.number AS journal, id, first >= $begin AS now,
            ((CASE WHEN first >= $begin THEN first ELSE first + $length END - $origin) // $width)::INTEGER AS number,
            sum(n)::BIGINT AS n, sum(bytes)::BIGINT AS bytes, min(first) AS first, max(last) AS last
        FROM {READ} AS counts JOIN names USING (key) JOIN journals ON counts.journal = journals.name
        WHERE {within}
        GROUP BY ALL
        """,
        paths
        | span
        | {
            "begin": period.start,
            "length": period.end - period.start,
            "origin": windows.origin,
            "width": windows.width,
        },
    )
    database.execute(
        """
        CREATE TABLE keys AS
        SELECT id, key, n, bytes, n_before, bytes_before, journals FROM names JOIN (
            SELECT id,
                coalesce(sum(n) FILTER (now), 0)::BIGINT AS n, coalesce(sum(bytes) FILTER (now), 0)::BIGINT AS bytes,
                coalesce(sum(n) FILTER (NOT now), 0)::BIGINT AS n_before,
                coalesce(sum(bytes) FILTER (NOT now), 0)::BIGINT AS bytes_before,
                array_to_string(list_sort(list(DISTINCT journals.name)), ',') AS journals
            FROM cube JOIN journals ON cube.journal = journals.number GROUP BY id
        ) USING (id)
        """
    )


def _drop_unwanted(database: Database, wanted: Callable[[str], bool]) -> None:
    """Drop the keys that are not wanted from ``names``."""
    database.execute("CREATE TABLE wanted (id BIGINT)")
    # A cursor of its own: the insertions end the one that they come from.
    with database.cursor() as found:
        found.execute("SELECT id, key FROM names")
        while rows := found.fetchmany(_KEYS_AT_ONCE):
            ids = pa.table({"id": pa.array([id for id, key in rows if wanted(key)], pa.int64())})
            database.register("ids", ids)
            database.execute("INSERT INTO wanted SELECT id FROM ids")
            database.unregister("ids")
    database.execute("DELETE FROM names WHERE id NOT IN (SELECT id FROM wanted)")


def add_missing(database: Database, missing: dict[str, list[Span]]) -> None:
    """Make the table ``missing``: for each journal, the time in which messages may be missing.

    ``sum`` is the time of the spans before this one, in µs.
    """
    numbers = {name: number for number, name in database.execute("SELECT number, name FROM journals").fetchall()}
    database.execute("CREATE TABLE missing (journal BIGINT, start BIGINT, until BIGINT, sum BIGINT)")
    rows = []
    for journal, spans in missing.items():
        total = 0
        for span in spans if journal in numbers else ():
            rows.append((numbers[journal], span.start, span.end, total))
            total += span.end - span.start
    if rows:
        database.executemany("INSERT INTO missing VALUES (?, ?, ?, ?)", rows)
