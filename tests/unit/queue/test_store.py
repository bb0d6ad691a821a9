"""The store of a queue: what it keeps, and what it refuses."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from sbus.errors import QueueError
from sbus.queue.jobs import Changes, Row
from sbus.queue.store import Store
from tests.support.disks import filled, mounted

NOTHING = Changes([], [], [])


def row(id: int, due: float = 0.0, tries: int = 0, holder: bytes = b"", until: float = 0.0, reason: str = "") -> Row:
    return id, b"k", b"3 !/cred/1/2/3", 2, due, tries, holder, until, reason


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(str(tmp_path / "store"))
    yield store
    store.close()


def again(store: Store) -> Store:
    """Close a store, and open it anew."""
    store.close()
    return Store(store.path)


def test_changes_last(store: Store) -> None:
    """New, changed and deleted jobs are there after the next start, and no number is used twice."""
    store.write(Changes([(row(7), b"one"), (row(8), b"two")], [], []), [], 0.0)
    changed = row(7, 1.5, 1, b"w", 9.5, "why")
    store.write(Changes([], [changed], [8]), [], 0.0)
    store = again(store)
    assert (store.rows(), store.next_id()) == ([changed], 9)
    assert store.payloads([7, 8]) == {7: b"one"}
    store.close()


def test_ids_are_known_for_a_day(store: Store) -> None:
    """An ID is known, over restarts, until a day has passed; then it is forgotten."""
    many = [b"%d" % number for number in range(1200)]
    store.write(NOTHING, [(id, 1) for id in many], 0.0)
    store = again(store)
    assert len(store.find_known(many, 86_399.0)) == 1200
    assert store.find_known([b"5", b"new"], 86_399.0) == {b"5": 1}
    assert store.find_known([b"5"], 86_401.0) == {}
    for _ in range(2):
        store.write(NOTHING, [(b"x", 2)], 86_401.0)
    store.close()
    assert sqlite3.connect(store.path).execute("SELECT count(*) FROM known").fetchone() == (1,)


def test_one_service_for_a_store(store: Store) -> None:
    """A second service on the store is refused, and again after that."""
    for _ in range(2):
        with pytest.raises(QueueError, match=r"another service has this store open: stop it"):
            Store(store.path)
    again(store).close()


def test_files_that_are_no_stores(tmp_path: Path) -> None:
    """A text, another program's database, and a store of a newer release are refused, each with the remedy."""
    path = tmp_path / "file"
    path.write_text("a text" * 100)
    with pytest.raises(QueueError, match="not a store of a queue: name another file"):
        Store(str(path))
    path.unlink()
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE mine (a)")
    db.close()
    with pytest.raises(QueueError, match="of another program: name another file"):
        Store(str(path))
    path.unlink()
    Store(str(path)).close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version=99")
    db.close()
    with pytest.raises(QueueError, match="a store of version 99"):
        Store(str(path))
    with pytest.raises(QueueError, match="cannot open the store: Is a directory: name another place"):
        Store(str(tmp_path))


def test_a_broken_store(tmp_path: Path) -> None:
    """A store whose pages are overwritten is refused; the text says how to save what can be read."""
    path = tmp_path / "store"
    store = Store(str(path))
    store.write(Changes([(row(n), bytes(3000)) for n in range(1, 200)], [], []), [], 0.0)
    store.close()
    content = bytearray(path.read_bytes())
    content[8192:300_000] = bytes(300_000 - 8192)
    path.write_bytes(content)
    with pytest.raises(QueueError, match=r"the store is broken: .* \.recover"):
        Store(str(path))


def test_a_full_disk_changes_nothing(tmp_path: Path) -> None:
    """A transaction that does not fit changes nothing, and succeeds when there is room."""
    with mounted(tmp_path / "disk", "2m") as disk:
        store = Store(str(disk / "store"))
        store.write(Changes([(row(7), b"kept")], [], []), [], 0.0)
        large = Changes([(row(9), bytes(500_000))], [], [7])
        with filled(disk), pytest.raises(sqlite3.OperationalError, match="full"):
            store.write(large, [], 0.0)
        assert store.payloads([7, 9]) == {7: b"kept"}
        store.write(large, [], 0.0)
        store = again(store)
        assert [each[0] for each in store.rows()] == [9]
        store.close()
