"""Streaming queries on real Spark: restarts with a checkpoint, new journals and segments; and publishing to a bus."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from sbus.journal.consumers import advance, consumers
from sbus.journal.layout import list_segments
from sbus.journal.retention import retain
from sbus.journal.writer import JournalWriter
from sbus.spark import lag
from sbus.spark.runtime import early_worker
from sbus.testing import RunningBus
from tests.support.journals import NewJournal
from tests.support.waiting import wait_until

TIMEOUT = 60


class Query:
    """A streaming query that can be started again, and all rows that it has read.

    :ivar batches: the payloads of each batch, by its number.
    """

    def __init__(self, spark: SparkSession, checkpoint: Path, **options: str) -> None:
        self.batches: dict[int, list[str]] = {}
        self._frame = spark.readStream.format("sbus").options(**options).schema("payload BINARY").load()
        self._checkpoint = checkpoint
        self._running: StreamingQuery | None = None
        self.progress: list[Any] = []

    def writer(self, keep: Callable[[DataFrame, int], Any] | None = None) -> DataStreamWriter:
        return self._frame.writeStream.foreachBatch(keep or self._keep).option(
            "checkpointLocation", str(self._checkpoint)
        )

    def _keep(self, batch: DataFrame, number: int) -> None:
        self.batches[number] = [row.payload.decode() for row in batch.collect()]

    def run(self, keep: Callable[[DataFrame, int], Any] | None = None) -> list[list[str]]:
        """Read everything that is there; return the batches of this run that have rows."""
        self.batches.clear()
        running = self.writer(keep).trigger(availableNow=True).start()
        assert running.awaitTermination(TIMEOUT)
        self.progress = running.recentProgress
        return [rows for _, rows in sorted(self.batches.items()) if rows]

    def start(self) -> StreamingQuery:
        """Follow the journals until `stop`."""
        self._running = self.writer().start()
        return self._running

    def stop(self) -> None:
        if self._running is not None:
            self._running.stop()


@pytest.fixture
def new_query(spark: SparkSession, tmp_path: Path) -> Iterator[Callable[..., Query]]:
    """Make a `Query` with these options; all queries of a test share a checkpoint."""
    mine: list[Query] = []

    def make(**options: str) -> Query:
        mine.append(Query(spark, tmp_path / "checkpoint", **options))
        return mine[-1]

    yield make
    for query in mine:
        query.stop()


def record(journal: JournalWriter, *payloads: str) -> None:
    journal.append([(b"k", payload.encode()) for payload in payloads])
    journal.sync()


@pytest.mark.slow
def test_what_was_missed(new_journal: NewJournal, new_query: Callable[..., Query]):
    """A restarted query reads exactly the rows since then, across new segments and a restart of the recorder."""
    journal = new_journal()
    record(journal, "a", "b")
    journal.append([(b"k", b"c")])  # not safe yet, so not seen
    query = new_query(journal=journal.directory, gaps="false", maxRowsPerTrigger="2")
    assert query.run() == [["a", "b"]]
    journal.roll()
    record(journal, "d", "e")
    journal.close()
    again = new_journal()
    record(again, "f")
    assert query.run() == [["c", "d"], ["e", "f"]]
    assert [lag(progress)[journal.id] for progress in query.progress][-2:] == [2, 0]
    assert query.run() == []


@pytest.mark.slow
def test_a_batch_that_failed_is_read_again(new_journal: NewJournal, new_query: Callable[..., Query]):
    """A batch that failed comes again with the same number and rows, although there are new rows."""
    journal = new_journal()
    record(journal, "a", "b")
    query = new_query(journal=journal.directory)
    failed: dict[int, int] = {}

    def fail(batch: DataFrame, number: int) -> None:
        failed[number] = batch.count()
        assert not failed[number]

    with pytest.raises(PySparkException):
        query.run(fail)
    record(journal, "c")
    query.run()
    assert failed == {0: 0, 1: 2}
    assert query.batches == {1: ["a", "b"], 2: ["c"]}


def commands(word: bytes) -> list[bytes]:
    """The command lines of the processes that have a word in them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            found.append(path.read_bytes())
    return [command for command in found if word in command]


@pytest.mark.slow
def test_following(new_journal: NewJournal, new_query: Callable[..., Query], tmp_path: Path):
    """A running query sees new rows, also in new segments and new journals."""
    first = new_journal("a/journal", segment_bytes=1000)
    record(first, "before")
    query = new_query(journal=f"{tmp_path}/*/journal", startingOffsets="latest", consumer="follower")
    running = query.start()
    running.processAllAvailable()
    for i in range(3):
        record(first, f"{i}" + "." * 500)
    second = new_journal("b/journal")
    record(second, "new")
    running.processAllAvailable()  # the new one joins,
    early = str(Path(early_worker.__file__)).encode()
    assert any(early in command for command in commands(b"python_streaming_source_runner")), (
        "Spark starts the worker of a stream in another way than sbus/spark/runtime/early_worker.py expects"
    )
    running.processAllAvailable()  # and is read
    record(second, "newer")
    running.processAllAvailable()
    query.stop()
    read = sorted(row.rstrip(".") for rows in query.batches.values() for row in rows)
    assert read == ["0", "1", "2", "new", "newer"]
    progress = running.lastProgress
    assert progress is not None
    assert f'"{second.id}": 2' in str(progress.sources[0].endOffset)
    # The end of a batch is reported when the next one is planned.
    assert [consumers(journal.directory) for journal in (first, second)] == [{"follower": 4}, {"follower": 1}]


@pytest.mark.slow
def test_a_consumer(new_journal: NewJournal, new_query: Callable[..., Query]):
    """Retention waits for a stream that is a consumer, also while it is stopped or its batches fail."""
    journal = new_journal()

    def add(payload: str) -> None:
        record(journal, payload)
        journal.roll()

    def segments() -> int:
        retain(journal.directory, keep_bytes=0, warn=lambda _: None)
        return len(list_segments(journal.directory))

    for payload in "abc":
        add(payload)
    advance(journal.directory, "other", 3)  # a consumer that does not hold anything
    query = new_query(journal=journal.directory, gaps="false", consumer="mine")

    def fail(batch: DataFrame, number: int) -> None:
        assert not batch.count()

    with pytest.raises(PySparkException):
        query.run(fail)
    assert consumers(journal.directory)["mine"] == 0
    everything = len(list_segments(journal.directory))
    assert segments() == everything
    assert query.run() == [["a", "b", "c"]]
    assert consumers(journal.directory)["mine"] == journal.next_seq
    assert segments() < everything
    for payload in "de":
        add(payload)
    advance(journal.directory, "other", journal.next_seq)
    assert segments() >= 2
    assert query.run() == [["d", "e"]]
    assert segments() == 1


HANGS = """
import sys, time
from pathlib import Path
from sbus.spark import get_session

journal, checkpoint, marker = sys.argv[1:]

def hang(batch, number):
    if batch.count():
        Path(marker).touch()
        time.sleep(3600)

rows = get_session(master="local[1]").readStream.format("sbus").option("consumer", "mine").load(journal)
writer = rows.writeStream.foreachBatch(hang).option("checkpointLocation", checkpoint)
writer.trigger(availableNow=True).start().awaitTermination()
"""


@pytest.mark.slow
def test_a_consumer_that_is_killed(new_journal: NewJournal, new_query: Callable[..., Query], tmp_path: Path):
    """What a killed stream has not done stays, and it goes on there; with another checkpoint its name is refused."""
    journal = new_journal()
    record(journal, "a", "b")
    journal.roll()
    record(journal, "c")
    advance(journal.directory, "other", 3)
    marker = tmp_path / "marker"
    command = [sys.executable, "-c", HANGS, journal.directory, str(tmp_path / "checkpoint"), str(marker)]
    with subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL) as killed:
        try:
            wait_until(marker.exists, timeout=4 * TIMEOUT)  # a JVM starts
        finally:
            os.killpg(killed.pid, signal.SIGKILL)
    assert consumers(journal.directory) == {"mine": 0, "other": 3}
    assert retain(journal.directory, keep_bytes=0, warn=lambda _: None) == []
    query = new_query(journal=journal.directory, gaps="false", consumer="mine")
    assert query.run() == [["a", "b", "c"]]
    assert len(retain(journal.directory, keep_bytes=0, warn=lambda _: None)) == 1
    shutil.rmtree(tmp_path / "checkpoint")
    with pytest.raises(PySparkException, match=r"JournalError: .*the consumer 'mine' is another lake or stream"):
        query.run()


# --- publishing ---------------------------------------------------------------------------------------------


def test_there_and_back(spark: SparkSession, new_journal: NewJournal, sbus_bus: RunningBus):
    """Recorded messages can be published again unchanged: all keys and payloads, in order."""
    journal = new_journal()
    messages = [(key, b"%d" % i) for i, key in enumerate([b"a", b"\xff\\", "ä".encode(), b""] * 50)]
    journal.append(messages)
    journal.sync()
    frame = spark.read.format("sbus").option("journal", journal.directory).schema("key STRING, payload BINARY").load()
    with sbus_bus.connect() as bus:
        bus.subscribe(b"")
        bus.fence(TIMEOUT)
        frame.write.format("sbus").option("socket", sbus_bus.address).mode("append").save()
        assert [tuple(bus.receive(TIMEOUT)) for _ in messages] == messages


@pytest.mark.slow
def test_what_cannot_be_published(spark: SparkSession, sbus_bus: RunningBus):
    """A NULL, a wrong column, a wrong option or a missing bus fails the query with the reason."""
    frame = spark.sql("SELECT CAST(NULL AS STRING) AS key, 'x' AS payload")
    good = spark.sql("SELECT 'k' AS key, 'x' AS payload")
    wrong = [
        (frame, {"socket": sbus_bus.address}, "append", r"UsageError: .*column key is NULL in 1 of 1 rows"),
        (good.selectExpr("key"), {"socket": "/nowhere"}, "append", r"UsageError: .*there is no column payload"),
        (good, {"sockt": "/x"}, "append", r"UsageError: .*no option 'sockt'.*did you mean socket"),
        (good, {}, "append", r"UsageError: .*the option socket: name the bus"),
        (good, {"socket": "/nowhere"}, "overwrite", r"UsageError: .*use mode\('append'\)"),
        (good, {"socket": "/nowhere"}, "append", r"ConnectError: no bus at /nowhere"),
    ]
    for rows, options, mode, words in wrong:
        with pytest.raises(PySparkException, match=rf"sbus\.errors\.{words}"):
            rows.write.format("sbus").options(**options).mode(mode).save()


def test_mistakes_in_sql(spark: SparkSession, new_journal: NewJournal, capfd: pytest.CaptureFixture[str]):
    """A mistake in SQL is an error without frames of Python, and nothing about it is printed beside that."""
    journal = new_journal()
    journal.append([(b"k", b"")])
    journal.sync()
    spark.read.format("sbus").load(journal.directory).createOrReplaceTempView("right")
    wrong = f"CREATE TABLE wrong USING sbus OPTIONS (journal '{journal.directory}', patern 'x')"
    for query, words in (("SELECT nokey FROM right", "nokey"), (wrong, "UsageError: .*did you mean pattern")):
        with pytest.raises(AnalysisException, match=words) as found:
            spark.sql(query)
        assert "Traceback" not in str(found.value)
    assert not re.search("nokey|patern", capfd.readouterr().err)
