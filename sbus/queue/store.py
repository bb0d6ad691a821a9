"""The store of one queue: a SQLite file that one service has open.

One transaction takes all changes of a turn (WAL, ``synchronous=FULL``: one sync). A transaction that fails has changed
nothing, and can be repeated. flock(2) holds the lock: SQLite's own locks end when any descriptor of the file is closed.

The row of a batch is written before its jobs are sent, and again when one of them comes back. Once all have left it, it
is deleted with the next write of a batch.

An ack needs room before it frees some. So new jobs leave a reserve: otherwise a disk full of jobs would stay full.

A job's number is never used again, so a late ack never meets another job. The IDs of a user's jobs are kept for a day,
and as many as there are slots: a new one takes the place of the oldest.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from sbus.errors import QueueError
from sbus.queue.jobs import Batch, Changes, Job

__all__ = ["KNOWN_SECONDS", "Store"]

_APPLICATION = 0x53425553
_VERSION = 4
_SCHEMA = """
CREATE TABLE job (id INTEGER PRIMARY KEY, head BLOB NOT NULL, payload BLOB NOT NULL) STRICT;
CREATE TABLE batch (id INTEGER PRIMARY KEY, holder BLOB NOT NULL, jobs BLOB NOT NULL) STRICT;
CREATE TABLE latest (job INTEGER NOT NULL) STRICT;
INSERT INTO latest VALUES (0);
CREATE TABLE known (
    uid INTEGER NOT NULL, slot INTEGER NOT NULL, id BLOB NOT NULL, job INTEGER NOT NULL, until REAL NOT NULL,
    PRIMARY KEY (uid, slot), UNIQUE (uid, id)
) STRICT, WITHOUT ROWID;
"""
KNOWN_SECONDS = 86_400.0
"""Seconds for which the ID of a publisher is kept."""
_SLOTS = 1_000_000
"""IDs of one user that are kept: 100 MB of typical ones, and 600 MB of the longest."""
_RESERVE = 32 << 20
"""Bytes of the disk that new jobs leave to the acks of earlier ones; at most an eighth of the disk."""
_ROWS = 64
"""Rows of one statement, which take half as long as 64 statements, and fit the cache of statements."""
_INSERT = [f"INSERT INTO job VALUES {', '.join(['(?, ?, ?)'] * rows)}" for rows in range(_ROWS + 1)]


class Store:
    """An open store.

    :param path: the file; created if there is none.
    :param slots: IDs of one user that are kept.
    :raises QueueError: if another service has it open, or it cannot be used.
    """

    def __init__(self, path: str, slots: int = _SLOTS) -> None:
        self.path = path
        self._most_slots = slots
        self._lock = -1
        self._db: Any = None
        try:
            self._lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._db = sqlite3.connect(path, timeout=0.0, isolation_level=None)
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
            raise QueueError(f"{self.path}: a store of version {version}, not {_VERSION}: run the release that made it")
        if is_new:
            for statement in _SCHEMA.split(";"):
                run(statement)
            run(f"PRAGMA application_id={_APPLICATION}")
            run(f"PRAGMA user_version={_VERSION}")
        run("COMMIT")
        run("PRAGMA journal_mode=WAL")
        run("PRAGMA synchronous=FULL")
        newest = run("SELECT uid, slot, max(job) FROM known GROUP BY uid")
        self._slots: dict[int, int] = {uid: slot for uid, slot, _ in newest}

    def close(self) -> None:
        """Close the file."""
        if self._db is not None:
            self._db.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def jobs(self) -> list[Job]:
        """Return all jobs, without their payloads, and with their batches.

        :raises QueueError: if the file is broken.
        """
        run = self._db.execute
        try:
            problem = run("PRAGMA quick_check(1)").fetchone()[0]
            if problem != "ok":
                raise sqlite3.DatabaseError(problem.replace("\n", " "))
            jobs = {row[0]: Job.parse(*row) for row in run("SELECT id, head, length(payload) FROM job")}
            batches = []
            for id, holder, text in run("SELECT id, holder, jobs FROM batch"):
                batches.append(Batch(id, holder))
                batches[-1].add_stored(text, jobs)
            with suppress(sqlite3.OperationalError):  # the disk is full; empty batches do no harm
                self.write(Changes(over=[batch.id for batch in batches if not batch.jobs]), 0.0)
            return list(jobs.values())
        except (sqlite3.Error, ValueError) as e:
            raise QueueError(f"{self.path}: {_explain(self.path, e)}") from None

    def next_id(self) -> int:
        """Return a number that no job has had."""
        [(latest,)] = self._db.execute("SELECT job FROM latest")
        return int(latest) + 1

    def write(self, changes: Changes, now: float) -> None:
        """Make changes durable.

        :raises sqlite3.Error: if nothing was changed.
        """
        run, many, slots = self._db.execute, self._db.executemany, dict(self._slots)
        with self._db:  # takes all back if anything fails
            run("BEGIN IMMEDIATE")
            known = []
            for at in range(0, len(changes.new), _ROWS):
                rows: list[Any] = []
                for job in changes.new[at : at + _ROWS]:
                    rows += job.id, job.head(), job.payload
                    if job.ident:
                        slots[job.uid] = slot = (slots.get(job.uid, -1) + 1) % self._most_slots
                        known.append((job.uid, slot, job.ident, job.id, now + KNOWN_SECONDS))
                run(_INSERT[len(rows) // 3], rows)
            if changes.new:
                run("UPDATE latest SET job=?", (changes.new[-1].id,))
            many("INSERT OR REPLACE INTO known VALUES (?, ?, ?, ?, ?)", known)
            many("UPDATE job SET head=? WHERE id=?", [(job.head(), job.id) for job in changes.changed])
            many("DELETE FROM job WHERE id=?", [(id,) for id in changes.gone])
            batches = [(batch.id, batch.holder, batch.build()) for batch in changes.batches]
            many("INSERT OR REPLACE INTO batch VALUES (?, ?, ?)", batches)
            many("DELETE FROM batch WHERE id=?", [(id,) for id in changes.over])
        self._slots = slots

    def check_room(self) -> None:
        """Check that the disk has room for new jobs.

        :raises sqlite3.OperationalError: if it has room only for acks.
        """
        disk = os.fstatvfs(self._lock)
        free, reserve = disk.f_bavail * disk.f_frsize, min(_RESERVE, disk.f_blocks * disk.f_frsize // 8)
        if free > 4 * reserve:
            return
        pragmas = ("page_size", "page_count", "freelist_count")
        size, pages, unused = (self._db.execute(f"PRAGMA {name}").fetchone()[0] for name in pragmas)
        owed = pages * size - os.fstat(self._lock).st_size  # the file grows by this when SQLite empties the WAL
        if free + unused * size - owed < reserve:
            raise sqlite3.OperationalError("the disk has room only for acks")

    def find_known(self, uid: int, ident: bytes, now: float) -> int | None:
        """Return the job that a user has put with an ID before."""
        find = "SELECT job FROM known WHERE uid=? AND id=? AND until>=?"
        row = self._db.execute(find, (uid, ident, now)).fetchone()
        return None if row is None else int(row[0])

    def payloads(self, ids: Iterable[int]) -> dict[int, bytes]:
        """Return the payloads of jobs, as far as they are here."""
        find = "SELECT id, payload FROM job WHERE id IN (SELECT value FROM json_each(?))"
        return dict(self._db.execute(find, (json.dumps(list(ids)),)))


def _explain(path: str, error: Exception) -> str:
    """Return why a store cannot be opened, and the remedy."""
    if isinstance(error, BlockingIOError):
        return "another service has this store open: stop it, or name another file with store="
    if isinstance(error, OSError):
        remedy = "make its directory, chown it, or name another place with store="
        return f"cannot open the store: {error.strerror}: {remedy}"
    match getattr(error, "sqlite_errorcode", 0) & 0xFF:
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return "another program reads or writes this store: end it"
        case sqlite3.SQLITE_FULL | sqlite3.SQLITE_IOERR | sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_READONLY:
            return f"cannot write the store: {error}: make room on the disk, or name another place with store="
        case sqlite3.SQLITE_NOTADB:
            return "not a store of a queue: name another file with store="
    return (
        f"the store is broken: {error}: save what can be read with `sqlite3 {path} .recover`, and move the file and "
        f"{path}-wal away"
    )
