"""Subordinate UIDs: the file, overlaps, and changes of the file."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from twisted.logger import ILogObserver, LogEvent, globalLogPublisher
from zope.interface import implementer

from sbus.server.run.subuid import Range, SubordinateIds, flatten, parse

ACCOUNTS = {"alice": 1000, "bob": 1001}


class World:
    """A file of subordinate UIDs, and a clock that a test sets."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now = 0.0
        self.ids = SubordinateIds(str(path), lambda: self.now)

    def write(self, text: str) -> None:
        self.path.write_text(text)
        self.now += 1

    def owners(self, *uids: int) -> list[int]:
        return [self.ids.owner(uid) for uid in uids]


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setattr("sbus.server.run.subuid.pwd.getpwnam", lambda name: SimpleNamespace(pw_uid=ACCOUNTS[name]))
    return World(tmp_path / "subuid")


@pytest.fixture
def warnings():
    """The lines that were logged during the test."""
    lines: list[str] = []

    @implementer(ILogObserver)
    def observe(event: LogEvent) -> None:
        lines.append(event["log_format"].format(**event))

    globalLogPublisher.addObserver(observe)
    yield lines
    globalLogPublisher.removeObserver(observe)


def test_edges_of_a_range(world):
    """The first and the last UID of a range count as its owner; those before and behind it are users of their own."""
    world.write("alice:100000:65536\n1001:165536:2\n")
    assert world.owners(99_999, 100_000, 165_535) == [99_999, 1000, 1000]
    assert world.owners(165_536, 165_537, 165_538) == [1001, 1001, 165_538]
    assert world.owners(0, 1000, 2**32 - 2) == [0, 1000, 2**32 - 2]


def test_overlaps(world):
    """Where ranges overlap the first line counts, also where a later one covers it whole."""
    world.write("alice:200:100\nbob:150:200\n1002:210:5\n")
    assert world.owners(149, 150, 199, 200) == [149, 1001, 1001, 1000]
    assert world.owners(212, 299, 300, 349, 350) == [1000, 1000, 1001, 1001, 350]


def test_one_step(world):
    """An owner who lies in a range of somebody else is not looked up again."""
    world.write("alice:5000:100\n5001:9000:10\n")
    assert world.owners(5001, 9001) == [1000, 5001]


@pytest.mark.parametrize("owner", [0, os.geteuid()])
def test_ranges_of_exempt_users(world, owner):
    """A range of root or of the server's user counts as one user of its own, and those two as themselves."""
    world.write(f"{owner}:100000:65536\nalice:0:10\nalice:{os.geteuid()}:1\n")
    assert world.owners(100_000, 100_001, 165_535, 0, os.geteuid()) == [100_000, 100_000, 100_000, 0, os.geteuid()]


@pytest.mark.parametrize(
    "line",
    [
        "alice",
        "alice:1",
        "alice:1:2:3",
        "alice:x:2",
        "alice:-1:2",
        "alice:1:0",
        "alice:1:",
        "alice: 1:2",
        "alice:4294967290:6",
        "alice:99999999999:1",
        "mallory:1:2",
        ":1:2",
        "\0:1:2",
        "alice:١:2",
        "4294967295:1:2",
        "\udcff:1:2",
    ],
)
def test_bad_lines(world, warnings, line):
    """A bad line is skipped with a warning that has its number, and the other lines count."""
    world.path.write_bytes(f"bob:5000:10\n{line}\nalice:6000:10".encode("utf-8", "surrogateescape"))
    assert world.owners(5001, 6001, 1) == [1001, 1000, 1]
    assert len(warnings) == 1
    assert "line 2" in warnings[0]
    assert warnings[0].endswith("the line is skipped")


def test_many_bad_lines(world, warnings):
    """Ten bad lines are logged, and the number of the others."""
    world.write("bad\n" * 25)
    world.owners(1)
    assert len(warnings) == 11
    assert "15 more bad lines" in warnings[-1]


def test_comments_and_blank_lines(world, warnings):
    """Blank lines and comments are no bad lines."""
    world.write("\n# podman\n  \nalice:5000:10\n")
    assert world.owners(5000) == [1000]
    assert warnings == []


def test_the_last_range_ends_at_the_last_uid(world):
    """A range may reach up to the last UID, 2^32 - 2."""
    world.write("alice:4294967290:5\n")
    assert world.owners(4294967289, 4294967290, 4294967294) == [4294967289, 1000, 1000]


def test_changes(world, warnings):
    """A change of the file counts after a second; an unreadable file is reported once, and what is known stays."""
    assert world.owners(5000) == [5000]
    assert ["cannot be read" in line for line in warnings] == [True]
    world.write("alice:5000:10\n")
    assert world.owners(5000) == [1000]
    world.path.write_text("bob:5000:100\n")
    assert world.owners(5000) == [1000]
    world.now += 1
    assert world.owners(5000) == [1001]
    world.path.unlink()
    for _ in range(3):
        world.now += 1
        assert world.owners(5000) == [1001]
    assert len(warnings) == 2


RANGES = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 30), st.integers(1000, 1005)).map(
        lambda part: Range(part[0], part[0] + part[1], part[2], part[0])
    ),
    max_size=12,
)


@given(RANGES)
def test_flatten(ranges):
    """Flattened ranges are sorted and apart, and give each UID to the first range that has it."""
    flat = flatten(ranges)
    assert all(one.first < one.end for one in flat)
    assert all(one.end <= other.first for one, other in pairwise(flat))
    for uid in range(100):
        first = next(((r.owner, r.name) for r in ranges if r.first <= uid < r.end), None)
        found = next(((r.owner, r.name) for r in flat if r.first <= uid < r.end), None)
        assert found == first


@given(st.text(max_size=60))
def test_any_line(text):
    """Whatever a file says, each line is a range, a complaint or nothing."""

    def find(name: str) -> int:
        raise KeyError(name)

    ranges, complaints = parse(text.split("\n"), find)
    assert len(ranges) + len(complaints) <= len(text.split("\n"))
    for found in ranges:
        assert 0 <= found.first < found.end <= 2**32 - 1
