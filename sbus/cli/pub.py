"""``sbus pub``: publish messages."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from io import BufferedReader
from typing import BinaryIO

import click

from sbus.cli.deadline import Deadline, wait_readable
from sbus.cli.numbers import CommandWithNumbers
from sbus.cli.options import Target, connection_options, pass_target
from sbus.cli.output import Nothing, escape
from sbus.cli.streams import name_of, open_input
from sbus.cli.types import BYTES, RATE, SECONDS
from sbus.client.blocking import Bus
from sbus.errors import PacketTooLong, UsageError, ViolationReason
from sbus.interchange.jsonl import BYTE_ORDER_MARK, decoded, is_gap
from sbus.protocol.bundles import MAX_BUNDLE
from sbus.syscalls.sockets import LONGEST_PACKET

__all__ = ["pub", "read_payload"]

_ACTIVITY = "publishing"
_JSON_BYTES = 6
"""Bytes of JSON for each byte of a message, at most: a control character is written as ``\\u0001``."""
_JSON_REST = 65536
"""Bytes of a line of JSON beside the key and the payload, at most."""
_BATCH_MESSAGES = 64
"""Copies of a message that ``--repeat`` without ``--rate`` publishes at once."""


@click.command(
    cls=CommandWithNumbers,
    short_help="Publish messages.",
    epilog="""\
\b
Examples:
  sbus pub sensors/kitchen/temperature 21.5
  sbus pub sensors/garden/temperature -3.5
  sbus pub --file picture.jpeg camera/picture
  df | sbus pub reports/disk -
  tail -F /var/log/syslog | sbus pub --lines logs/syslog
  sbus sub --json 'sensors/' | sbus -s /run/other.sock pub --json-lines
  sbus pub --repeat 100 --rate 10 test/ticks tick
  sbus pub --wait --timeout 30 jobs/start now
""",
)
@click.argument("key", type=BYTES, required=False)
@click.argument("payload", type=BYTES, required=False)
@click.option("--file", "-f", type=click.File("rb"), metavar="FILE", help="Read the payload from FILE.")
@click.option("--lines", "-l", is_flag=True, help="Publish each line of standard input (or FILE) as a message.")
@click.option(
    "--json-lines", "-j", is_flag=True, help="Publish each line of standard input (or FILE), as sub --json prints it."
)
@click.option(
    "--repeat",
    type=click.IntRange(min=0),
    metavar="N",
    help="Publish the message N times; 0: until interrupted.  [default: 1]",
)
@click.option("--rate", type=RATE, metavar="N", help="Publish at most N messages per second.")
@click.option("--if-subscribed", is_flag=True, help="Publish nothing if nobody subscribes to KEY, and exit with 3.")
@click.option("--wait", is_flag=True, help="Wait until somebody subscribes to KEY; limit the wait with --timeout.")
@click.option("--timeout", "-t", type=SECONDS, metavar="SECONDS", help="Give up after SECONDS, with status 124.")
@click.option("--no-wait", is_flag=True, help="Exit without waiting for the server to handle the messages.")
@connection_options
@pass_target
def pub(
    target: Target,
    key: bytes | None,
    payload: bytes | None,
    file: BinaryIO | None,
    lines: bool,
    json_lines: bool,
    repeat: int | None,
    rate: float | None,
    if_subscribed: bool,
    wait: bool,
    timeout: float | None,
    no_wait: bool,
) -> None:
    """Publish PAYLOAD under KEY.

    Without PAYLOAD the message is empty; '-' reads it from standard input. A FILE may be longer
    than a packet, if the server takes large messages. The command exits when the server has
    handled every message.

    For --if-subscribed and --wait, recorders and other observers are not subscribers: with only a
    recorder on the bus, --wait waits.
    """
    if payload is not None and file is not None:
        raise click.UsageError("PAYLOAD and --file exclude each other.")
    if lines and payload not in (None, b"-"):
        raise click.UsageError("--lines reads payloads from standard input or --file: leave out PAYLOAD.")
    if json_lines and (key is not None or lines or repeat is not None):
        raise click.UsageError("--json-lines reads keys and payloads: leave out KEY, --lines and --repeat.")
    if key is None and not json_lines:
        raise click.UsageError("Missing argument 'KEY'.")
    if lines and repeat is not None:
        raise click.UsageError("--lines and --repeat exclude each other.")
    if if_subscribed and wait:
        raise click.UsageError("--if-subscribed and --wait exclude each other.")
    if (if_subscribed or wait) and key is None:
        raise click.UsageError("--if-subscribed and --wait need KEY, and --json-lines has none.")
    deadline = Deadline(timeout, _ACTIVITY)
    stream = open_input(file, deadline)
    payloads = file is not None and not lines and not json_lines
    with target.connect_by(deadline, payloads=payloads) as bus, deadline.applied(), bus.limit(deadline.left):
        if if_subscribed and key is not None and not bus.has_subscribers(key, deadline.left):
            raise Nothing(f"nothing was published: nobody subscribes to {escape(key)}")
        if wait and key is not None:
            _wait_for_subscriber(bus, key, deadline)
        batches: Iterator[list[tuple[bytes | str, bytes]]]
        if key is None:
            batches = ([message] for message in _json_messages(stream, bus, deadline))
        elif lines:
            batches = ([(key, line)] for line in _lines(stream, bus, deadline, "split it"))
        else:
            if file is not None or payload == b"-":
                how = "in parts (see --lines)" if payloads else "from a file (--file), or in parts (see --lines)"
                payload = read_payload(stream, bus, deadline.left, f"publish it {how}")
            message = (key, payload or b"")
            is_alone = rate or len(message[1]) >= MAX_BUNDLE
            batches = _repeated(message, 1 if repeat is None else repeat, 1 if is_alone else _BATCH_MESSAGES)
        limiter = _RateLimiter(bus, rate, deadline)
        for messages in batches:
            limiter.wait()
            bus.publish_many(messages)
            deadline.check()
        if not no_wait:
            bus.fence(deadline.left)


def _wait_for_subscriber(bus: Bus, key: bytes, deadline: Deadline) -> None:
    deadline.activity = f"waiting for a subscriber of {escape(key)}"
    with bus.watch_subscribers(key) as watch:
        if not watch.get(deadline.left):
            text = f"sbus: waiting for a subscriber of {escape(key)}; recorders and other observers do not count"
            click.echo(text, err=True)
            while not watch.get(deadline.left):
                pass
    deadline.activity = _ACTIVITY


def _json_messages(stream: BufferedReader, bus: Bus, deadline: Deadline) -> Iterator[tuple[bytes, bytes]]:
    """Yield the key and the payload of each message in lines as ``sub --json`` prints them.

    Blank lines are left out. Lost messages, which ``sub --receipts`` and ``journal cat`` print as well, and digests,
    whose payloads were not recorded, cannot be published; a line on standard error says so.

    :raises UsageError: if a line is something else; with its number.
    :raises PacketTooLong: if a line is longer than that of any message that the server takes.
    """
    lines = _lines(stream, bus, deadline, "publish a shorter message", _JSON_BYTES, _JSON_REST)
    for number, line in enumerate(lines, 1):
        if number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            if is_gap(fields):
                text = escape(line.strip())
                click.echo(f"sbus: line {number} of {name_of(stream)} is no message, but a loss: {text}", err=True)
                continue
            message = decoded(fields, "key", "key_encoding"), decoded(fields, "payload", "encoding")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise UsageError(
                f"line {number} of {name_of(stream)} is no message: write an object with key and payload, as sub "
                "--json does"
            ) from None
        yield message


def _repeated(
    message: tuple[bytes | str, bytes], count: int, batch_size: int
) -> Iterator[list[tuple[bytes | str, bytes]]]:
    """Yield the message `count` times (0: without end), in batches."""
    batch = [message] * batch_size
    if not count:
        yield from itertools.repeat(batch)
    for start in range(0, count, batch_size):
        yield batch[: count - start]


def read_payload(stream: BufferedReader, bus: Bus, timeout: float | None, remedy: str) -> bytes:
    """Read a payload to its end.

    :param remedy: what to do with a longer payload, for the error.
    :raises PacketTooLong: if it has more bytes than the server takes.
    """
    payload, limit = b"", bus.core.max_packet
    while len(payload) <= limit:
        more = stream.read(limit + 1 - len(payload))
        if not more:
            return payload
        payload += more
        if len(payload) > limit:
            _longest_packet(bus, timeout)
            limit = bus.core.longest_payload
    raise _too_long(f"{name_of(stream)} has more than {limit} bytes", remedy, limit)


def _lines(
    stream: BufferedReader, bus: Bus, deadline: Deadline, remedy: str, factor: int = 1, rest: int = 0
) -> Iterator[bytes]:
    """Yield the lines of a stream.

    :param remedy: what to do with a longer line, for the error.
    :param factor: the most bytes of a line for each byte of a packet.
    :param rest: the most bytes of a line beside these.
    :raises PacketTooLong: if a line has more.
    """
    limit = factor * bus.core.max_packet + rest
    for number in itertools.count(1):
        line = stream.readline(limit + 2)
        if not line:
            return
        if len(line.removesuffix(b"\n")) > limit:
            limit = factor * _longest_packet(bus, deadline.left) + rest
            if not line.endswith(b"\n"):
                line += stream.readline(limit + 2 - len(line))
        line = line.removesuffix(b"\n")
        if len(line) > limit:
            fact = f"line {number} of {name_of(stream)} has more than {limit} bytes"
            raise _too_long(fact, remedy, bus.core.max_packet)
        yield line


def _longest_packet(bus: Bus, timeout: float | None) -> int:
    """Return the bytes in the longest packet that the server takes; it is asked if it has not said so yet."""
    if bus.core.may_learn_limit:
        bus.fence(timeout)
    return bus.core.max_packet


def _too_long(fact: str, remedy: str, limit: int) -> PacketTooLong:
    if limit < LONGEST_PACKET:  # beyond, no bus delivers it in a packet
        remedy += ", or have the operator raise the limit of the bus (--max-packet)"
    elif limit > LONGEST_PACKET:
        remedy += ", or have the operator raise the limit of the bus (--max-payload)"
    return PacketTooLong(f"{ViolationReason.PACKET_TOO_LONG.value}: {fact}; {remedy}")


_MAX_CATCH_UP = 0.1
"""Seconds of delay that the messages after a late one make up for by coming faster."""


_LOOK_INTERVAL = 0.1
"""Seconds between two looks at what the bus says, which cost a system call each."""


class _RateLimiter:
    """Space messages out in time.

    :param rate: messages per second; None for no limit.
    """

    def __init__(self, bus: Bus, rate: float | None, deadline: Deadline) -> None:
        self._bus = bus
        self._deadline = deadline
        self._interval = 1 / rate if rate else 0.0
        self._next = time.monotonic()

    def wait(self) -> None:
        """Wait until the next message is due.

        Without a rate, look from time to time whether the bus has refused one.

        :raises sbus.errors.Disconnected: if the connection is lost meanwhile.
        :raises sbus.errors.NotAllowed: if the bus refuses the messages.
        :raises sbus.errors.TimedOut: if the deadline passes.
        """
        if not self._interval:
            if (now := time.monotonic()) >= self._next:
                self._bus.get_ready()
                self._next = now + _LOOK_INTERVAL
            return
        while (early := self._next - time.monotonic()) > 0:
            left = self._deadline.left
            if wait_readable(self._bus, early if left is None else min(early, left)):
                self._bus.get_ready()
            self._deadline.check()
        self._next = max(self._next, time.monotonic() - _MAX_CATCH_UP) + self._interval
