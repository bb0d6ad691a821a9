"""``sbus replay``: journals are published again, without Spark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

import sbus
from sbus.cli.main import cli
from sbus.client.blocking.bus import Bus
from sbus.errors import UsageError
from sbus.journal.schema import Kind
from sbus.replay import JournalRows, Replay, Total, publish
from sbus.testing.servers import RunningBus, running_bus
from tests.support.journals import DAMAGE, Clock, NewJournal, damage
from tests.support.replays import check_ctrl_c, check_order, received


@pytest.fixture(scope="module")
def bus():
    with running_bus() as running:
        yield running


def test_all_messages_in_order_byte_for_byte(bus: RunningBus, new_journal: NewJournal, tmp_path: Path) -> None:
    """Journals are replayed as one sequence by time, with the same bytes; gaps are counted."""

    def replay(journals: Sequence[str], mine: Bus) -> Replay:
        rows = JournalRows(journals)
        return publish(rows, rows.total(), mine, speed=None)

    check_order(bus, new_journal, tmp_path, replay)


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


def test_a_message_that_fits_no_packet_is_published(bus: RunningBus, new_journal: NewJournal, tmp_path: Path) -> None:
    """What the recorder has kept of large messages, which went around in sealed memory, is published like that."""
    payload = bytes(range(256)) * 4096
    journal = new_journal()
    journal.append([(b"camera", payload)])
    journal.close()
    with sbus.connect(bus.address, payloads=True) as receiver:
        receiver.subscribe("camera")
        receiver.fence()
        arguments = ["--socket", bus.address, "replay", "--journal", str(tmp_path / "journal"), "--speed=max"]
        result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
        assert result.exit_code == 0
        assert receiver.receive(timeout=10).payload == payload


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


def test_ctrl_c_ends_the_command(bus: RunningBus, new_journal: NewJournal, monkeypatch: pytest.MonkeyPatch) -> None:
    """While ``sbus replay`` waits for a message that is due in an hour, Ctrl-C ends it with a summary."""
    check_ctrl_c(bus, new_journal, monkeypatch, "replay")


@pytest.mark.parametrize("what", DAMAGE)
def test_damaged_journals_are_found_first(bus: RunningBus, what: str, new_journal: NewJournal, tmp_path: Path) -> None:
    """Each damaged journal is reported before the first message, which is then not published."""
    for name in ("a", "b", "c"):
        with new_journal(name) as journal:
            for number in range(3):
                journal.append([(b"damaged/%d" % number, b"")] * 10)
    for name in ("b", "c"):
        damage(tmp_path / name, what)
    with bus.connect() as receiver:
        receiver.subscribe("damaged/")
        receiver.fence()
        arguments = ["--socket", bus.address, "replay", f"--journal={tmp_path}/*", "--speed=max"]
        result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
        receiver.publish("damaged/end", b"")
        assert receiver.receive(timeout=10).key == b"damaged/end"
    assert result.exit_code == 1
    first, second, end = result.stderr.splitlines()
    assert first.startswith(f"sbus: {tmp_path}/b/"), first
    assert second.startswith(f"{tmp_path}/c/"), second
    assert "restore it from a copy" in first
    assert end == "nothing is replayed: a part would be missing"
