"""``sbus probe``: whether anybody subscribes to a key."""

from __future__ import annotations

import click

from sbus.cli.options import Target, connection_options, pass_target, timeout_option
from sbus.cli.output import Nothing, escape
from sbus.cli.types import BYTES

__all__ = ["probe"]


@click.command(
    short_help="Say whether anybody subscribes to a key.",
    epilog="""\
\b
Example:
  sbus probe jobs/unpack 2>/dev/null || worker.sh unpack tar -xf &
""",
)
@click.argument("key", type=BYTES)
@timeout_option
@connection_options
@pass_target
def probe(target: Target, key: bytes, timeout: float) -> None:
    """Say whether anybody would get a message that you published under KEY now.

    The status is 0 if there is a subscriber, and 3 if there is none. Recorders and other observers
    do not count. For secret keys and for keys that you may not publish, the answer is always yes.
    """
    with target.connect(timeout=timeout) as bus:
        if not bus.has_subscribers(key, timeout):
            raise Nothing(f"nobody subscribes to {escape(key)}")
    click.echo(f"somebody subscribes to {escape(key)}")
