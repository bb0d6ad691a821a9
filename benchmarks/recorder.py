#!/usr/bin/env python3
"""Measure the recorder at a message rate: its losses, and its CPU time per message.

Each round has a fresh bus (``twistd sbus``), and in turn two programs that read it: the recorder (``twistd
sbus-recorder``), and a client that only counts, with the same library. So the difference is what the journal costs. A
publisher sends numbered messages at an even rate; afterwards the journal is read back, number by number.

    python benchmarks/recorder.py [--rate 150000] [--seconds 5] [--size 64] [--plain] [--rounds 3] [--directory DIR]

With ``--senders`` it compares the recorder with one that does not ask who published a message: for one publisher, and
for eight at the same time. It takes CPU time, so other work on the machine matters little.

    python benchmarks/recorder.py --senders [--rate 100000] [--seconds 2] [--rounds 5] [--plain]

With ``--jetstream`` it measures how many messages a second the recorder and JetStream's file store keep without a loss,
in turn, and what one costs their servers. Publishers send as fast as they are allowed, without a library
(`benchmarks.keeping`).

    python benchmarks/recorder.py --jetstream [--messages 1000000] [--sync-interval 2m] [--rounds 3] [--directory DIR]
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from benchmarks.jetstream import SYNC_INTERVAL  # noqa: E402
from benchmarks.recording import PATIENCE, TWISTD, check, running, turns_of  # noqa: E402

_TICK = 0.004
"""Seconds between two bursts of the publisher."""
_KEYS = 100
_MANY = 8
"""Publishers that send at the same time."""
_NAMELESS = """\
from sbus.recorder.bus import RecorderBus
RecorderBus.ask_senders = lambda self: None
from twisted.scripts.twistd import run
run()
"""
_COUNT = """\
import sys
from twisted.internet import defer, reactor, task
from sbus.client.tx import connect
from sbus.errors import Disconnected

async def main(reactor):
    bus = await connect(reactor, sys.argv[1], bundles=sys.argv[2] == "1")
    subscription = bus.subscribe(b"")
    await bus.fence()
    print("ready", flush=True)
    count = 0
    try:
        while True:
            count += len(await subscription.get_many())
    except Disconnected:
        print(count, flush=True)

task.react(lambda reactor: defer.ensureDeferred(main(reactor)))
"""


class Run(NamedTuple):
    """The result of one run.

    :ivar published: messages.
    :ivar rate: published each second, in fact.
    :ivar arrived: messages that were recorded, or counted.
    :ivar misplaced: of these, how many do not follow the one before.
    :ivar gaps: rows of a gap that should not be there.
    :ivar reader: µs of CPU time for each message, of the reading process.
    :ivar bus: the same of the bus.
    :ivar memory: bytes that the reading process had at most.
    :ivar turns: messages of one publisher in a row, on average; 0 if that was not recorded.
    """

    published: int
    rate: float
    arrived: int
    misplaced: int
    gaps: int
    reader: float
    bus: float
    memory: int
    turns: float = 0.0


def publish(address: str, rate: int, seconds: float, size: int, bundles: bool, publishers: int) -> None:
    """Publish at this rate in bundles or not, and print the number of messages and of seconds."""
    from sbus.client.blocking import connect

    keys = [b"bench/%d/value" % i for i in range(_KEYS)]
    padding = bytes(max(0, size - 8))
    with contextlib.ExitStack() as connections:
        buses = [connections.enter_context(connect(address, bundles=bundles)) for _ in range(publishers)]
        start = time.monotonic()
        sent = 0
        while (passed := time.monotonic() - start) < seconds:
            due = int(passed * rate)
            messages = [(keys[i % _KEYS], i.to_bytes(8, "little") + padding) for i in range(sent, due)]
            if publishers == 1:
                buses[0].publish_many(messages)
            else:
                for i, message in enumerate(messages):
                    buses[i % publishers].publish(*message)
            sent = due
            time.sleep(_TICK)
        for bus in buses:
            bus.fence(PATIENCE)
        print(sent, time.monotonic() - start, flush=True)


def run(
    directory: Path, record: bool, arguments: argparse.Namespace, publishers: int = 1, *, names: bool = True
) -> Run:
    """Perform one run with a fresh bus in an empty directory.

    :param names: whether the recorder asks who published a message.
    """
    address, journal = directory / "bus", directory / "journal"
    twistd = TWISTD if names else [sys.executable, "-c", _NAMELESS, *TWISTD[3:]]
    command = [*twistd, "sbus-recorder", f"--socket={address}", f"--journal={journal}", *arguments.option]
    ready = "recording"
    if not record:
        command, ready = [sys.executable, "-c", _COUNT, str(address), str(int(not arguments.plain))], "ready"
    with (
        running([*TWISTD, "sbus", f"--socket={address}"], directory / "bus.log", "listens on") as bus,
        running(command, directory / "reader.log", ready) as reader,
    ):
        reader.settle()
        before = reader.cpu(), bus.cpu()
        words = [str(address), str(arguments.rate), str(arguments.seconds), str(arguments.size)]
        words += [str(int(not arguments.plain)), str(publishers)]
        publisher = subprocess.run(
            [sys.executable, __file__, "--publish", *words],
            capture_output=True,
            text=True,
            check=True,
            timeout=arguments.seconds + PATIENCE,
        )
        published, seconds = (float(word) for word in publisher.stdout.split())
        reader.settle()
        costs = [(process.cpu() - b) / published * 1e6 for process, b in zip((reader, bus), before, strict=True)]
        memory = reader.memory()
        (reader if record else bus).stop()  # what only counts is ended by the end of the bus
        if not record:
            reader._popen.wait(PATIENCE)
            arrived, misplaced, gaps, turns = int(reader.log.split()[-1]), 0, 0, 0.0
        else:
            reader._popen.wait(PATIENCE)
            arrived, misplaced, gaps = check(journal)
            turns = turns_of(journal) if names else 0.0
    return Run(int(published), published / seconds, arrived, misplaced, gaps, costs[0], costs[1], memory, turns)


def compare_senders(arguments: argparse.Namespace) -> None:
    """Compare the recorder with one that does not ask who published a message."""
    for publishers in (1, _MANY):
        found: dict[bool, list[Run]] = {True: [], False: []}
        for number in range(arguments.rounds):
            for names in (True, False) if number % 2 == 0 else (False, True):
                with tempfile.TemporaryDirectory(prefix="sbus-", dir=arguments.directory) as directory:
                    found[names].append(run(Path(directory), True, arguments, publishers, names=names))
        with_names, without = ([one.reader for one in found[names]] for names in (True, False))
        lost = sum(one.published - one.arrived for runs in found.values() for one in runs)
        print(
            f"{publishers} publishing, {median(one.turns for one in found[True]):.1f} messages in a row, lost {lost}: "
            f"{median(with_names):.3f} µs a message with publishers, {median(without):.3f} without: "
            f"{median(with_names) / median(without):.3f} times "
            f"({', '.join(f'{a:.2f}/{b:.2f}' for a, b in zip(with_names, without, strict=True))})",
            flush=True,
        )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rate", type=int, default=150_000, help="messages each second (150000)")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long a run publishes, at most 60 (5)")
    parser.add_argument("--size", type=int, default=64, help="bytes in a payload (64)")
    parser.add_argument("--plain", action="store_true", help="publish plain packets, without bundles")
    parser.add_argument("--rounds", type=int, default=3, help="how often everything is measured (3)")
    parser.add_argument("--directory", help="where journals are written for the time (a temporary directory)")
    parser.add_argument("--option", action="append", default=[], help="an option of the recorder; repeatable")
    parser.add_argument("--senders", action="store_true", help="compare with a recorder that records no publishers")
    parser.add_argument("--jetstream", action="store_true", help="compare the recorder with JetStream's file store")
    parser.add_argument(
        "--messages", type=int, default=1_000_000, help="messages of a run beside JetStream; four times that, bundled"
    )
    parser.add_argument(
        "--sync-interval", default=SYNC_INTERVAL, help="how often JetStream syncs its files (2m, its default)"
    )
    arguments = parser.parse_args()
    if arguments.jetstream:
        from benchmarks.keeping import compare

        compare(arguments.messages, arguments.rounds, arguments.sync_interval, arguments.directory)
        return
    arguments.seconds = min(arguments.seconds, 60.0)
    if arguments.senders:
        compare_senders(arguments)
        return
    found: dict[bool, list[Run]] = {True: [], False: []}
    for number in range(arguments.rounds):
        for record in (True, False) if number % 2 == 0 else (False, True):
            with tempfile.TemporaryDirectory(prefix="sbus-", dir=arguments.directory) as directory:
                one = run(Path(directory), record, arguments)
            found[record].append(one)
            print(
                f"{'recorder' if record else 'counting':8}  {one.rate:8.0f}/s  published {one.published}  "
                f"lost {one.published - one.arrived}  misplaced {one.misplaced}  gaps {one.gaps}  "
                f"{one.reader:.2f} µs a message (bus {one.bus:.2f})  {one.memory / 1e6:.0f} MB",
                flush=True,
            )
    for what in ("reader", "bus"):
        recorder, counting = (median(getattr(one, what) for one in found[record]) for record in (True, False))
        print(
            f"medians of the {what}: recording {recorder:.2f} µs a message, counting {counting:.2f}: "
            f"{recorder / counting:.2f} times"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--publish"]:
        publish(
            sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]), sys.argv[6] == "1", int(sys.argv[7])
        )
    else:
        main()
