"""``sbus bench``: how fast a bus is, as programs with this package's client see it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing import connection, get_context
from typing import Any

import click

from sbus.cli.deadline import at_most
from sbus.cli.options import DIALECTS, Target, to_connect, with_target
from sbus.errors import ListenError, SbusError

__all__ = ["bench"]

_START_TIMEOUT = 30.0
"""Seconds that a test may take besides those for which it publishes."""
_PROGRESS_INTERVAL = 0.2
"""Seconds after which receivers are told again that it is over, should the bus have dropped it."""
_BATCH = 512
_TESTS = ("throughput", "fanout", "roundtrip")

Progress = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class _Flow:
    """Messages from one publisher to some receivers, which hold it back rather than lose any."""

    test: str
    receivers: int
    size: int
    published: int
    delivered: int
    seconds: float

    def figures(self) -> dict[str, Any]:
        rate = self.delivered / self.seconds
        return {
            **asdict(self),
            "seconds": round(self.seconds, 3),
            "lost": self.published * self.receivers - self.delivered,
            "delivered_per_second": round(rate),
            "megabytes_per_second": round(rate * self.size / 1e6, 1),
        }


@dataclass(frozen=True, slots=True)
class _RoundTrips:
    """Messages to ourselves, one after the other; the times in microseconds."""

    test: str
    size: int
    times: list[float]

    def figures(self) -> dict[str, Any]:
        times = sorted(self.times)
        return {
            "test": self.test,
            "size": self.size,
            "round_trips": len(times),
            "min_us": round(times[0], 1),
            "avg_us": round(sum(times) / len(times), 1),
            "p50_us": round(times[len(times) // 2], 1),
            "p99_us": round(times[len(times) * 99 // 100], 1),
            "max_us": round(times[-1], 1),
        }


@click.command(
    short_help="Measure how fast a bus is.",
    epilog="""\
\b
Examples:
  sbus bench --start
  sbus bench --seconds 5 --size 1000 throughput
  sbus bench --json fanout --receivers 64 | jq .tests
""",
)
@click.argument(
    "tests",
    type=click.Choice(["throughput", "fanout", "roundtrip"]),
    nargs=-1,
    metavar="[throughput|fanout|roundtrip]...",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.1, 60),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="How long each test publishes; 60 at most.",
)
@click.option(
    "--size", type=click.IntRange(min=0), default=64, show_default=True, metavar="BYTES", help="Bytes in a payload."
)
@click.option(
    "--receivers",
    type=click.IntRange(1, 256),
    default=8,
    show_default=True,
    metavar="N",
    help="Receivers in the fan-out test; 256 at most.",
)
@click.option("--start", is_flag=True, help="Start a server for it, and stop that at the end.")
@click.option("--json", "output_json", is_flag=True, help="Print one object instead of tables.")
@to_connect
@with_target
def bench(
    target: Target, tests: tuple[str, ...], seconds: float, size: int, receivers: int, start: bool, output_json: bool
) -> None:
    """Measure how fast a bus is: all tests, or those that are named.

    \b
    throughput  one publisher, one receiver
    fanout      one publisher, several receivers
    roundtrip   messages to ourselves, one after the other

    Publisher and receivers are processes of their own. A bus that others use is as busy as it can
    be meanwhile, so better take --start there.
    """
    if start and target.socket is not None:
        raise click.UsageError("--start and --socket exclude each other.")
    if start and target.dialect != "current":
        raise click.UsageError("A server that is started speaks the current dialect.")
    results: list[_Flow | _RoundTrips] = []
    with contextlib.ExitStack() as stack:
        if start:
            target.socket = stack.enter_context(_server())
            stack.enter_context(target.connect())  # it ends with its last client
        for test in tests or _TESTS:
            with at_most(seconds + _START_TIMEOUT, test), _progress(test, seconds) as progress:
                if test == "roundtrip":
                    results.append(_round_trips(target, size, seconds, progress))
                else:
                    number = receivers if test == "fanout" else 1
                    results.append(_flow(target, test, number, size, seconds, progress))
    address = "a server of its own" if start else target.address
    if output_json:
        click.echo(json.dumps({"address": address, "tests": [result.figures() for result in results]}))
    else:
        click.echo(f"{address}, payloads of {size} bytes")
        for kind in (_Flow, _RoundTrips):
            _print_table([result.figures() for result in results if isinstance(result, kind)])


# --- surroundings ---------------------------------------------------------------------------------


@contextlib.contextmanager
def _server() -> Iterator[str]:
    """A bus of our own; its address."""
    with tempfile.TemporaryDirectory(prefix="sbus-bench-") as directory:
        address = os.path.join(directory, "bus")
        command = [sys.executable, "-m", "sbus.server.sbusd", "-f", "-c", "-a", address]
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, process_group=0)
        try:
            assert server.stdout is not None
            with server.stdout:
                server.stdout.read()  # it is closed when the server listens
            if not os.path.exists(address):
                raise ListenError(f"the server has not started: its status is {server.wait()}, and it has said why")
            yield address
        finally:
            server.terminate()
            server.wait()


@contextlib.contextmanager
def _progress(test: str, seconds: float) -> Iterator[Progress]:
    """A bar on a terminal; it is told the seconds that have passed."""
    if not sys.stderr.isatty():
        yield lambda passed: None
        return
    steps = round(seconds * 10)
    with click.progressbar(length=steps, label=f"{test:10}", file=sys.stderr, show_eta=False) as bar:
        yield lambda passed: bar.update(min(steps, int(passed * 10)) - bar.pos)
        bar.update(steps - bar.pos)


def _print_table(rows: list[dict[str, Any]]) -> None:
    """The figures in columns, with what they are on top."""
    if not rows:
        return
    cells = [[name.replace("_per_second", "/s").replace("_", " ") for name in rows[0]]]
    cells += [list(map(str, row.values())) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    click.echo()
    for first, *others in cells:
        line = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        click.echo("  ".join(line))


# --- the tests ------------------------------------------------------------------------------------


def _keys(target: Target, *names: str) -> list[bytes]:
    """Keys that nobody else uses."""
    token = os.urandom(8).hex()
    return [DIALECTS[target.dialect].separator.join((b"sbus-bench", token.encode(), name.encode())) for name in names]


def _round_trips(target: Target, size: int, seconds: float, progress: Progress) -> _RoundTrips:
    payload = bytes(size)
    times = []
    with target.connect() as bus:
        (key,) = _keys(target, "self")
        answers = bus.subscribe(key)
        bus.fence()
        start = now = time.perf_counter()
        while now - start < seconds:
            bus.publish(key, payload)
            answers.get()
            then, now = now, time.perf_counter()
            times.append((now - then) * 1e6)
            if len(times) % 256 == 0:
                progress(now - start)
    return _RoundTrips("roundtrip", size, times)


def _flow(target: Target, test: str, receivers: int, size: int, seconds: float, progress: Progress) -> _Flow:
    data, over = _keys(target, "data", "over")
    payload = bytes(size)
    context = get_context("fork")
    with contextlib.ExitStack() as stack:
        reports = []
        for _ in range(receivers):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_receive, args=(target, data, over, seconds, theirs), daemon=True)
            process.start()
            theirs.close()
            stack.callback(process.join)
            stack.callback(process.terminate)
            reports.append(stack.enter_context(ours))
        bus = stack.enter_context(target.connect())
        _collect(reports)  # they are subscribed
        batch: list[tuple[bytes | str, bytes]] = [(data, payload)] * _BATCH
        published = 0
        start = now = time.monotonic()
        while now - start < seconds:
            bus.publish_many(batch)
            published += _BATCH
            now = time.monotonic()
            if published % (_BATCH * 8) == 0:
                progress(now - start)
        found = _collect(reports, lambda: bus.publish(over))
    delivered = sum(count for count, _ in found)
    end = max(last for _, last in found)
    return _Flow(test, receivers, size, published, delivered, max(end - start, 1e-6))


def _collect(
    reports: list[connection.Connection], prompt: Callable[[], None] = lambda: None
) -> list[tuple[int, float]]:
    """One report of every receiver; `prompt` is called at first, and again while none comes."""
    waiting: list[Any] = list(reports)
    found = []
    ready: list[Any] = []
    while waiting:
        if not ready:
            prompt()
        ready = connection.wait(waiting, _PROGRESS_INTERVAL)
        for report in ready:
            assert isinstance(report, connection.Connection)
            waiting.remove(report)
            try:
                result = report.recv()
            except EOFError:
                result = "a receiver was ended by somebody"
            if isinstance(result, str):
                raise SbusError(result)
            found.append(result)
    return found


def _receive(target: Target, data: bytes, over: bytes, seconds: float, report: connection.Connection) -> None:
    """A receiver, in a process of its own: reports when it is ready, and then how many came and when the last did."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started it ends it
    try:
        with target.connect() as bus:
            if target.dialect != "early":
                bus.flood_control(soft="queue", hard="block", order="queue")
            bus.subscribe(data)
            bus.subscribe(over)
            bus.fence()
            report.send((0, 0.0))
            count = 0
            last = 0.0
            while True:
                messages = bus.get_many(seconds + _START_TIMEOUT)
                if messages[-1].key == over:
                    count += sum(message.key == data for message in messages)
                    last = time.monotonic()
                    break
                count += len(messages)
            report.send((count, last))
    except SbusError as e:
        report.send(str(e))
