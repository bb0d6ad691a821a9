"""``sbus patterns``: what the clients of a bus are subscribed to."""

from __future__ import annotations

import json

import click

from sbus.cli.admin.connection import Admin, admin_option, json_option, limit_option
from sbus.cli.admin.words import echo_table
from sbus.cli.options import Target, connection_options, pass_target
from sbus.cli.types import BYTES, COUNT

__all__ = ["patterns"]


@click.command(
    short_help="List the patterns that clients subscribe to.",
    epilog="""\
\b
Examples:
  sbus patterns sensors/
  sbus patterns --client 12
""",
)
@click.argument("prefix", type=BYTES, default="")
@click.option("--client", type=COUNT, metavar="NUMBER", help="List the patterns of this client.")
@limit_option
@admin_option
@json_option
@connection_options
@pass_target
def patterns(target: Target, prefix: bytes, client: int | None, limit: int, admin: str | None, as_json: bool) -> None:
    """List the patterns that begin with PREFIX, those with most subscribers first.

    Secret patterns are cut.
    """
    found = Admin(target, admin).get("/v1/patterns", prefix=prefix, client=client, limit=limit)
    if as_json:
        click.echo(json.dumps(found))
    else:
        rows = ({**row, "pattern": row["pattern"] or '"" (everything)'} for row in found["patterns"])
        echo_table({"subscribers": ">", "pattern": "<"}, rows)
