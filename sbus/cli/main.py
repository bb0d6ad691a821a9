"""The command ``sbus``: the table of its commands, and its exit statuses."""

from __future__ import annotations

import errno
import signal
import sys
from typing import IO, Any, NoReturn

import click

from sbus.cli.group import LazyGroup
from sbus.cli.options import connection_options
from sbus.cli.output import Nothing, describe_os_error, printable_text
from sbus.cli.stopping import Terminated, end_by
from sbus.cli.streams import open_streams
from sbus.errors import (
    CloseReason,
    ConnectionLost,
    Disconnected,
    NobodyListens,
    NotAllowed,
    RequestFailed,
    SbusError,
    TimedOut,
    UsageError,
)
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
    "queue": "sbus.cli.queue",
    "record": "sbus.cli.record",
    "whoami": "sbus.cli.whoami",
    "ping": "sbus.cli.ping",
    "match": "sbus.cli.match",
    "policy": "sbus.cli.policy",
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
    "archive": "sbus.cli.archive",
    "lake": "sbus.cli.lake",
    "report": "sbus.cli.report",
    "replay": "sbus.cli.replay",
    "spark": "sbus.cli.spark",
}


class _Failure(click.ClickException):
    """A failure: a text on standard error, of one line unless it has the end of a log, and the exit status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.exit_code = status  # type: ignore[misc]

    def show(self, file: IO[Any] | None = None) -> None:
        # It may have words of other clients, and names that other users have chosen: of files, of topics.
        lines = map(printable_text, self.format_message().split("\n"))
        click.echo("sbus: " + "\n".join(lines), file=file or sys.stderr)


class _Main(LazyGroup):
    """The root group: it turns every way to end into the documented exit status."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            end_by(signal.SIGINT)
        except BrokenPipeError:
            end_by(signal.SIGPIPE)
        except SbusError as e:
            raise _Failure(*_explain(e)) from None


def _explain(error: SbusError) -> tuple[str, int]:
    """Return the line and the exit status for an error."""
    match error:
        case RequestFailed():
            return printable_text(str(error)), 1  # the responder's words, which must not look like a second error
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
        case NotAllowed():
            return str(error), 4
        case _:
            return str(error), 1


def _describe(error: OSError) -> str:
    """Return the line for an error of the operating system, usually one of the output."""
    if error.errno == errno.EBADF and error.filename == "standard output":
        return "standard output is closed"
    return describe_os_error(error)


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
  4    the policy of the bus forbids it
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


def main() -> None:
    """Run the command ``sbus``."""
    streams = open_streams()
    status: object = 1
    error: OSError | None = None
    is_terminated = False
    try:
        try:
            cli.main(prog_name="sbus")
        except SystemExit as e:
            status = e.code
        except OSError as e:
            error = e
        try:
            streams.finish()
        except BrokenPipeError:
            end_by(signal.SIGPIPE)
        except OSError as e:
            error = e
    except KeyboardInterrupt:
        end_by(signal.SIGINT)
    except Terminated:
        is_terminated = True
    if is_terminated:  # after the exception, whose frames may have a block that has to tidy up
        end_by(signal.SIGTERM)
    if error is not None:
        _Failure(_describe(error), 1).show()
        status = status or 1
    sys.exit(status)  # type: ignore[arg-type]


def fail(error: SbusError) -> NoReturn:
    """End the command as if it had raised this error."""
    open_streams()
    failure = _Failure(*_explain(error))
    failure.show()
    sys.exit(failure.exit_code)
