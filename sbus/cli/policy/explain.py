"""``sbus policy explain``: whether a policy allows something, and which rules decide."""

from __future__ import annotations

import json

import click

from sbus.cli.admin.connection import Admin, admin_option
from sbus.cli.options import Target, connection_options, pass_target
from sbus.cli.output import escape, printable_text
from sbus.cli.policy.options import (
    describe,
    json_option,
    load_policy,
    reason_row,
    reason_text,
    who_row,
)
from sbus.cli.policy.running import RunningBus
from sbus.cli.types import BYTES
from sbus.policy.names import identity_of
from sbus.policy.reasons import explain as explain_verdict
from sbus.policy.rules import Verb

__all__ = ["explain"]


@click.command(
    short_help="Say whether a policy allows something, and why.",
    epilog="""\
\b
Examples:
  sbus policy explain --user alice publish sensors/kitchen       # with the policy of the bus
  sbus policy explain --policy new.toml --user 1000 --group plant subscribe 'sensors/'
""",
)
@click.argument("verb", type=click.Choice(["publish", "subscribe"]))
@click.argument("key", type=BYTES)
@click.option(
    "--policy",
    "path",
    metavar="FILE",
    type=click.Path(),
    help="A file, or a directory of *.toml.  [default: the policy of the bus]",
)
@click.option("--user", "-u", required=True, metavar="USER", help="The client's user: a name or a UID.")
@click.option(
    "--group",
    "-g",
    "groups",
    multiple=True,
    metavar="GROUP",
    help="A group of the client (repeatable, the primary one first).  [default: those of the user]",
)
@click.option("--listener", "-l", default="main", show_default=True, metavar="NAME", help="The client's socket.")
@json_option
@admin_option
@connection_options
@pass_target
@click.pass_context
def explain(
    ctx: click.Context,
    target: Target,
    verb: Verb,
    key: bytes,
    path: str | None,
    user: str,
    groups: tuple[str, ...],
    listener: str,
    as_json: bool,
    admin: str | None,
) -> None:
    """Say whether a policy allows a client to publish KEY, or to subscribe to the pattern KEY, and why.

    Each rule that decides is named with file and line; "also" begins a line about a rule that comes
    near. The status is 0 if the policy allows it, else 1. No bus is needed if --policy is given.
    """
    policy = RunningBus(Admin(target, admin)).policy() if path is None else load_policy(path)
    who = identity_of(user, groups, listener)
    verdict, reasons = explain_verdict(policy, who, verb, key)
    if as_json:
        row = {
            "is_allowed": verdict.is_allowed,
            "is_audited": verdict.is_audited,
            "verb": verb,
            "key": key.decode(errors="backslashreplace"),
            "client": who_row(who),
            "mode": "audit" if policy.is_audit else "enforce",
            "reasons": [reason_row(reason) for reason in reasons],
        }
        click.echo(json.dumps(row))
    else:
        may = "may" if verdict.is_allowed else "may not"
        what = f"{verb} {escape(key)}" if verb == "publish" else f"subscribe to {escape(key) or 'every key'}"
        click.echo(f"{may} {what}: {printable_text(describe(who))}")
        for reason in reasons:
            click.echo(printable_text(f"  {'because' if reason.decides else 'also'} {reason_text(reason)}"))
        if policy.is_audit and not verdict.is_allowed:
            click.echo("  but the mode is audit: the bus logs this, and refuses nothing")
    ctx.exit(0 if verdict.is_allowed else 1)
