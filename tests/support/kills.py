"""Kill an archive and the writer of its journal, again and again; run as a program, which forks them.

::

    python -m tests.support.kills SEED KILLS FORMAT JOURNAL LAKE
"""

from __future__ import annotations

import itertools
import operator
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from functools import partial

from sbus.journal.writer import JournalWriter
from sbus.lake.archive import Archive
from sbus.lake.checkpoint import Checkpoint
from sbus.lake.opening import open_table
from tests.support.waiting import wait_until

TIMEOUT = 60.0
SPEED = 500
"""An hour passes in seven seconds."""


def record(directory: str, began: int) -> None:
    """Write without end, in small batches and segments."""
    journal = JournalWriter.open(
        directory, segment_bytes=200_000, clock=lambda: began + SPEED * (time.time_ns() // 1000 - began)
    )
    for number in itertools.count():
        journal.append([(b"a/%d" % (row % 7), b"%d %d" % (number, row)) for row in range(50)])
        if number % 3 == 0:
            journal.sync()
        time.sleep(0.01)


def archive(journal: str, lake: str, format_: str) -> None:
    """Archive without end, some batches in pieces."""
    with Archive([journal], open_table(lake, format=format_), every=0.02, max_rows=700) as job:
        while True:
            job.wait(0.01)


def in_child(work: Callable[[], None]) -> int:
    """Run something in a process of its own; return its ID."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as e:
            print(f"{type(e).__name__}: {e}", file=sys.stderr, flush=True)
        finally:
            os._exit(1)
    return pid


def main(seed: int, kills: int, format_: str, journal: str, lake: str) -> None:
    chance = random.Random(seed)
    JournalWriter.open(journal).close()
    began = time.time_ns() // 1000
    running: dict[str, int] = {}
    checkpoint = Checkpoint(open_table(lake, format=format_).state.checkpoint)
    work = {"recorder": lambda: record(journal, began), "archive": lambda: archive(journal, lake, format_)}
    for kill in range(kills):
        for name in work.keys() - running.keys():
            running[name] = in_child(work[name])
        if kill % 3:  # the others are killed while they start
            before = checkpoint.last_done()
            wait_until(checkpoint.last_done, partial(operator.lt, before), timeout=TIMEOUT, pause=0.002)
        time.sleep(chance.uniform(0, 0.1))
        pid = running.pop("recorder" if chance.random() < 0.2 else "archive")
        os.kill(pid, signal.SIGKILL)
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != -signal.SIGKILL:
            sys.exit(f"kill {kill}: it had ended by itself")
    for pid in running.values():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    JournalWriter.open(journal).close()
    with Archive([journal], open_table(lake, format=format_)) as job:
        while not job.wait():
            pass


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
