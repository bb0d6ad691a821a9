"""``sbus request``: send a request, and print the reply."""

from __future__ import annotations

import sys
from typing import BinaryIO

import click

from sbus.cli.deadline import Deadline
from sbus.cli.numbers import CommandWithNumbers
from sbus.cli.options import Target, connection_options, pass_target
from sbus.cli.pub import read_payload
from sbus.cli.streams import open_input
from sbus.cli.types import BYTES, SECONDS

__all__ = ["request"]


@click.command(
    cls=CommandWithNumbers,
    short_help="Send a request, and print the reply.",
    epilog="""\
\b
Examples:
  sbus request calculator/sum '1 2 3'
  sbus request --file question.json oracle/answers | jq .answer
""",
)
@click.argument("key", type=BYTES)
@click.argument("payload", type=BYTES, required=False)
@click.option("--file", "-f", type=click.File("rb"), metavar="FILE", help="Read the payload from FILE.")
@click.option(
    "--timeout",
    "-t",
    type=SECONDS,
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="Give up after SECONDS, with status 124.",
)
@connection_options
@pass_target
def request(target: Target, key: bytes, payload: bytes | None, file: BinaryIO | None, timeout: float) -> None:
    """Send a request with PAYLOAD to the programs that respond at KEY, and print the first reply.

    Without PAYLOAD the request is empty; '-' reads it from standard input. The reply is printed byte
    for byte; on a terminal it is followed by a newline. If the reply is an error, its text is printed
    on standard error, and the exit status is 1.
    """
    if payload is not None and file is not None:
        raise click.UsageError("PAYLOAD and --file exclude each other.")
    with target.connect(timeout=timeout) as bus:
        if file is not None or payload == b"-":
            payload = read_payload(open_input(file, Deadline(None)), bus, timeout, "send it in parts")
        answer = bus.request(key, payload or b"", timeout)
    output = sys.stdout.buffer
    output.write(answer)
    if sys.stdout.isatty() and not answer.endswith(b"\n"):
        output.write(b"\n")
    output.flush()
