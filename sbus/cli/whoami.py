"""``sbus whoami``: the credentials that the server has for this process."""

from __future__ import annotations

import click

from sbus.cli.options import Target, connection_options, pass_target, timeout_option
from sbus.cli.output import escape
from sbus.client.identity import explain_name

__all__ = ["whoami"]


@click.command(
    short_help="Print your credentials as the server sees them.",
    epilog="""\
\b
Example:
  me=$(sbus whoami) && echo "$me"
""",
)
@timeout_option
@connection_options
@pass_target
def whoami(target: Target, timeout: float) -> None:
    """Print your credentials as the server sees them: !/cred/GID/UID/PID.

    The PID is that of this command and is gone when it exits. The GID and UID are those that the
    server sees for your other programs too.
    """
    with target.connect(timeout=timeout) as bus:
        me = bus.whoami(timeout)
    click.echo(escape(me))
    if (explanation := explain_name(me)) is not None:
        click.echo(f"sbus: this name is not yours alone, so secret keys are refused: {explanation}", err=True)
