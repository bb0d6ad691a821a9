"""The commit of the lake: wherever it is interrupted, each batch is in the lake exactly once in the end."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbus.errors import LakeError
from sbus.journal import disk
from sbus.lake import plain
from sbus.spark.jobs.lake import Lake
from tests.support.examples import examples

HOURS = [f"date=2026-01-{day:02}/hour={hour:02}" for day in (30, 31) for hour in (0, 23)]

Batch = dict[str, str]
"""The content of a batch, by hour."""


@pytest.fixture(scope="module", autouse=True)
def no_waiting_for_the_disk() -> Iterator[None]:
    """Do not sync: a killed process loses no written data, so the tests need not wait for the disk."""
    with mock.patch.object(os, "fsync", return_value=None):
        yield


class Killed(BaseException):
    """Stands for SIGKILL: no code of the package catches it."""


@contextmanager
def killed_after(operations: int) -> Iterator[list[int]]:
    """Let a number of file operations succeed and none after that; yield a list with the number that is left."""
    left = [operations]

    def counting(operation):
        def run(*args, **kwargs):
            if not left[0]:
                raise Killed
            left[0] -= 1
            return operation(*args, **kwargs)

        return run

    with (
        mock.patch.multiple(
            disk,
            replace=counting(disk.replace),
            remove=counting(disk.remove),
            sync_directory=counting(disk.sync_directory),
        ),
        mock.patch.multiple(
            plain,
            _move=counting(plain._move),
            _sync=counting(plain._sync),
        ),
        mock.patch.multiple(os, mkdir=counting(os.mkdir), unlink=counting(os.unlink)),
    ):
        yield left


def put(lake: Lake, number: int, batch: Batch) -> None:
    """Write a batch as Spark would, and commit it."""
    (lake.checkpoint / "offsets").mkdir(parents=True, exist_ok=True)  # Spark writes down first what it is about to do
    staged = Path(tempfile.mkdtemp(dir=lake.table.state.staging))
    for hour, text in batch.items():
        path = staged / hour / "part-00000-0123.c000.zstd.parquet"
        path.parent.mkdir(parents=True)
        path.write_text(text)
        path.with_name(f".{path.name}.crc").write_text("a checksum of Hadoop's")
    lake.table.commit(number, staged)


def content(lake: Lake) -> dict[str, str]:
    """The content of the lake as readers see it."""
    return {
        str(path.relative_to(Path(lake.location))): path.read_text()
        for path in Path(lake.location).rglob("*")
        if path.is_file()
    }


def expected(batches: list[Batch]) -> dict[str, str]:
    return {
        f"{hour}/{number:010}.parquet": text for number, batch in enumerate(batches) for hour, text in batch.items()
    }


batches = st.lists(
    st.dictionaries(st.sampled_from(HOURS), st.text("abc", min_size=1, max_size=3)), min_size=1, max_size=4
)


@given(
    first=batches,
    second=batches,
    kills=st.lists(st.lists(st.integers(0, 40), max_size=2), min_size=8, max_size=8),
    back=st.integers(0, 3),
)
@settings(max_examples=examples(150))
def test_a_killed_commit_is_made_good_by_any_later_one(first, second, kills, back):
    """Batches are killed at any file operation, some of them repeatedly. Then what Spark knew of the last ones is
    lost, so that other rows get their numbers: in the end, the lake has what was committed last, and nothing else.
    """
    directory = Path(tempfile.mkdtemp())
    lake = Lake(directory / "lake")  # its state is beside it
    kept = first[: len(first) - min(back, len(first))]
    for (number, batch), operations in zip([*enumerate(first), *enumerate(second, len(kept))], kills, strict=False):
        for count in operations:
            with lake.table.writing(), suppress(Killed), killed_after(count):
                put(lake, number, batch)
        with lake.table.writing() as files:
            assert lake.table.last_batch(number - 1, files) == number - 1  # no archive is refused
            put(lake, number, batch)
    assert content(lake) == expected(kept + second)
    assert not list(lake.table.state.staging.iterdir())
    shutil.rmtree(directory)


def test_every_operation_of_a_commit_may_be_the_last(tmp_path):
    """A batch that replaces one with other hours survives a kill before each of its file operations."""
    old: Batch = {HOURS[0]: "old", HOURS[1]: "old"}
    new: Batch = {HOURS[1]: "new", HOURS[2]: "new"}
    for operations in range(100):
        lake = Lake(tmp_path / str(operations))
        with lake.table.writing():
            put(lake, 0, {HOURS[0]: "before"})
            put(lake, 1, old)
            with killed_after(operations) as left, suppress(Killed):
                put(lake, 1, new)
            is_through = bool(left[0])
            assert lake.table.last_batch(0, lake.table.files()) == 0
            put(lake, 1, new)
        assert content(lake) == expected([{HOURS[0]: "before"}, new])
        if is_through:
            break
    assert operations > 10


def test_lists_of_files_do_not_pile_up(tmp_path):
    """The manifests of old batches are removed, and their files stay."""
    lake = Lake(tmp_path / "lake")
    with lake.table.writing():
        for number in range(103):
            put(lake, number, {HOURS[0]: str(number)})
    assert len(list((lake.table.state.directory / "batches").iterdir())) == 100
    assert len(content(lake)) == 103


@pytest.mark.parametrize("name", ["{precious}", "../precious", "date=2026-01-31/hour=00/../../../precious", 7])
def test_a_list_of_files_cannot_have_others_removed(tmp_path, name):
    """A manifest that its owner has changed makes nobody remove what is no file of a batch: root may run an archive."""
    precious = tmp_path / "precious"
    precious.write_bytes(b"of somebody else")
    lake = Lake(tmp_path / "lake")
    with lake.table.writing():
        put(lake, 0, {HOURS[0]: "rows"})
        names = [name.format(precious=precious) if isinstance(name, str) else name]
        (lake.table.state.directory / "batches/0000000099.json").write_text(json.dumps({"files": names}))
        with pytest.raises(LakeError, match=r"0000000099.json: it does not list files of a batch: restore"):
            put(lake, 1, {HOURS[0]: "more"})
    assert precious.exists()


@pytest.mark.parametrize("floor", ["{}", '{"batch": null}', '{"batch": "many"}', '{"batch": [1]}', '{"batch": 1e400}'])
def test_a_floor_that_names_no_batch(tmp_path, floor):
    """The error for a damaged ``floor.json`` names the file and the remedy, and no batch is committed."""
    lake = Lake(tmp_path / "lake")
    with lake.table.writing():
        put(lake, 0, {HOURS[0]: "rows"})
        (lake.table.state.directory / "floor.json").write_text(floor)
        with pytest.raises(LakeError, match=r"floor.json: it names no batch: restore lake and state from one copy"):
            put(lake, 1, {HOURS[0]: "more"})
    assert list(content(lake).values()) == ["rows"]


def test_two_jobs_cannot_write_one_lake(tmp_path):
    """A second job is refused; after the first has ended, another one can write."""
    lake = Lake(tmp_path / "lake")
    with (
        lake.table.writing(),
        pytest.raises(LakeError, match="another job writes to this lake"),
        Lake(tmp_path / "lake").table.writing(),
    ):
        pass
    with lake.table.writing():
        pass


def test_a_lake_without_its_state_is_not_written(tmp_path):
    """A lake without a checkpoint is refused, because new batches would replace the files that it has."""
    lake = Lake(tmp_path / "lake")
    with lake.table.writing():
        put(lake, 0, {HOURS[0]: "rows"})
    shutil.rmtree(lake.checkpoint)
    with pytest.raises(LakeError, match=r"nothing says from where .*checkpoint is missing"), lake.table.writing():
        pass


def test_only_its_owner_may_look_into_a_lake(tmp_path):
    """The files of a lake are as private as the journal, whatever the umask."""
    before = os.umask(0)
    try:
        with Lake(tmp_path / "lake").table.writing():
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "lake").stat().st_mode & 0o777 == 0o700


def test_a_url_is_no_lake():
    """Plain Parquet on a URL is refused with the remedy, because an object store has no atomic rename."""
    with pytest.raises(LakeError, match="mount it"):
        Lake("s3://bucket/lake", format="parquet")


def test_the_identity_goes_with_the_lake(tmp_path: Path) -> None:
    """A lake keeps its identity for good, also after it was moved; another lake has another one."""
    lake = Lake(tmp_path / "lake")
    with lake.table.writing():
        first = lake.table.state.identity("parquet")
        assert lake.table.state.identity("parquet") == first
    (tmp_path / "lake").rename(tmp_path / "moved")
    (tmp_path / "lake.sbus").rename(tmp_path / "moved.sbus")
    with Lake(tmp_path / "moved").table.writing(), Lake(tmp_path / "other").table.writing():
        assert Lake(tmp_path / "moved").table.state.identity("parquet") == first
        assert Lake(tmp_path / "other").table.state.identity("parquet") != first
