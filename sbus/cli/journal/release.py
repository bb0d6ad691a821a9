"""``sbus journal release``: forget a consumer that is gone."""

from __future__ import annotations

import click

from sbus.cli.journal.options import journal_argument
from sbus.cli.output import printable_text
from sbus.distribution import needs

__all__ = ["release"]


@click.command(short_help="Forget a consumer that is gone.")
@journal_argument
@click.argument("name", metavar="NAME")
def release(directory: str, name: str) -> None:
    """Forget a consumer that is gone for good, so that retention no longer keeps rows for it.

    "sbus journal ls" lists the consumers. One that still runs registers again with its next report.
    If no other consumer is left, retention deletes nothing, as before the first one.
    """
    with needs("recorder"):
        from sbus.journal.consumers import release as release_consumer
    release_consumer(directory, name)
    click.echo(printable_text(f"{directory}: the consumer {name!r} is forgotten"))
