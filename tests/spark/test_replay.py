"""Replay publishes every message again: byte for byte, in order and in time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from sbus.cli.main import cli
from sbus.errors import UsageError
from sbus.journal.digests import Digest
from sbus.replay import Replay
from sbus.spark.jobs.replay import replay
from sbus.spark.jobs.tables import key_matches, load_rows
from sbus.testing.servers import RunningBus, running_bus
from tests.support.journals import Clock
from tests.support.replays import check_ctrl_c, check_order, received


@pytest.fixture(scope="module")
def bus() -> Iterator[RunningBus]:
    with running_bus() as running:
        yield running


def test_all_messages_in_order_byte_for_byte(spark: Any, bus: RunningBus, new_journal: Any, tmp_path: Any) -> None:
    """Journals are replayed as one sequence by time, in several parts, with the same bytes; gaps are counted."""
    check_order(
        bus,
        new_journal,
        tmp_path,
        lambda journals, mine: replay(load_rows(spark, journals=journals), mine, speed=None, part_bytes=20_000),
    )


@pytest.mark.slow
def test_rhythm_and_pattern(spark: Any, bus: RunningBus, new_journal: Any, tmp_path: Any) -> None:
    """Only matching messages are published, none before it is due, and delays do not add up; digests count."""
    clock = Clock()
    journal = new_journal(clock=clock)
    for number in range(40):
        journal.append([(b"a/b", b"%d" % number), (b"other", b"")])
        if not number:
            journal.append_digest(b"a/b", Digest(5_000_000, "ab" * 32))
            journal.append_digest(b"other", Digest(5_000_000, "ab" * 32))
        clock.time += 100_000
    journal.close()
    rows = load_rows(spark, journals=[str(tmp_path / "journal")]).where(key_matches("a/"))
    found, thread = received(bus, 40)
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_ctrl_c_ends_the_command(
    spark: Any, bus: RunningBus, new_journal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While ``sbus spark replay`` waits for a message that is due in an hour, Ctrl-C ends it with a summary."""
    monkeypatch.setattr(type(spark), "stop", lambda self: None)  # it is everybody's
    check_ctrl_c(bus, new_journal, monkeypatch, "spark", "replay", "--pattern=*")


@pytest.mark.parametrize("speed", ["0", "0.0", "-1", "nan", "inf", "fast"])
def test_a_speed_that_is_none_is_refused(speed):
    """A speed is a positive number or ``max``."""
    result = CliRunner().invoke(cli, ["spark", "replay", "--lake=x", f"--speed={speed}"])
    assert result.exit_code == 2
    assert "is not a speed" in result.output
