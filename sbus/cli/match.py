"""``sbus match``: the rules of matching, tried on a pattern and some keys."""

from __future__ import annotations

import click

from sbus.cli.output import escape
from sbus.cli.patterns import show_mismatch
from sbus.cli.types import BYTES
from sbus.errors import InvalidKey, SbusError, Violation
from sbus.protocol.explain import explain, hint, never_matches
from sbus.protocol.keys import DIALECTS

__all__ = ["match"]


@click.command(
    short_help="Test whether a pattern matches keys.",
    epilog="""\
\b
Examples:
  sbus match 'sensors/*/temperature' sensors/kitchen/temperature
  sbus match 'a/*b' a/xb
""",
)
@click.argument("pattern", type=BYTES)
@click.argument("keys", type=BYTES, nargs=-1, required=True, metavar="KEY...")
@click.option("--quiet", "-q", is_flag=True, help="Print nothing; only set the exit status.")
@click.option(
    "--dialect",
    type=click.Choice(list(DIALECTS)),
    default="current",
    show_default=True,
    help="Rules to apply; 'early' separates segments with '.'.",
)
@click.pass_context
def match(ctx: click.Context, pattern: bytes, keys: tuple[bytes, ...], quiet: bool, dialect: str) -> None:
    """Test whether PATTERN matches each KEY and, if not, show where matching stops.

    The exit status is 0 if PATTERN matches every KEY, else 1. No server is needed. A pattern for
    secret keys is tested as if its subscriber were allowed to read the key.
    """
    matches_all = True
    for key in keys:
        try:
            mismatch = explain(pattern, key, DIALECTS[dialect])
        except Violation as e:
            raise _forbidden(pattern, key, e, dialect) from None
        if mismatch is None:
            text = f"{escape(key)}: matches"
        else:
            matches_all = False
            lines = [f"{escape(key)}: does not match: {mismatch.reason}", *show_mismatch(pattern, key, mismatch)]
            text = "\n  ".join(lines)
        if not quiet:
            click.echo(text)
    why = None if matches_all or quiet else hint(pattern, DIALECTS[dialect])
    if why is not None and why != never_matches(pattern, DIALECTS[dialect]):  # the reasons above say that already
        click.echo(f"hint: {why}")
    ctx.exit(0 if matches_all else 1)


def _forbidden(pattern: bytes, key: bytes, violation: Violation, dialect: str) -> SbusError:
    try:
        DIALECTS[dialect].check(pattern)
    except Violation:
        return InvalidKey(f"invalid pattern {escape(pattern)}: {violation}")
    return InvalidKey(f"invalid key {escape(key)}: {violation}")
