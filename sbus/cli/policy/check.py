"""``sbus policy check``: the errors of a policy, and the entries that change nothing."""

from __future__ import annotations

import json

import click

from sbus.cli.output import pluralize, printable_text
from sbus.cli.policy.options import json_option, load_policy
from sbus.policy import Policy
from sbus.policy.review import review

__all__ = ["check"]


@click.command(
    short_help="Find errors, and entries that change nothing.",
    epilog="""\
\b
Examples:
  sbus policy check /etc/sbus/policy.toml
  sbus policy check --listener main --listener app /etc/sbus/policy
""",
)
@click.argument("path", metavar="FILE", type=click.Path())
@click.option(
    "--listener",
    "-l",
    "listeners",
    multiple=True,
    metavar="NAME",
    help="A socket of the bus, such as main (repeatable). If given, rules may name no other.",
)
@json_option
def check(path: str, listeners: tuple[str, ...], as_json: bool) -> None:
    """Check a policy: FILE, or all *.toml of a directory.

    An error ends the command with status 2. Warnings name what in the policy changes nothing, and
    what makes it so, and rules that match nobody; they leave the status at 0.
    """
    policy = load_policy(path, listeners)
    findings = review(policy)
    if as_json:
        warnings = [{"where": each.where, "rule": each.rule, "text": each.text} for each in findings]
        click.echo(json.dumps({**_summary(policy), "warnings": warnings}))
        return
    for each in findings:
        click.echo(printable_text(f"{each.where}: {each.rule}: {each.text}"))
    click.echo(printable_text(f"{path}: {_words(policy)}; {pluralize(len(findings), 'warning')}"))


def _summary(policy: Policy) -> dict[str, object]:
    return {
        "files": policy.files,
        "rules": len(policy.rules),
        "limits": len(policy.limits),
        "default": "deny" if policy.is_closed else "allow",
        "closed": [pattern.decode(errors="backslashreplace") for pattern in policy.closed],
        "mode": "audit" if policy.is_audit else "enforce",
    }


def _words(policy: Policy) -> str:
    words = [pluralize(len(policy.rules), "rule")]
    if policy.limits:
        words.append(f"shares in {pluralize(len(policy.limits), 'table')}")
    words.append(f"default {'deny' if policy.is_closed else 'allow'}")
    if policy.closed:
        words.append(f"{pluralize(len(policy.closed), 'closed pattern')}")
    if policy.is_audit:
        words.append("mode audit")
    return ", ".join(words)
