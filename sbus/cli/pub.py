"""``sbus pub``: publish messages."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from typing import BinaryIO

import click

from sbus.cli.deadline import at_most, wait
from sbus.cli.options import AS_BYTES, SECONDS, Target, to_connect, with_target
from sbus.client.blocking import Bus
from sbus.errors import PacketTooLong, ViolationReason

__all__ = ["pub"]

_BATCH = 64


@click.command(
    short_help="Publish messages.",
    epilog="""\
\b
Examples:
  sbus pub sensors/kitchen/temperature 21.5
  sbus pub --file picture.jpeg camera/picture
  df | sbus pub reports/disk -
  tail -F /var/log/syslog | sbus pub --lines logs/syslog
  sbus pub --repeat 100 --rate 10 test/ticks tick
""",
)
@click.argument("key", type=AS_BYTES)
@click.argument("payload", type=AS_BYTES, required=False)
@click.option("--file", "-f", type=click.File("rb"), metavar="FILE", help="Take the payload from a file.")
@click.option("--lines", "-l", is_flag=True, help="Publish each line of standard input (or FILE) as a message.")
@click.option(
    "--repeat",
    type=click.IntRange(min=0),
    metavar="N",
    help="Publish the message N times, or until stopped if N is 0.  [default: 1]",
)
@click.option("--rate", type=SECONDS, metavar="R", help="Publish at most R messages a second.")
@click.option("--timeout", "-t", type=SECONDS, metavar="SECONDS", help="Give up after so long, with status 124.")
@click.option("--no-wait", is_flag=True, help="Do not wait until the server has dealt with it.")
@to_connect
@with_target
def pub(
    target: Target,
    key: bytes,
    payload: bytes | None,
    file: BinaryIO | None,
    lines: bool,
    repeat: int | None,
    rate: float | None,
    timeout: float | None,
    no_wait: bool,
) -> None:
    """Publish PAYLOAD (nothing, if there is none; standard input, if it is '-') under KEY.

    It ends when the server has dealt with the message.
    """
    if payload is not None and file is not None:
        raise click.UsageError("PAYLOAD and --file exclude each other.")
    if lines and payload not in (None, b"-"):
        raise click.UsageError("With --lines the payloads come from standard input or --file, not from PAYLOAD.")
    if lines and repeat is not None:
        raise click.UsageError("--lines and --repeat exclude each other.")
    with at_most(timeout, "publishing"), target.connect() as bus:
        pace = _Pace(bus, rate)
        for batch in _batches(payload, file, lines, 1 if repeat is None else repeat, rate, target.max_packet):
            pace.wait()
            bus.publish_many([(key, each) for each in batch])
        if not no_wait:
            bus.fence()


def _batches(
    payload: bytes | None, file: BinaryIO | None, lines: bool, repeat: int, rate: float | None, limit: int
) -> Iterator[list[bytes]]:
    """The payloads to publish, in batches where there is no hurry to have each of them out."""
    if lines:
        return ([line] for line in _lines(file or sys.stdin.buffer, limit))
    if file is not None or payload == b"-":
        payload = _whole(file or sys.stdin.buffer, limit)
    return _repeated(payload or b"", repeat, 1 if rate else _BATCH)


def _repeated(payload: bytes, times: int, most: int) -> Iterator[list[bytes]]:
    """The payload so many times (0: for ever), in batches."""
    batch = [payload] * most
    if not times:
        yield from itertools.repeat(batch)
    for start in range(0, times, most):
        yield batch[: times - start]


def _whole(stream: BinaryIO, limit: int) -> bytes:
    payload = stream.read(limit + 1)
    if len(payload) > limit:
        raise _too_long(f"{_name(stream)} has more than {limit} bytes", "publish it in parts (as with --lines)")
    return payload


def _lines(stream: BinaryIO, limit: int) -> Iterator[bytes]:
    for number in itertools.count(1):
        line = stream.readline(limit + 2)
        if not line:
            return
        line = line.removesuffix(b"\n")
        if len(line) > limit:
            raise _too_long(f"line {number} of {_name(stream)} has more than {limit} bytes", "break it up")
        yield line


def _name(stream: BinaryIO) -> str:
    return "standard input" if stream.fileno() == 0 else str(stream.name)


def _too_long(what: str, remedy: str) -> PacketTooLong:
    return PacketTooLong(
        f"{ViolationReason.PACKET_TOO_LONG.value}: {what}; {remedy}, or raise the limit here and at the server "
        "(--max-packet)"
    )


_CATCH_UP = 0.1
"""Seconds: by so much the next messages may come too fast, to make up for one that came late."""


class _Pace:
    """Keeps to so many messages a second."""

    def __init__(self, bus: Bus, rate: float | None) -> None:
        self._bus = bus
        self._between = 1 / rate if rate else 0.0
        self._next = time.monotonic()

    def wait(self) -> None:
        """Wait until it is time for the next message; whoever is a little late catches up.

        :raises sbus.errors.Disconnected: if the connection is lost meanwhile.
        """
        if not self._between:
            return
        while (early := self._next - time.monotonic()) > 0:
            if wait(self._bus, early):
                self._bus.get_ready()
        self._next = max(self._next, time.monotonic() - _CATCH_UP) + self._between
