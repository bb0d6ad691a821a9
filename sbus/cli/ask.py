"""``sbus whoami``, ``ping`` and ``match``: questions to the server, and about the rules."""

from __future__ import annotations

import json
import math
import time

import click

from sbus.cli.deadline import Deadline, wait
from sbus.cli.options import AS_BYTES, COUNT, DIALECTS, SECONDS, Target, to_connect, with_target
from sbus.cli.output import shown
from sbus.client.blocking import Bus
from sbus.errors import InvalidKey, SbusError, TimedOut, Violation
from sbus.protocol.explain import explain

__all__ = ["match", "ping", "whoami"]


@click.command(
    short_help="Print what the server calls us.",
    epilog="""\
\b
Example:
  me=$(sbus whoami) && echo "$me"
""",
)
@click.option(
    "--timeout", "-t", type=SECONDS, default=10.0, show_default=True, metavar="SECONDS", help="How long to wait."
)
@to_connect
@with_target
def whoami(target: Target, timeout: float) -> None:
    """Print what the server calls us: !/cred/GID/UID/PID.

    The PID is that of this command, and gone with it; the IDs are those under which other
    programs of the same user are known.
    """
    with target.connect(timeout=timeout) as bus:
        click.echo(shown(bus.whoami(timeout)))


@click.command(
    short_help="Measure how long the server takes to answer.",
    epilog="""\
\b
Examples:
  sbus ping
  sbus ping --count 3 --interval 0.2
  sbus ping --count 1 --timeout 2 >/dev/null || echo 'no bus'
""",
)
@click.option("--count", "-c", type=COUNT, metavar="N", help="End after N questions.")
@click.option(
    "--interval",
    "-i",
    type=click.FloatRange(min=0),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="From one question to the next.",
)
@click.option(
    "--timeout",
    "-t",
    type=SECONDS,
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for each answer.",
)
@click.option("--json", "output_json", is_flag=True, help="Print an object a line, the last one with the summary.")
@to_connect
@with_target
def ping(target: Target, count: int | None, interval: float, timeout: float, output_json: bool) -> None:
    """Measure how long the server takes to answer.

    Each question is a round trip through the server, behind all that it has to do for this
    client. Ctrl-C ends it with the summary. The status is 0 if all questions were answered, 124 if
    one was not in time.
    """
    with target.connect() as bus:
        pinging = _Ping(bus, output_json)
        try:
            pinging.run(count, interval, timeout)
        except KeyboardInterrupt:
            pass
        finally:
            pinging.sum_up()
    if not pinging.received:
        raise SbusError(f"{target.address} has not answered at all: it is overloaded or stopped; try again later")
    if pinging.lost:
        raise TimedOut(f"{pinging.lost} of {pinging.sent} questions got no answer within {timeout:g} seconds")


class _Ping:
    """A series of questions, and how long the answers took (in milliseconds)."""

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
            next_time = Deadline(interval)
            self.sent += 1
            asked = time.perf_counter()
            try:
                self._bus.fence(timeout)
            except TimedOut:
                self.lost += 1
                self._tell(None)
            else:
                took = (time.perf_counter() - asked) * 1000
                self._times.append(took)
                self._tell(took)
            if self.sent == count:
                return
            while not next_time.has_passed:
                if wait(self._bus, next_time.left):
                    self._bus.get_ready()

    def _tell(self, took: float | None) -> None:
        if self._json:
            click.echo(json.dumps({"seq": self.sent, "time_ms": None if took is None else round(took, 4)}))
        elif took is None:
            click.echo(f"no answer yet: seq={self.sent}")
        else:
            click.echo(f"answer from {self._bus.address}: seq={self.sent} time={took:.3f} ms")

    def sum_up(self) -> None:
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


@click.command(
    short_help="Say whether a pattern matches a key, or where it stops.",
    epilog="""\
\b
Examples:
  sbus match 'sensors/*/temperature' sensors/kitchen/temperature
  sbus match 'a/*b' a/xb
""",
)
@click.argument("pattern", type=AS_BYTES)
@click.argument("keys", type=AS_BYTES, nargs=-1, required=True, metavar="KEY...")
@click.option("--quiet", "-q", is_flag=True, help="Print nothing, only give the status.")
@click.option(
    "--dialect",
    type=click.Choice(list(DIALECTS)),
    default="current",
    show_default=True,
    help="Whose rules: '.' separates in early.",
)
@click.pass_context
def match(ctx: click.Context, pattern: bytes, keys: tuple[bytes, ...], quiet: bool, dialect: str) -> None:
    """Say whether PATTERN matches each KEY and, if not, where it stops.

    The status is 0 if it matches all of them, else 1. No server is needed. A pattern for secret
    keys is taken to be used by somebody whom it lets read the key.
    """
    matches_all = True
    for key in keys:
        try:
            found = explain(pattern, key, DIALECTS[dialect])
        except Violation as e:
            raise _forbidden(pattern, key, e, dialect) from None
        if found is None:
            text = f"{shown(key)}: matches"
        else:
            matches_all = False
            text = (
                f"{shown(key)}: does not match: {found.reason}\n"
                f"  {shown(pattern)}\n  {' ' * len(shown(pattern[: found.pattern_at]))}^\n"
                f"  {shown(key)}\n  {' ' * len(shown(key[: found.key_at]))}^"
            )
        if not quiet:
            click.echo(text)
    ctx.exit(0 if matches_all else 1)


def _forbidden(pattern: bytes, key: bytes, violation: Violation, dialect: str) -> SbusError:
    try:
        DIALECTS[dialect].check(pattern)
    except Violation:
        return InvalidKey(f"nobody may use the pattern {shown(pattern)}: {violation}")
    return InvalidKey(f"nobody may use the key {shown(key)}: {violation}")
