"""``sbus web``: look at a bus in the browser."""

from __future__ import annotations

import click

from sbus.admin.locate import find_admin
from sbus.cli.options import Target, connection_options, pass_target
from sbus.cli.types import SocketPath
from sbus.errors import AddressError

__all__ = ["web"]


@click.command(
    short_help="Look at the bus in a browser.",
    epilog="""\
\b
Examples:
  sbus web
  sbus web --port 8080
  sbus web --unix ~/bus-page.sock     # elsewhere: ssh -L 8080:/home/me/bus-page.sock host
""",
)
@click.option(
    "--port", type=click.IntRange(0, 65535), metavar="PORT", help="Port of 127.0.0.1.  [default: one that is free]"
)
@click.option(
    "--unix",
    type=click.Path(dir_okay=False),
    metavar="PATH",
    help="Listen on a Unix socket of this user, and on no port.",
)
@click.option(
    "--admin",
    type=SocketPath(),
    metavar="PATH",
    help="Admin socket of the bus.  [default: the bus's path with .admin appended]",
)
@connection_options
@pass_target
def web(target: Target, port: int | None, unix: str | None, admin: str | None) -> None:
    """Serve a page that shows the bus, for this user alone, until Ctrl-C.

    It prints a link; open it in a browser on this machine. The page can do what this user can do,
    and no more: the bus and its admin socket see this process.
    """
    if port is not None and unix is not None:
        raise click.UsageError("--port and --unix exclude each other.")
    from sbus.web.process import Settings, run

    address = target.address
    run(
        Settings(
            address=address,
            dialect=target.dialect,
            max_packet=target.max_packet,
            admin=_find_admin(admin, target.socket),
            port=port or 0,
            unix=unix,
        ),
        click.echo,
    )


def _find_admin(given: str | None, bus: str | None) -> str | None:
    """Return the path of the admin socket; None if there is no default for this bus: the page says so then."""
    try:
        return find_admin(given, bus)
    except AddressError:
        return None
