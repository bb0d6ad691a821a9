"""``sbus disconnect``: disconnect a client."""

from __future__ import annotations

import click

from sbus.cli.admin.connection import Admin, admin_option
from sbus.cli.options import Target, connection_options, pass_target
from sbus.cli.types import COUNT

__all__ = ["disconnect"]


@click.command(
    short_help="Disconnect a client.",
    epilog="""\
\b
Example:
  sbus disconnect 12
""",
)
@click.argument("client", type=COUNT, metavar="NUMBER")
@admin_option
@connection_options
@pass_target
def disconnect(target: Target, client: int, admin: str | None) -> None:
    """Disconnect the client with this NUMBER, which sbus clients shows.

    It may connect again; to keep it out, see --allow-user of twistd sbus.
    """
    Admin(target, admin).post("/v1/disconnect", client=client)
    click.echo(f"client {client} is disconnected")
