"""Replay publishes every message again: byte for byte, in order and in time."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from sbus.cli.main import cli
from sbus.client.blocking import connect
from sbus.errors import UsageError
from sbus.journal.digests import Digest
from sbus.journal.schema import Kind
from sbus.replay import Replay
from sbus.spark.jobs.replay import replay
from sbus.spark.jobs.tables import key_matches, load_rows
from sbus.testing.servers import RunningBus, running_bus

_KEYS = [b"a/b", b"a/\xff\\", "ключ".encode(), b"b\n/c", b"a"]


class _Clock:
    """A clock that a test sets, for the times of a journal (µs)."""

    def __init__(self) -> None:
        self.now = 1_700_000_000_000_000

    def __call__(self) -> int:
        return self.now


@pytest.fixture(scope="module")
def bus() -> Iterator[RunningBus]:
    with running_bus() as running:
        yield running


def _received(bus: RunningBus, expected: int) -> tuple[list[tuple[bytes, bytes]], threading.Thread]:
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


def test_all_messages_in_order_byte_for_byte(spark: Any, bus: RunningBus, new_journal: Any, tmp_path: Any) -> None:
    """Two journals are replayed as one sequence by time, in several parts, with the same bytes."""
    dice = random.Random(6)
    clock = _Clock()
    sent: list[tuple[int, str, int, bytes, bytes]] = []
    journals = [new_journal(name, clock=clock) for name in ("one", "two")]
    for number in range(300):
        clock.now += dice.randrange(1, 1000)
        journal = dice.choice(journals)
        messages = [(dice.choice(_KEYS), dice.randbytes(dice.randrange(200))) for _ in range(dice.randrange(1, 9))]
        sent += [(clock.now, journal.id, journal.next_seq + i, *m) for i, m in enumerate(messages)]
        journal.append(messages)
        if number == 100:
            clock.now += 1000
            journals[0].append_gap(Kind.RECONNECT, {"reason": "a test"})
    for journal in journals:
        journal.close()
    rows = load_rows(spark, journals=[str(tmp_path / "one"), str(tmp_path / "two")])
    found, thread = _received(bus, len(sent))
    with bus.connect() as mine:
        done = replay(rows, mine, speed=None, part_bytes=20_000)
    thread.join()
    assert found == [(key, payload) for *_, key, payload in sorted(sent)]
    assert done.is_complete
    assert (done.messages, done.total) == (len(sent), len(sent))
    assert done.bytes == sum(len(row[4]) for row in sent)
    assert [gap.kind for gap in done.gaps] == ["reconnect"]


@pytest.mark.slow
def test_rhythm_and_pattern(spark: Any, bus: RunningBus, new_journal: Any, tmp_path: Any) -> None:
    """Only matching messages are published, none before it is due, and delays do not add up; digests count."""
    clock = _Clock()
    journal = new_journal(clock=clock)
    for number in range(40):
        journal.append([(b"a/b", b"%d" % number), (b"other", b"")])
        if not number:
            journal.append_digest(b"a/b", Digest(5_000_000, "ab" * 32))
            journal.append_digest(b"other", Digest(5_000_000, "ab" * 32))
        clock.now += 100_000
    journal.close()
    rows = load_rows(spark, journals=[str(tmp_path / "journal")]).where(key_matches("a/"))
    found, thread = _received(bus, 40)
    progress: list[int] = []
    with bus.connect() as mine:
        done = replay(rows, mine, speed=4.0, prefix=b"again/", progress=lambda state: progress.append(state.messages))
    thread.join()
    assert found == [(b"again/a/b", b"%d" % number) for number in range(40)]
    assert done.span == 39 * 100_000
    assert (done.total, done.digests, done.gap_count) == (40, 1, 0)
    assert done.seconds >= 39 * 0.1 / 4
    # Were waits added up, 40 of them would each make it later; the last one is due 975 ms after the first.
    assert done.late_sum >= 0
    assert done.late < 5
    assert progress == sorted(progress)
    assert len(progress) >= 2


def test_it_ends_early_in_order(spark: Any, bus: RunningBus) -> None:
    """A replay that is stopped ends soon, and counts what it has published."""
    rows = spark.sql(
        "SELECT timestamp_micros(id * 1000000000) AS time, 'j' AS journal, id AS seq, 'message' AS kind, "
        "'a' AS key, X'00' AS payload FROM range(1000)"
    )
    seen: list[Replay] = []
    with bus.connect() as mine:
        done = replay(rows, mine, stop=lambda: bool(seen), progress=seen.append)
    assert not done.is_complete
    assert done.messages == 1
    assert done.total == 1000


def test_nothing_to_replay_is_an_error(spark: Any, bus: RunningBus) -> None:
    """A replay without messages, or with a speed that is not positive, is an error."""
    rows = spark.sql(
        "SELECT timestamp_micros(0) AS time, 'j' AS journal, 0L AS seq, 'start' AS kind, '' AS key, X'' AS payload"
    )
    with bus.connect() as mine:
        with pytest.raises(UsageError, match="no message"):
            replay(rows, mine)
        with pytest.raises(UsageError, match="speed"):
            replay(rows, mine, speed=-1)


def test_ctrl_c_ends_the_command(
    spark: Any, bus: RunningBus, new_journal: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While ``sbus spark replay`` waits for a message that is due in an hour, Ctrl-C ends it with a summary."""

    clock = _Clock()
    journal = new_journal(clock=clock)
    journal.append([(b"first", b"")])
    clock.now += 3_600_000_000
    journal.append([(b"last", b"")])
    journal.close()
    monkeypatch.setattr(type(spark), "stop", lambda self: None)  # it is everybody's
    found, thread = _received(bus, 1)

    def interrupt() -> None:
        thread.join()
        os.kill(os.getpid(), signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    monkeypatch.setattr("sbus.cli.main._end_by", lambda number: sys.exit(128 + number))  # not these tests
    arguments = ["--socket", bus.address, "spark", "replay", "--journal", str(tmp_path / "journal"), "--pattern=*"]
    result = CliRunner().invoke(cli, arguments)
    interrupter.join()
    assert result.exit_code == 128 + signal.SIGINT
    assert "published 1 of 2 messages" in result.output
    assert found == [(b"first", b"")]


@pytest.mark.parametrize("speed", ["0", "0.0", "-1", "nan", "inf", "fast"])
def test_a_speed_that_is_none_is_refused(speed):
    """A speed is a positive number or ``max``."""
    result = CliRunner().invoke(cli, ["spark", "replay", "--lake=x", f"--speed={speed}"])
    assert result.exit_code == 2
    assert "is not a speed" in result.output
