"""The command ``sbus``: the table of its commands, and its exit statuses."""

from __future__ import annotations

import errno
import os
import signal
import sys
from typing import IO, Any, NoReturn

import click

from sbus.cli.group import LazyGroup
from sbus.cli.options import connection_options
from sbus.cli.output import Nothing, describe_os_error
from sbus.errors import CloseReason, ConnectionLost, Disconnected, NobodyListens, SbusError, TimedOut, UsageError
from sbus.version import __version__

__all__ = ["cli", "fail", "main"]

_MODULES = {
    "pub": "sbus.cli.pub",
    "sub": "sbus.cli.sub",
    "get": "sbus.cli.get",
    "probe": "sbus.cli.probe",
    "request": "sbus.cli.request",
    "reply": "sbus.cli.reply",
    "serve": "sbus.cli.serve",
    "whoami": "sbus.cli.whoami",
    "ping": "sbus.cli.ping",
    "match": "sbus.cli.match",
    "bench": "sbus.cli.bench",
    "status": "sbus.cli.admin.status",
    "clients": "sbus.cli.admin.clients",
    "patterns": "sbus.cli.admin.patterns",
    "users": "sbus.cli.admin.users",
    "explain": "sbus.cli.admin.explain",
    "disconnect": "sbus.cli.admin.disconnect",
    "top": "sbus.cli.admin.top",
    "monitor": "sbus.cli.admin.monitor",
    "web": "sbus.cli.web",
    "journal": "sbus.cli.journal",
    "lake": "sbus.cli.lake",
    "spark": "sbus.cli.spark",
}


class _Failure(click.ClickException):
    """A failure: one line on standard error, and the exit status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.exit_code = status  # type: ignore[misc]

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"sbus: {self.format_message()}", file=file or sys.stderr)


class _Main(LazyGroup):
    """The root group: it turns every way to end into the documented exit status."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            _end_by(signal.SIGINT)
        except BrokenPipeError:
            _end_by(signal.SIGPIPE)
        except SbusError as e:
            raise _Failure(*_explain(e)) from None
        except OSError as e:
            raise _output_failed(e) from None


def _explain(error: SbusError) -> tuple[str, int]:
    """Return the line and the exit status for an error."""
    match error:
        case TimedOut():
            return str(error), 124
        case UsageError():
            return str(error), 2
        case ConnectionLost(reason=CloseReason()):
            return str(error), 1
        case Disconnected():
            return f"{error}: it may have stopped, or refused or disconnected this client; its log says which", 1
        case NobodyListens() | Nothing():
            return str(error), 3
        case _:
            return str(error), 1


def _end_by(number: int) -> NoReturn:
    """End by a signal, so that a shell reports 128 plus its number and ends its loops."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    raise AssertionError("the process survived a signal with its default action")


def _output_failed(error: OSError) -> _Failure:
    """Return the failure for an error of the operating system, usually one of the output."""
    # Keep the interpreter from retrying, when it exits, a write that has failed.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
    if error.errno == errno.EBADF:
        return _Failure("standard output is closed", 1)
    return _Failure(describe_os_error(error), 1)


@click.group(
    cls=_Main,
    modules=_MODULES,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="""\
\b
Examples:
  sbus sub 'sensors/'
  sbus pub sensors/kitchen/temperature 21.5

\b
Without --socket the bus is at $SBUS_SOCKET, else at the first that exists of
$XDG_RUNTIME_DIR/sbus.sock, /run/sbus.sock and /run/sbus.socket.

\b
Exit status:
  0    success
  1    failure
  2    wrong usage
  3    nobody subscribes; no last value
  124  timed out
  130  interrupted by Ctrl-C
  141  the reader of the output has gone

\b
Shell completion:
  bash  echo 'eval "$(_SBUS_COMPLETE=bash_source sbus)"' >>~/.bashrc
  zsh   echo 'eval "$(_SBUS_COMPLETE=zsh_source sbus)"' >>~/.zshrc
  fish  _SBUS_COMPLETE=fish_source sbus >~/.config/fish/completions/sbus.fish
""",
)
@click.version_option(__version__, prog_name="sbus")
@connection_options
def cli() -> None:
    """Publish to, subscribe to and inspect a local message bus."""


def _open_standard_streams() -> None:
    """Open standard streams that the caller has closed.

    What is written to a closed standard output must fail, as it does for other programs. What is written to standard
    error is lost.
    """
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(os.open(os.devnull, os.O_RDONLY), "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def main() -> None:
    """Run the command ``sbus``."""
    _open_standard_streams()
    try:
        cli.main(prog_name="sbus")
    except OSError as e:  # the help is printed before `_Main.invoke`
        failure = _output_failed(e)
        failure.show()
        sys.exit(failure.exit_code)


def fail(error: SbusError) -> NoReturn:
    """End the command as if it had raised this error."""
    _open_standard_streams()
    failure = _Failure(*_explain(error))
    failure.show()
    sys.exit(failure.exit_code)
