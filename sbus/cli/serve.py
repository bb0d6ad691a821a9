"""``sbus serve``: a bus in the foreground, for those who do not have ``twistd`` at hand."""

from __future__ import annotations

import os

import click

from sbus.cli.options import Target, connection_options, pass_target
from sbus.daemon.launcher import twistd_command

__all__ = ["serve"]


@click.command(
    short_help="Run a bus in the foreground.",
    context_settings={"ignore_unknown_options": True},
    epilog="""\
\b
Examples:
  sbus serve
  sbus serve --socket=/tmp/bus --mode=0777
""",
)
@click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="[OPTION OF TWISTD SBUS]...")
@connection_options
@pass_target
def serve(target: Target, options: tuple[str, ...]) -> None:
    """Run a bus for this user until Ctrl-C: twistd --nodaemon sbus --admin=auto.

    Without --socket it listens where clients look for it: on $XDG_RUNTIME_DIR/sbus.sock, or as root on
    /run/sbus.sock. It takes all options of twistd sbus (twistd sbus --help).
    """
    address = target.socket or os.environ.get("SBUS_SOCKET")
    command = twistd_command(
        "sbus",
        "--admin=auto",
        *([f"--socket={address}"] if address else []),
        f"--dialect={target.dialect}",
        f"--max-packet={target.max_packet}",
        *options,
    )
    os.execv(command[0], command)
