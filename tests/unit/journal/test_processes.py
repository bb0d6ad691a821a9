"""A process writes a journal and is killed at any moment, while others read it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from sbus.errors import JournalLocked
from sbus.journal.reader import JournalReader
from sbus.journal.verify import verify
from sbus.journal.writer import JournalWriter
from tests.support.journals import rows

TIMEOUT = 20.0
WRITER = """
import sys
from sbus.journal.writer import JournalWriter
# The standard output is for sequence numbers. A killed writer may leave half a batch, which is worth a warning.
journal = JournalWriter.open(sys.argv[1], segment_bytes=10000, warn=lambda text: print(text, file=sys.stderr))
while True:
    for _ in range(3):
        first = journal.next_seq
        journal.append([(b"k", b"%d" % seq) for seq in range(first, first + 7)])
    journal.sync()
    print(journal.next_seq, flush=True)
"""


@pytest.mark.parametrize("lives", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_killed(tmp_path, lives):
    """Readers see rows without holes while the process writes; after it was killed, all synced rows are there."""
    safe = 0
    for _ in range(lives):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE) as writer:
            assert writer.stdout
            safe = int(writer.stdout.readline())
            end = safe
            until, before = time.monotonic() + 0.1, len(JournalReader(tmp_path).segments())
            while time.monotonic() < until or len(JournalReader(tmp_path).segments()) < before + 2:
                assert time.monotonic() < until + TIMEOUT
                start, end = end, JournalReader(tmp_path).end()
                assert [(row["seq"], row["payload"]) for row in rows(tmp_path, start, end)] == [
                    (seq, b"%d" % seq) for seq in range(start, end)
                ]
            writer.kill()
            promised = writer.stdout.read().split(b"\n")
            safe = max([safe, end, *map(int, filter(None, promised[:-1]))])
        assert len(rows(tmp_path)) >= safe
    with JournalWriter.open(tmp_path) as journal:
        assert journal.ended == "crash"
        assert journal.next_seq >= safe
    assert [row["payload"] for row in rows(tmp_path)] == [b"%d" % seq for seq in range(journal.next_seq)]
    assert len(JournalReader(tmp_path).segments()) > lives + 1
    problems: list[str] = []
    for found in verify(tmp_path, problems.append):
        problems += found.problems
    assert problems == []


def test_two_writers(tmp_path):
    """A second writer is refused while the first one lives, and admitted however the first one ends."""
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout
        writer.stdout.readline()
        with pytest.raises(JournalLocked, match=f"process {writer.pid} writes this journal: stop it"):
            JournalWriter.open(tmp_path)
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        JournalWriter.open(tmp_path).close()
