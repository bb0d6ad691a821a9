"""``sbus reply``: answer requests with the output of a command."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

from sbus.cli.deadline import wait_readable
from sbus.cli.options import Target, connection_options, pass_target
from sbus.cli.output import escape
from sbus.cli.types import BYTES, COUNT, SECONDS
from sbus.client.denials import Denial, DenialLog, raise_denied
from sbus.client.responding import Request
from sbus.errors import RequestFailed, SbusError
from sbus.protocol.packets import SUB

__all__ = ["reply"]

_END_TIMEOUT = 5.0
"""Seconds for the process of ``--lines`` to end after its input has."""

Answer = Callable[[Request], bytes]


@click.command(
    short_help="Answer requests with the output of a command.",
    epilog="""\
\b
Examples:
  sbus reply 'clock/*' -- date
  sbus reply calculator/sum -- sh -c 'tr " " "\\n" | paste -sd+ | bc'
  sbus reply --lines oracle -- python3 -u oracle.py
""",
)
@click.argument("pattern", type=BYTES)
@click.argument("command", type=BYTES, nargs=-1, required=True, metavar="-- COMMAND [ARGUMENT]...")
@click.option("--lines", "-l", is_flag=True, help="Run COMMAND once: it gets a line for each request, and answers it.")
@click.option("--count", "-n", type=COUNT, metavar="N", help="Exit after N requests.")
@click.option(
    "--timeout", "-t", type=SECONDS, metavar="SECONDS", help="Fail a request whose COMMAND takes longer than SECONDS."
)
@click.option("--verbose", "-v", is_flag=True, help="Report on standard error when requests are answered.")
@connection_options
@pass_target
def reply(
    target: Target,
    pattern: bytes,
    command: tuple[bytes, ...],
    lines: bool,
    count: int | None,
    timeout: float | None,
    verbose: bool,
) -> None:
    """Answer each request whose key matches PATTERN with the output of COMMAND.

    COMMAND runs once for each request, one after the other. It gets the request's payload on standard
    input and its key in the environment variable SBUS_KEY. What it prints is the reply. If its exit
    status is not 0, the requester gets an error; what COMMAND writes to standard error stays here.

    With --lines, COMMAND runs once, and answers each line that it reads with a line. It must not
    buffer its output.
    """
    if lines and timeout is not None:
        raise click.UsageError("--timeout is for a COMMAND that runs for each request: leave out --lines.")
    answered = 0
    log = DenialLog(lambda line: click.echo(f"sbus: {line}", err=True))

    def on_denied(denial: Denial) -> None:
        if denial.verb == SUB:
            raise_denied(denial)
        log.add(denial)  # the requester chose where the reply goes, and must not be able to end the command

    def handle(request: Request) -> bytes:
        nonlocal answered
        answered += 1
        return answer(request)

    with (
        _line_server(command) if lines else _runner(command, timeout) as answer,
        target.connect(on_denied=on_denied) as bus,
    ):
        bus.respond(pattern, handle)
        bus.fence()
        if verbose:
            click.echo(f"sbus: answering requests at {escape(pattern)} at {target.address}", err=True)
        while answered != count:
            bus.get_ready()
            if answered != count:
                wait_readable(bus, None)
        bus.fence()  # the last reply has been handled


@contextmanager
def _runner(command: tuple[bytes, ...], timeout: float | None) -> Iterator[Answer]:
    """Run the command for each request.

    :raises SbusError: if there is no such command.
    """
    if shutil.which(command[0]) is None:
        raise SbusError(f"cannot run {escape(command[0])}: there is no such command on PATH")

    def answer(request: Request) -> bytes:
        environ = {**os.environb, b"SBUS_KEY": request.key}
        try:
            done = subprocess.run(
                command, input=request.payload, stdout=subprocess.PIPE, env=environ, timeout=timeout, check=False
            )
        except subprocess.TimeoutExpired:
            raise RequestFailed(f"the command took longer than {timeout:g} seconds") from None
        except OSError as e:
            if e.errno == errno.E2BIG:
                raise RequestFailed(
                    f"a key of {len(request.key):,} bytes does not fit into the environment of the command"
                ) from None
            raise RequestFailed(f"the command cannot be started: {e.strerror}") from None
        if done.returncode:
            raise RequestFailed(f"the command failed with status {done.returncode}")
        return done.stdout

    yield answer


@contextmanager
def _line_server(command: tuple[bytes, ...]) -> Iterator[Answer]:
    """Run the command once, and exchange lines with it.

    :raises SbusError: if it cannot be run.
    """
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    except OSError as error:
        raise SbusError(f"cannot run {escape(command[0])}: {error.strerror}") from None
    assert process.stdin is not None
    assert process.stdout is not None
    into, out = process.stdin, process.stdout

    def answer(request: Request) -> bytes:
        if b"\n" in request.payload:
            raise RequestFailed("this responder takes requests of one line")
        try:
            into.write(request.payload + b"\n")
            into.flush()
            line = out.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            raise RequestFailed("the command has ended")
        return line.removesuffix(b"\n")

    try:
        yield answer
    finally:
        try:
            into.close()
        except BrokenPipeError:
            pass
        try:
            process.wait(_END_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
        out.close()
