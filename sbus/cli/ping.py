"""``sbus ping``: round trips to the server, as ping(8) prints them."""

from __future__ import annotations

import json
import math
import time

import click

from sbus.cli.deadline import Deadline, wait_readable
from sbus.cli.options import Target, connection_options, pass_target
from sbus.cli.types import COUNT, SECONDS, Duration
from sbus.client.blocking import Bus
from sbus.errors import SbusError, TimedOut

__all__ = ["ping"]


@click.command(
    short_help="Measure round-trip times to the server.",
    epilog="""\
\b
Examples:
  sbus ping
  sbus ping --count 3 --interval 0.2
  sbus ping --count 1 --timeout 2 >/dev/null || echo 'no bus'
""",
)
@click.option("--count", "-c", type=COUNT, metavar="N", help="Exit after N requests.")
@click.option(
    "--interval",
    "-i",
    type=Duration(),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between requests.",
)
@click.option(
    "--timeout",
    "-t",
    type=SECONDS,
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="Time to wait for each answer.",
)
@click.option("--json", "output_json", is_flag=True, help="Print one JSON object per answer, then one with a summary.")
@connection_options
@pass_target
def ping(target: Target, count: int | None, interval: float, timeout: float, output_json: bool) -> None:
    """Measure round-trip times to the server.

    The server answers each request after all earlier work that it has for this client. Ctrl-C
    prints the summary and exits. The exit status is 0 if every request was answered in time, and
    124 if one was not.
    """
    with target.connect() as bus:
        pinger = _Pinger(bus, output_json)
        try:
            pinger.run(count, interval, timeout)
        except KeyboardInterrupt:
            pass
        finally:
            pinger.print_summary()
    if not pinger.received:
        raise SbusError(f"{target.address} has not answered at all: it is overloaded or stopped; try again later")
    if pinger.lost:
        raise TimedOut(f"{pinger.lost} of {pinger.sent} requests got no answer within {timeout:g} s")


class _Pinger:
    """A series of requests, and their round-trip times in milliseconds."""

    def __init__(self, bus: Bus, output_json: bool) -> None:
        self._bus = bus
        self._json = output_json
        self._start = time.monotonic()
        self._times: list[float] = []
        self.sent = 0
        self.lost = 0

    @property
    def received(self) -> int:
        return len(self._times)

    def run(self, count: int | None, interval: float, timeout: float) -> None:
        if not self._json:
            click.echo(f"PING {self._bus.address}")
        while True:
            next_request = Deadline(interval)
            self.sent += 1
            start = time.perf_counter()
            try:
                self._bus.fence(timeout)
            except TimedOut:
                self.lost += 1
                self._print_answer(None)
            else:
                milliseconds = (time.perf_counter() - start) * 1000
                self._times.append(milliseconds)
                self._print_answer(milliseconds)
            if self.sent == count:
                return
            while not next_request.has_passed:
                if wait_readable(self._bus, next_request.left):
                    self._bus.get_ready()

    def _print_answer(self, milliseconds: float | None) -> None:
        if self._json:
            value = None if milliseconds is None else round(milliseconds, 4)
            click.echo(json.dumps({"seq": self.sent, "time_ms": value}))
        elif milliseconds is None:
            click.echo(f"no answer yet: seq={self.sent}")
        else:
            click.echo(f"answer from {self._bus.address}: seq={self.sent} time={milliseconds:.3f} ms")

    def print_summary(self) -> None:
        received = self.received
        figures: dict[str, float] = {}
        if received:
            average = sum(self._times) / received
            deviation = math.sqrt(max(0.0, sum(t * t for t in self._times) / received - average * average))
            figures = {"min": min(self._times), "avg": average, "max": max(self._times), "mdev": deviation}
        answered = self.sent and received / self.sent
        seconds = time.monotonic() - self._start
        if self._json:
            summary = {"address": self._bus.address, "sent": self.sent, "received": received}
            click.echo(json.dumps(summary | {f"{name}_ms": round(value, 4) for name, value in figures.items()}))
            return
        click.echo(f"\n--- {self._bus.address} ping statistics ---")
        click.echo(
            f"{self.sent} packets transmitted, {received} received, {1 - answered:.0%} packet loss, "
            f"time {seconds * 1000:.0f}ms"
        )
        if figures:
            values = "/".join(f"{value:.3f}" for value in figures.values())
            click.echo(f"rtt {'/'.join(figures)} = {values} ms")
