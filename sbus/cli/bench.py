"""``sbus bench``: measure how fast a bus is for programs with the blocking client."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing import connection, get_context

import click

from sbus.cli.deadline import Deadline
from sbus.cli.options import Target, connection_options, pass_target
from sbus.cli.tables import Row, format_table
from sbus.cli.types import Duration, Size
from sbus.client.blocking import Bus
from sbus.daemon.launcher import ServerProcess
from sbus.errors import ConnectError, SbusError, TimedOut
from sbus.protocol.keys import DIALECTS
from sbus.syscalls.socket_directory import new_socket_directory

__all__ = ["bench"]

_OVERHEAD_TIMEOUT = 30.0
"""Seconds that a test may take on top of the time for which it publishes."""
_SERVER_TIMEOUT = 30.0
"""Seconds that the start of a server may take, and its stop."""
_END_INTERVAL = 0.2
"""Seconds after which the message that ends a test is published again, in case the bus has dropped it."""
_BATCH_MESSAGES = 512
"""Messages that the publisher hands to the client at once."""
_TESTS = ("throughput", "fanout", "roundtrip")

ShowProgress = Callable[[float], None]
"""Shows how many seconds of a test have passed."""


@dataclass(frozen=True, slots=True)
class _Flow:
    """The result of one publisher and receivers that block it rather than lose any."""

    test: str
    receivers: int
    size: int
    published: int
    delivered: int
    seconds: float

    def row(self) -> Row:
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
    """The result of messages that a client sent to itself, one at a time.

    :ivar times: the round-trip times in microseconds.
    """

    test: str
    size: int
    times: list[float]

    def row(self) -> Row:
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
    short_help="Measure the throughput and latency of a bus.",
    epilog="""\
\b
Examples:
  sbus bench --start
  sbus bench --seconds 5 --size 1000 throughput
  sbus bench --json fanout --receivers 64 | jq .tests
""",
)
@click.argument("tests", type=click.Choice(_TESTS), nargs=-1, metavar=f"[{'|'.join(_TESTS)}]...")
@click.option(
    "--seconds",
    type=Duration(0.1, 60.0),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="How long each test publishes, from 0.1 to 60 seconds.",
)
@click.option("--size", type=Size(0), default=64, show_default=True, metavar="SIZE", help="Bytes of each payload.")
@click.option(
    "--receivers",
    type=click.IntRange(1, 256),
    default=8,
    show_default=True,
    metavar="N",
    help="Receivers in the fanout test.",
)
@click.option("--start", is_flag=True, help="Start a temporary server for the tests, and stop it afterwards.")
@click.option("--json", "output_json", is_flag=True, help="Print one JSON object instead of tables.")
@connection_options
@pass_target
def bench(
    target: Target, tests: tuple[str, ...], seconds: float, size: int, receivers: int, start: bool, output_json: bool
) -> None:
    """Measure the throughput and latency of a bus. Without arguments, run every test.

    \b
    throughput  one publisher, one receiver
    fanout      one publisher, several receivers
    roundtrip   messages that a client sends to itself, one at a time

    Publisher and receivers are processes of their own. The tests put the bus under full load: use
    --start rather than a bus that others depend on.
    """
    if start and target.socket is not None:
        raise click.UsageError("--start and --socket exclude each other.")
    if start and target.dialect != "current":
        raise click.UsageError("--start starts a server of the current dialect: leave out --dialect.")
    results: list[_Flow | _RoundTrips] = []
    with contextlib.ExitStack() as stack:
        if start:
            stack.enter_context(_temporary_server(target))
        for test in tests or _TESTS:
            deadline = Deadline(seconds + _OVERHEAD_TIMEOUT, test)
            with deadline.applied(), _progress_bar(test, seconds) as show_progress:
                if test == "roundtrip":
                    results.append(_measure_round_trips(target, size, seconds, deadline, show_progress))
                else:
                    number = receivers if test == "fanout" else 1
                    results.append(_measure_flow(target, test, number, size, seconds, deadline, show_progress))
    address = "temporary server" if start else target.address
    if output_json:
        click.echo(json.dumps({"address": address, "tests": [result.row() for result in results]}))
    else:
        click.echo(f"{address}, payloads of {size} bytes")
        for kind in (_Flow, _RoundTrips):
            _print_table([result.row() for result in results if isinstance(result, kind)])


# --- surroundings ---------------------------------------------------------------------------------


@contextlib.contextmanager
def _temporary_server(target: Target) -> Iterator[None]:
    """Run a server, and point `target` at it.

    With ``-c`` the server also stops if this process is killed: the connection that is held open here is then gone.
    """
    with contextlib.ExitStack() as stack:
        directory = new_socket_directory()
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        output = stack.enter_context(tempfile.TemporaryFile())
        target.socket = os.path.join(directory, "bus")
        command = [sys.executable, "-P", "-m", "sbus.server.run.sbusd", "-f", "-c", "-a", target.socket]
        server = ServerProcess("the server", command, output, new_session=True)
        stack.callback(server.stop, _SERVER_TIMEOUT)
        held: list[Bus] = []

        def accepts() -> bool:
            try:
                held.append(target.connect(timeout=0))
            except ConnectError:
                return False
            return True

        server.wait_until(accepts, _SERVER_TIMEOUT)
        stack.enter_context(held[0])
        yield


@contextlib.contextmanager
def _progress_bar(test: str, seconds: float) -> Iterator[ShowProgress]:
    """Show a progress bar on standard error if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda passed: None
        return
    steps = round(seconds * 10)
    with click.progressbar(length=steps, label=f"{test:10}", file=sys.stderr, show_eta=False) as bar:
        yield lambda passed: bar.update(min(steps, int(passed * 10)) - bar.pos)
        bar.update(steps - bar.pos)


def _print_table(rows: list[Row]) -> None:
    """Print results under their names, after an empty line."""
    if rows:
        names = [name.replace("_per_second", "/s").replace("_", " ") for name in rows[0]]
        click.echo()
        click.echo("\n".join(format_table([names, *(list(map(str, row.values())) for row in rows)], "<>")))


# --- the tests ------------------------------------------------------------------------------------


def _private_keys(target: Target, *names: str) -> list[bytes]:
    """Return keys that no other client uses."""
    token = os.urandom(8).hex()
    return [DIALECTS[target.dialect].separator.join((b"sbus-bench", token.encode(), name.encode())) for name in names]


def _measure_round_trips(
    target: Target, size: int, seconds: float, deadline: Deadline, show_progress: ShowProgress
) -> _RoundTrips:
    payload = bytes(size)
    times = []
    with target.connect_by(deadline) as bus, bus.limit(deadline.left):
        (key,) = _private_keys(target, "self")
        subscription = bus.subscribe(key)
        bus.fence(deadline.left)
        start = now = time.perf_counter()
        while now - start < seconds:
            bus.publish(key, payload)
            subscription.get(_OVERHEAD_TIMEOUT)
            then, now = now, time.perf_counter()
            times.append((now - then) * 1e6)
            if len(times) % 256 == 0:
                show_progress(now - start)
    return _RoundTrips("roundtrip", size, times)


def _measure_flow(
    target: Target,
    test: str,
    receivers: int,
    size: int,
    seconds: float,
    deadline: Deadline,
    show_progress: ShowProgress,
) -> _Flow:
    data, end_mark = _private_keys(target, "data", "end")
    payload = bytes(size)
    context = get_context("fork")
    with contextlib.ExitStack() as stack:
        reports = []
        for _ in range(receivers):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_receive, args=(target, data, end_mark, os.getpid(), theirs), daemon=True)
            process.start()
            theirs.close()
            stack.callback(process.join)
            stack.callback(process.terminate)
            reports.append(stack.enter_context(ours))
        bus = stack.enter_context(target.connect_by(deadline))
        stack.enter_context(bus.limit(deadline.left))
        _collect(reports, deadline)  # every receiver has subscribed
        batch: list[tuple[bytes | str, bytes]] = [(data, payload)] * _BATCH_MESSAGES
        published = 0
        start = now = time.monotonic()
        while now - start < seconds:
            bus.publish_many(batch)
            published += _BATCH_MESSAGES
            now = time.monotonic()
            if published % (_BATCH_MESSAGES * 8) == 0:
                show_progress(now - start)
        results = _collect(reports, deadline, lambda: bus.publish(end_mark))
    delivered = sum(count for count, _ in results)
    end = max(last for _, last in results)
    return _Flow(test, receivers, size, published, delivered, max(end - start, 1e-6))


def _collect(
    reports: list[connection.Connection], deadline: Deadline, prompt: Callable[[], None] = lambda: None
) -> list[tuple[int, float]]:
    """Wait for one report from every receiver.

    :param prompt: called first, and again whenever no report has come for `_END_INTERVAL` seconds.
    :raises SbusError: if a receiver reports an error, or was killed.
    :raises TimedOut: if the deadline passes.
    """
    waiting = list(reports)
    results = []
    ready: list[connection.Connection] = []
    while waiting:
        if not ready:
            prompt()
            deadline.check()
        readable = connection.wait(waiting, _END_INTERVAL)
        ready = [report for report in waiting if report in readable]
        for report in ready:
            waiting.remove(report)
            try:
                result = report.recv()
            except EOFError:
                result = "a receiver was killed"
            if isinstance(result, str):
                raise SbusError(result)
            results.append(result)
    return results


def _receive(target: Target, data: bytes, end_mark: bytes, parent: int, report: connection.Connection) -> None:
    """Receive messages in a separate process, which ends if its parent is killed.

    It reports twice: when it has subscribed, and at the end the number of messages and the time of the last one.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    try:
        with target.connect() as bus:
            if target.dialect != "early":
                bus.flood_control(soft="queue", hard="block", order="queue")
            bus.subscribe(data)
            bus.subscribe(end_mark)
            bus.fence()
            report.send((0, 0.0))
            count = 0
            last = 0.0
            while True:
                try:
                    messages = bus.get_many(_END_INTERVAL)
                except TimedOut:
                    if os.getppid() != parent:
                        return
                    continue
                if messages[-1].key == end_mark:
                    count += sum(message.key == data for message in messages)
                    last = time.monotonic()
                    break
                count += len(messages)
            report.send((count, last))
    except SbusError as e:
        report.send(str(e))
