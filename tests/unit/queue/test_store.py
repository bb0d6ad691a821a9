"""The store of a queue: what it keeps, and what it refuses."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbus.errors import QueueError
from sbus.queue.jobs import Batch, Changes, Job
from sbus.queue.store import Store
from tests.support.disks import filled, mounted
from tests.support.examples import examples


def job(id: int, payload: bytes = b"", uid: int = 2, ident: bytes = b"", **known: Any) -> Job:
    return Job(id, b"k", b"3 !/cred/1/2/3", uid, 1 + len(payload), payload, ident=ident, **known)


def new(*jobs: tuple[int, bytes]) -> Changes:
    """New jobs, each with its payload."""
    return Changes([job(id, payload) for id, payload in jobs])


def named(*idents: tuple[int, bytes, int]) -> Changes:
    """New jobs with IDs: of each, the user, the ID and the number."""
    return Changes([job(id, b"", uid, ident) for uid, ident, id in idents])


def known(store: Store, idents: Iterable[tuple[int, bytes]], now: float) -> dict[tuple[int, bytes], int]:
    """The jobs of those IDs that the store knows."""
    return {each: id for each in idents if (id := store.find_known(*each, now)) is not None}


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
    store.write(new((7, b"one"), (8, b"two")), 0.0)
    changed = job(7, b"one", due=1.5, tries=1, reason="why")
    store.write(Changes(changed=[changed], gone=[8]), 0.0)
    store = again(store)
    [found] = store.jobs()
    changed.payload = None
    assert (asdict(found), store.next_id()) == (asdict(changed), 9)
    assert store.payloads([7, 8]) == {7: b"one"}
    store.close()


@settings(max_examples=examples(50))
@given(st.data())
def test_any_number_of_jobs(data: st.DataObject) -> None:
    """However many jobs come and go in a turn, together or apart, the others stay."""
    count = data.draw(st.sampled_from([1, 2, 63, 64, 65, 127, 128, 200]))
    gone = data.draw(st.lists(st.integers(1, count), unique=True) | st.permutations(range(1, count + 1)))
    with TemporaryDirectory() as directory, closing(Store(f"{directory}/store")) as store:
        store.write(new(*((id, b"%d" % id) for id in range(1, count + 1))), 0.0)
        store.write(Changes([job(count + 1, b"last")], gone=list(gone)), 0.0)
        left = {id: b"%d" % id for id in range(1, count + 1) if id not in gone}
        assert store.payloads(range(count + 2)) == {**left, count + 1: b"last"}
        assert {each.id for each in store.jobs()} == {*left, count + 1}


def test_batches_last(store: Store) -> None:
    """Jobs are in their batches after the next start, with their tries, without those that are done."""
    jobs = [job(id, tries=id) for id in range(1, 6)]
    batches = [Batch(1, b"v"), Batch(2, b"w")]
    for each, batch in zip(jobs, (0, 0, 1, 1), strict=False):
        batches[batch].add(each)
    store.write(Changes([job(id) for id in range(1, 6)], batches=batches), 0.0)
    store = again(store)
    found = [(each.holder, each.tries) for each in store.jobs()]
    assert found == [(b"v", 1), (b"v", 2), (b"w", 3), (b"w", 4), (b"", 0)]
    store.write(Changes(gone=[3], over=[1]), 0.0)
    store = again(store)
    assert {each.id: each.holder for each in store.jobs()} == {1: b"", 2: b"", 4: b"w", 5: b""}
    store.write(Changes(gone=[4]), 0.0)
    store = again(store)
    assert len(store.jobs()) == 3
    assert store._db.execute("SELECT count(*) FROM batch").fetchone() == (0,)  # the start forgets those without jobs
    store.close()


def test_each_transaction_is_synced(store: Store) -> None:
    """What is confirmed outlives a power failure: SQLite syncs the file with each transaction (FULL)."""
    assert store._db.execute("PRAGMA synchronous").fetchone() == (2,)


def test_ids_are_known_for_a_day(store: Store) -> None:
    """An ID is its user's, and known, over restarts, until a day has passed; then it can be used again."""
    store.write(named((1, b"a", 1), (1, b"b", 2), (2, b"a", 3)), 0.0)
    store = again(store)
    idents = [(1, b"a"), (1, b"b"), (2, b"a"), (2, b"b")]
    assert known(store, idents, 86_399.0) == {(1, b"a"): 1, (1, b"b"): 2, (2, b"a"): 3}
    assert known(store, idents, 86_401.0) == {}
    store.write(named((1, b"a", 4)), 86_401.0)
    assert known(store, idents, 86_402.0) == {(1, b"a"): 4}
    store.close()


def test_ids_of_a_user_are_bounded(tmp_path: Path) -> None:
    """A new ID takes the place of the user's oldest one, over restarts, and of no other user's."""
    store = Store(str(tmp_path / "store"), slots=3)
    store.write(named((2, b"x", 1)), 0.0)
    for number in range(2, 7):
        store.write(named((1, b"%d" % number, number)), 0.0)
        store.close()
        store = Store(store.path, slots=3)
    assert list(known(store, [(2, b"x"), *((1, b"%d" % n) for n in range(2, 7))], 1.0).values()) == [1, 4, 5, 6]
    store.close()


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
    with pytest.raises(QueueError, match="cannot open the store: No such file or directory: make its directory"):
        Store(str(tmp_path / "none" / "store"))
    with pytest.raises(QueueError, match=r"cannot open the store: Is a directory: .* name another place"):
        Store(str(tmp_path))


def test_a_broken_store(tmp_path: Path) -> None:
    """A store whose pages are overwritten is refused; the text says how to save what can be read."""
    path = tmp_path / "store"
    store = Store(str(path))
    store.write(new(*((n, bytes(3000)) for n in range(1, 200))), 0.0)
    store.close()
    content = bytearray(path.read_bytes())
    content[8192:300_000] = bytes(300_000 - 8192)
    path.write_bytes(content)
    with pytest.raises(QueueError, match=r"the store is broken: .* \.recover"):
        Store(str(path)).jobs()


def test_a_full_disk_changes_nothing(tmp_path: Path) -> None:
    """A transaction that does not fit changes nothing, and succeeds when there is room."""
    with mounted(tmp_path / "disk", "2m") as disk:
        store = Store(str(disk / "store"))
        store.write(new((7, b"kept")), 0.0)
        large = Changes(new((9, bytes(500_000))).new, gone=[7])
        with filled(disk), pytest.raises(sqlite3.OperationalError, match="full"):
            store.write(large, 0.0)
        assert store.payloads([7, 9]) == {7: b"kept"}
        store.write(large, 0.0)
        store = again(store)
        assert [each.id for each in store.jobs()] == [9]
        store.close()


def test_a_start_on_a_full_disk(tmp_path: Path) -> None:
    """The jobs can be read, although nothing can be tidied up."""
    with mounted(tmp_path / "disk", "2m") as disk:
        batch = Batch(1, b"w")
        batch.add(job(7))
        store = Store(str(disk / "store"))
        store.write(Changes([job(7), job(8)], batches=[batch]), 0.0)
        store.write(Changes(gone=[7]), 0.0)
        store.close()
        store = Store(store.path)
        with filled(disk):
            assert [each.id for each in store.jobs()] == [8]
        store.close()


def test_a_transaction_that_fails_uses_up_no_slots(tmp_path: Path) -> None:
    """While the disk refuses, a write that is repeated does not make older IDs forgotten."""
    with closing(Store(str(tmp_path / "store"), slots=3)) as store:
        store.write(named((1, b"a", 1), (1, b"b", 2)), 0.0)
        with pytest.raises(sqlite3.IntegrityError):
            store.write(named((1, b"c", 1)), 0.0)
        store.write(named((1, b"c", 3)), 0.0)
        idents = [(1, id) for id in (b"a", b"b", b"c")]
        assert list(known(store, idents, 0.0).values()) == [1, 2, 3]
