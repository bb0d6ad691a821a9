"""The store of one queue: a SQLite file that one service has open.

One transaction takes all changes of a turn (WAL, ``synchronous=FULL``: one sync). A transaction that fails has changed
nothing, and can be repeated. flock(2) holds the lock: SQLite's own locks end when any
descriptor of the file is closed.

A job's number is never used again (``AUTOINCREMENT``), so a late ack never meets another job. IDs of publishers are
kept for a day.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterable
from typing import Any

from sbus.errors import QueueError
from sbus.queue.jobs import ROW, Changes, Row

__all__ = ["KNOWN_SECONDS", "Store"]

_APPLICATION = 0x53425553
_VERSION = 1
_SCHEMA = """
CREATE TABLE job (
    id INTEGER PRIMARY KEY AUTOINCREMENT, key BLOB NOT NULL, sender BLOB NOT NULL, uid INTEGER NOT NULL,
    due REAL NOT NULL, tries INTEGER NOT NULL, holder BLOB NOT NULL, until REAL NOT NULL, reason TEXT NOT NULL,
    payload BLOB NOT NULL
) STRICT;
CREATE TABLE known (id BLOB PRIMARY KEY, job INTEGER NOT NULL, until REAL NOT NULL) STRICT, WITHOUT ROWID;
CREATE INDEX known_until ON known (until);
"""
_COLUMNS = ", ".join(ROW)
KNOWN_SECONDS = 86_400.0
"""Seconds for which the ID of a publisher is kept."""
_FORGET_MOST = 1000
"""IDs that are forgotten in one transaction, so that none takes long."""
_LOOK_UP = 500
"""IDs in one statement; SQLite takes 999 parameters at least."""


class Store:
    """An open store. Threads may share it, one call at a time.

    :param path: the file; created if there is none.
    :raises QueueError: if another service has it open, or it cannot be used.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = -1
        self._db: Any = None
        try:
            self._lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._db = sqlite3.connect(path, timeout=0.0, isolation_level=None, check_same_thread=False)
            self._open()
        except (OSError, sqlite3.Error, QueueError) as e:
            self.close()
            raise e if isinstance(e, QueueError) else QueueError(f"{path}: {_explain(path, e)}") from None

    def _open(self) -> None:
        run = self._db.execute
        run("PRAGMA locking_mode=EXCLUSIVE")
        run("BEGIN EXCLUSIVE")
        application, version = run("PRAGMA application_id").fetchone()[0], run("PRAGMA user_version").fetchone()[0]
        is_new = not run("SELECT count(*) FROM sqlite_master").fetchone()[0] and not application
        if not is_new and application != _APPLICATION:
            raise QueueError(f"{self.path}: a SQLite file of another program: name another file with store=")
        if not is_new and version != _VERSION:
            raise QueueError(
                f"{self.path}: a store of version {version}, and this service has {_VERSION}: run the newer release"
            )
        if is_new:
            for statement in _SCHEMA.split(";"):
                run(statement)
            run(f"PRAGMA application_id={_APPLICATION}")
            run(f"PRAGMA user_version={_VERSION}")
        run("COMMIT")
        run("PRAGMA journal_mode=WAL")
        run("PRAGMA synchronous=FULL")
        problem = run("PRAGMA quick_check(1)").fetchone()[0]
        if problem != "ok":
            raise sqlite3.DatabaseError(problem.replace("\n", " "))

    def close(self) -> None:
        """Close the file."""
        if self._db is not None:
            self._db.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def rows(self) -> list[Row]:
        """Return all jobs, without their payloads."""
        rows: list[Row] = self._db.execute(f"SELECT {_COLUMNS} FROM job ORDER BY id").fetchall()
        return rows

    def next_id(self) -> int:
        """Return a number that no job has had."""
        row = self._db.execute("SELECT seq FROM sqlite_sequence WHERE name='job'").fetchone()
        return 1 if row is None else int(row[0]) + 1

    def write(self, changes: Changes, ids: Iterable[tuple[bytes, int]], now: float) -> None:
        """Make changes durable.

        :param ids: IDs of publishers to remember, each with its job.
        :raises sqlite3.Error: if nothing was changed.
        """
        run, many = self._db.execute, self._db.executemany
        run("BEGIN IMMEDIATE")
        try:
            many(
                f"INSERT INTO job ({_COLUMNS}, payload) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [(*row, payload) for row, payload in changes.new],
            )
            many(
                "UPDATE job SET due=?, tries=?, holder=?, until=?, reason=? WHERE id=?",
                [(*row[4:], row[0]) for row in changes.changed],
            )
            many("DELETE FROM job WHERE id=?", [(id,) for id in changes.gone])
            if known := [(id, job, now + KNOWN_SECONDS) for id, job in ids]:
                many("INSERT OR REPLACE INTO known VALUES (?, ?, ?)", known)
                run(
                    "DELETE FROM known WHERE id IN (SELECT id FROM known WHERE until < ? ORDER BY until LIMIT ?)",
                    (now, _FORGET_MOST),
                )
            run("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                run("ROLLBACK")
            raise

    def find_known(self, ids: list[bytes], now: float) -> dict[bytes, int]:
        """Return the jobs of IDs that publishers have used within a day."""
        known: dict[bytes, int] = {}
        for start in range(0, len(ids), _LOOK_UP):
            some = ids[start : start + _LOOK_UP]
            marks = ", ".join("?" * len(some))
            known.update(
                self._db.execute(f"SELECT id, job FROM known WHERE until >= ? AND id IN ({marks})", (now, *some))
            )
        return known

    def payloads(self, ids: Iterable[int]) -> dict[int, bytes]:
        """Return the payloads of jobs, as far as they are here."""
        found: dict[int, bytes] = {}
        for id in ids:
            found.update(self._db.execute("SELECT id, payload FROM job WHERE id=?", (id,)))
        return found


def _explain(path: str, error: OSError | sqlite3.Error) -> str:
    """Return why a store cannot be opened, and the remedy."""
    if isinstance(error, BlockingIOError):
        return "another service has this store open: stop it, or name another file with store="
    if isinstance(error, OSError):
        return f"cannot open the store: {error.strerror}: name another place with store=, or chown it"
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return "another program reads or writes this store: end it"
    if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
        return f"cannot write the store: {error}: make room on the disk, or name another place with store="
    if code == sqlite3.SQLITE_NOTADB:
        return "not a store of a queue: name another file with store="
    return (
        f"the store is broken: {error}: save what can be read with `sqlite3 {path} .recover`, and move the file and "
        f"{path}-wal away"
    )
