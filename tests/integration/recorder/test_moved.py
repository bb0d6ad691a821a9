"""A journal that is moved away under a running recorder: each message is in it, or in the one that has its place."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sbus.journal.layout import list_segments
from sbus.journal.writer import JournalWriter
from tests.integration.recorder.test_recorder import details, ends_with, kinds, packets, there, wait_rows
from tests.support.harness import Bus

MOVED = "cannot be written: its directory was moved away or removed: move it back, or make an empty directory there"


def test_it_waits_until_the_journal_is_back(
    bus: Callable[..., Bus], recorder: Callable[..., Any], journal: Path
) -> None:
    """While the directory is away, the recorder says so and keeps its messages; then it goes on in the same journal."""
    client = bus().client()
    process = recorder("--segment-bytes=2000")
    away = journal.with_name("away")
    published = []
    for _ in range(2):
        process.mark()
        published += [client.msg(b"here", b"%d" % i) for i in range(20)]
        wait_rows(journal, ends_with(published[-1]))
        os.rename(journal, away)
        published += [client.msg(b"away", b"%d" % i) for i in range(100)]
        client.sync()
        process.wait_log(MOVED)
        assert not journal.exists()
        os.rename(away, journal)
        process.wait_log("can be written again")
        found = wait_rows(journal, lambda rows: kinds(rows)[-1] == "full")
        assert packets(found) == published
        assert details(found[-1])["reason"].startswith("its directory was moved away")
    assert process.stop() == 0
    assert packets(there(journal)) == published
    assert len(list_segments(str(journal))) > 2


def test_it_begins_a_new_journal_in_an_empty_directory(
    bus: Callable[..., Bus], recorder: Callable[..., Any], journal: Path
) -> None:
    """With a directory in its place, the old journal is closed where it is, and a new one takes what comes after it."""
    client = bus().client()
    process = recorder()
    away = journal.with_name("away")
    published = [client.msg(b"here", b"%d" % i) for i in range(20)]
    wait_rows(journal, ends_with(published[-1]))
    os.rename(journal, away)
    published += [client.msg(b"away", b"%d" % i) for i in range(20)]
    client.sync()
    process.wait_log(MOVED)
    published += [client.msg(b"waits", b"%d" % i) for i in range(20)]
    journal.mkdir(0o700)
    process.wait_log(f"was moved to {away}, and is closed there; a new one begins in its place")
    published.append(client.msg(b"last"))
    new = wait_rows(journal, ends_with(published[-1]))
    old = there(away)
    assert packets(old) + packets(new) == published
    assert all(segment.closed for segment in list_segments(str(away)))
    assert (new[0]["kind"], details(new[0])["ended"]) == ("start", "new")
    assert old[0]["journal"] != new[0]["journal"]
    assert process.stop() == 0
    assert kinds(there(journal))[-1] == "stop"


@pytest.mark.slow
def test_another_directory_with_something_else_is_left_alone(
    bus: Callable[..., Bus], recorder: Callable[..., Any], journal: Path
) -> None:
    """A journal of another recorder in its place is not touched; the messages wait, and the log says for what."""
    client = bus().client()
    process = recorder()
    away = journal.with_name("away")
    client.msg(b"first")
    wait_rows(journal, lambda rows: kinds(rows)[-1:] == ["message"])
    other = journal.with_name("other")
    with JournalWriter.open(other):
        os.rename(journal, away)
        os.rename(other, journal)
        last = client.msg(b"second")
        client.sync()
        process.wait_log("cannot be written: .*writes this journal: stop it, or record into another directory")
        assert there(journal) == []
        os.rename(journal, other)
        os.rename(away, journal)
        wait_rows(journal, lambda rows: packets(rows)[-1:] == [last] and kinds(rows)[-1] == "full")
    assert process.stop() == 0


@pytest.mark.slow
def test_it_stops_while_the_journal_is_away(
    bus: Callable[..., Bus], recorder: Callable[..., Any], journal: Path
) -> None:
    """A recorder that is stopped then writes what waits to where the journal is now."""
    client = bus().client()
    process = recorder()
    away = journal.with_name("away")
    os.rename(journal, away)
    published = [client.msg(b"key", b"%d" % i) for i in range(20)]
    client.sync()
    process.wait_log(MOVED)
    assert process.stop() == 0
    assert packets(there(away)) == published
    assert kinds(there(away)) == ["start", "message", "stop"]
    assert not journal.exists()
