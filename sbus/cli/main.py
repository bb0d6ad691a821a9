"""The command ``sbus``: its parts put together, and how it ends."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any, NoReturn

import click

from sbus.cli import ask, bench, pub, sub
from sbus.cli.journal import journal
from sbus.cli.options import to_connect
from sbus.cli.spark import spark
from sbus.errors import Disconnected, SbusError, TimedOut, UsageError
from sbus.version import __version__

__all__ = ["cli", "main"]


class _Failure(click.ClickException):
    """What has gone wrong, in one line."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.exit_code = status  # type: ignore[misc]

    def show(self, file: Any = None) -> None:
        click.echo(f"sbus: {self.format_message()}", file=file or sys.stderr)


class _Group(click.Group):
    """Ends the command as the documentation says, whatever happens in it."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            _end_by(signal.SIGINT)
        except BrokenPipeError:
            _end_by(signal.SIGPIPE)
        except TimedOut as e:
            raise _Failure(str(e), 124) from None
        except UsageError as e:
            raise _Failure(str(e), 2) from None
        except Disconnected as e:
            raise _Failure(
                f"{e}: it was stopped, or it turned you out: look into its log, or ask who runs it", 1
            ) from None
        except SbusError as e:
            raise _Failure(str(e), 1) from None
        except OSError as e:
            _forget_output()
            raise _Failure(f"{f'{e.filename}: ' if e.filename else ''}{e.strerror}", 1) from None


def _end_by(number: int) -> NoReturn:
    """End by a signal, so that a shell sees what has happened: 128 and its number."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    raise AssertionError("a signal that was to end this process did not")


def _forget_output() -> None:
    """What could not be written must not be tried again when the interpreter ends."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


@click.group(
    cls=_Group,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="""\
\b
Where the bus is: --socket, else $SBUS_SOCKET, else $XDG_RUNTIME_DIR/sbus.sock
if it exists, else /run/sbus.sock.

\b
Exit status: 0 all went well; 1 it failed; 2 it was called wrongly; 124 the time
was up; 130 it was ended by Ctrl-C; 141 nobody reads its output any more.

\b
Completion, in ~/.bashrc:  eval "$(_SBUS_COMPLETE=bash_source sbus)"
           in ~/.zshrc:    eval "$(_SBUS_COMPLETE=zsh_source sbus)"
           in fish:        _SBUS_COMPLETE=fish_source sbus | source

\b
Examples:
  sbus sub 'sensors/'
  sbus pub sensors/kitchen/temperature 21.5
""",
)
@click.version_option(__version__, prog_name="sbus")
@to_connect
def cli() -> None:
    """Talk to a bus: publish, subscribe, and find out what is wrong."""


for _command in (pub.pub, sub.sub, ask.whoami, ask.ping, ask.match, bench.bench, journal, spark):
    cli.add_command(_command)


def main() -> None:
    """The command ``sbus``."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # it was closed by who called us
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    cli.main(prog_name="sbus")
