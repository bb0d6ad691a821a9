"""What a replay has to do, whichever reads the rows, plain Python or Spark: the bodies of tests that both have."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from sbus.cli.main import cli
from sbus.client.blocking import connect
from sbus.client.blocking.bus import Bus
from sbus.journal.schema import Kind
from sbus.replay import Replay
from sbus.testing.servers import RunningBus
from tests.support.journals import Clock, NewJournal

__all__ = ["check_ctrl_c", "check_order", "received"]

_KEYS = [b"a/b", b"a/\xff\\", "ключ".encode(), b"b\n/c", b"a"]


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


def check_order(
    bus: RunningBus, new_journal: NewJournal, tmp_path: Path, replay: Callable[[Sequence[str], Bus], Replay]
) -> None:
    """Two journals of several segments are replayed as one sequence by time, with the same bytes; gaps are counted.

    :param replay: publishes the rows of journals as quickly as it can.
    """
    dice = random.Random(6)
    clock = Clock()
    sent: list[tuple[int, str, int, bytes, bytes]] = []
    journals = [new_journal(name, clock=clock, segment_bytes=20_000) for name in ("one", "two")]
    for number in range(300):
        clock.time += dice.randrange(1, 1000)
        journal = dice.choice(journals)
        messages = [(dice.choice(_KEYS), dice.randbytes(dice.randrange(200))) for _ in range(dice.randrange(1, 9))]
        sent += [(clock.time, journal.id, journal.next_seq + i, *m) for i, m in enumerate(messages)]
        journal.append(messages)
        if number == 100:
            clock.time += 1000
            journals[0].append_gap(Kind.RECONNECT, {"reason": "a test"})
    for journal in journals:
        journal.close()
    found, thread = received(bus, len(sent))
    with bus.connect() as mine:
        done = replay([str(tmp_path / "one"), str(tmp_path / "two")], mine)
    thread.join()
    assert found == [(key, payload) for *_, key, payload in sorted(sent)]
    assert done.is_complete
    assert (done.messages, done.total, done.span) == (len(sent), len(sent), sent[-1][0] - sent[0][0])
    assert done.bytes == sum(len(row[4]) for row in sent)
    assert [gap.kind for gap in done.gaps] == ["reconnect"]


def check_ctrl_c(bus: RunningBus, new_journal: NewJournal, monkeypatch: pytest.MonkeyPatch, *command: str) -> None:
    """While a command waits for a message that is due in an hour, Ctrl-C ends it with a summary."""
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
    monkeypatch.setattr("sbus.cli.main.end_by", lambda number: sys.exit(128 + number))  # not these tests
    result = CliRunner().invoke(cli, ["--socket", bus.address, *command, "--journal", str(journal.directory)])
    interrupter.join()
    assert result.exit_code == 128 + signal.SIGINT
    assert "published 1 of 2 messages" in result.output
    assert found == [(b"first", b"")]
