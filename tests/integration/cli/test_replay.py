"""``sbus replay``: journals are published again, without Spark."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from sbus.cli.main import cli
from sbus.client.blocking import connect
from sbus.errors import UsageError
from sbus.journal.schema import Kind
from sbus.replay import JournalRows, Replay, Total, publish
from sbus.testing.servers import RunningBus, running_bus
from tests.support.journals import Clock, NewJournal

KEYS = [b"a/b", b"a/\xff\\", "ключ".encode(), b"b\n/c", b"a"]


@pytest.fixture(scope="module")
def bus():
    with running_bus() as running:
        yield running


def received(bus: RunningBus, expected: int) -> tuple[list[tuple[bytes, bytes]], threading.Thread]:
    """Receive a number of messages in a thread, which is subscribed when this returns."""
    found: list[tuple[bytes, bytes]] = []
    ready = threading.Event()

    def receive() -> None:
        with connect(bus.address) as mine:
            mine.flood_control(hard="block")
            mine.subscribe("")
            mine.fence()
            ready.set()
            while len(found) < expected:
                found.extend((m.key, m.payload) for m in mine.get_many(60))

    thread = threading.Thread(target=receive)
    thread.start()
    assert ready.wait(30)
    return found, thread


def test_all_messages_in_order_byte_for_byte(bus: RunningBus, new_journal: NewJournal, tmp_path: Path) -> None:
    """Two journals of several segments are replayed as one sequence by time, with the same bytes; gaps are counted."""
    dice = random.Random(6)
    clock = Clock()
    sent: list[tuple[int, str, int, bytes, bytes]] = []
    journals = [new_journal(name, clock=clock, segment_bytes=20_000) for name in ("one", "two")]
    for number in range(300):
        clock.time += dice.randrange(1, 1000)
        journal = dice.choice(journals)
        messages = [(dice.choice(KEYS), dice.randbytes(dice.randrange(200))) for _ in range(dice.randrange(1, 9))]
        sent += [(clock.time, journal.id, journal.next_seq + i, *m) for i, m in enumerate(messages)]
        journal.append(messages)
        if number == 100:
            clock.time += 1000
            journals[0].append_gap(Kind.RECONNECT, {"reason": "a test"})
    for journal in journals:
        journal.close()
    rows = JournalRows([str(tmp_path / "one"), str(tmp_path / "two")])
    found, thread = received(bus, len(sent))
    with bus.connect() as mine:
        done = publish(rows, rows.total(), mine, speed=None)
    thread.join()
    assert found == [(key, payload) for *_, key, payload in sorted(sent)]
    assert done.is_complete
    assert (done.messages, done.total, done.span) == (len(sent), len(sent), sent[-1][0] - sent[0][0])
    assert done.bytes == sum(len(row[4]) for row in sent)
    assert [gap.kind for gap in done.gaps] == ["reconnect"]


def test_the_command_selects_by_time_and_pattern(bus: RunningBus, new_journal: NewJournal, tmp_path: Path) -> None:
    """Only messages of the period whose keys match are published, with the prefix; the summary counts them."""
    clock = Clock()
    journal = new_journal(clock=clock)
    for number in range(10):
        journal.append([(b"a/b", b"%d" % number), (b"other", b"")])
        clock.time += 1_000_000
    journal.close()
    found, thread = received(bus, 4)
    period = ["--since=2023-11-14T22:13:22", "--until=2023-11-14T22:13:26"]
    arguments = ["--journal", str(tmp_path / "journal"), "--pattern=a/", "--speed=max", "--prefix=again/", *period]
    result = CliRunner().invoke(cli, ["--socket", bus.address, "replay", *arguments], catch_exceptions=False)
    thread.join()
    assert result.exit_code == 0
    assert found == [(b"again/a/b", b"%d" % number) for number in range(2, 6)]
    assert "published 4 of 4 messages" in result.output


def test_it_ends_early_in_order(bus: RunningBus) -> None:
    """A replay that is stopped ends soon, and counts what it has published."""
    seen: list[Replay] = []
    rows = [(second * 1_000_000_000, "message", b"a", b"") for second in range(1000)]
    with bus.connect() as mine:
        done = publish(lambda: rows, Total(1000, 0, rows[-1][0]), mine, stop=lambda: bool(seen), progress=seen.append)
    assert (done.is_complete, done.messages, done.total) == (False, 1, 1000)


def test_nothing_to_replay_is_an_error(bus: RunningBus, new_journal: NewJournal, tmp_path: Path) -> None:
    """No message, no journal, and a speed that is not positive are errors, each with a remedy."""
    journal = new_journal()
    journal.append_gap(Kind.START, {"ended": "new"})
    journal.close()
    rows = JournalRows([str(tmp_path / "journal")])
    with bus.connect() as mine:
        with pytest.raises(UsageError, match="no message"):
            publish(rows, rows.total(), mine)
        with pytest.raises(UsageError, match="speed"):
            publish(rows, rows.total(), mine, speed=-1)
    result = CliRunner().invoke(cli, ["--socket", bus.address, "replay"])
    assert result.exit_code == 2
    assert "for a lake, use sbus spark replay" in result.output


def test_ctrl_c_ends_the_command(
    bus: RunningBus, new_journal: NewJournal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While ``sbus replay`` waits for a message that is due in an hour, Ctrl-C ends it with a summary."""
    clock = Clock()
    journal = new_journal(clock=clock)
    journal.append([(b"first", b"")])
    clock.time += 3_600_000_000
    journal.append([(b"last", b"")])
    journal.close()
    found, thread = received(bus, 1)

    def interrupt() -> None:
        thread.join()
        os.kill(os.getpid(), signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    monkeypatch.setattr("sbus.cli.main._end_by", lambda number: sys.exit(128 + number))  # not these tests
    result = CliRunner().invoke(cli, ["--socket", bus.address, "replay", "--journal", str(tmp_path / "journal")])
    interrupter.join()
    assert result.exit_code == 128 + signal.SIGINT
    assert "published 1 of 2 messages" in result.output
    assert found == [(b"first", b"")]
