"""``sbus policy reload``: have a bus read its policy again."""

from __future__ import annotations

import click

from sbus.cli.admin.connection import Admin, admin_option
from sbus.cli.options import Target, connection_options, pass_target
from sbus.errors import PolicyError

__all__ = ["reload"]


@click.command(
    short_help="Have a bus read its policy again.",
    epilog="""\
\b
Example:
  sbus policy check /etc/sbus/policy.toml && sbus policy reload
""",
)
@admin_option
@connection_options
@pass_target
def reload(target: Target, admin: str | None) -> None:
    """Have the bus read its policy again, and wait until the new one is in force.

    If something is wrong with the files, the policy before stays in force, and the status is 2.
    """
    answer = Admin(target, admin).post("/v1/policy/reload")
    if "problem" in answer:
        raise PolicyError(answer["problem"])
    click.echo(f"the policy is in force (generation {answer['generation']})")
