"""``sbus policy``: check, explain, compare and reload policies."""

from __future__ import annotations

import click

from sbus.cli.group import LazyGroup

__all__ = ["policy"]

_MODULES = {
    "check": "sbus.cli.policy.check",
    "explain": "sbus.cli.policy.explain",
    "diff": "sbus.cli.policy.diff",
    "reload": "sbus.cli.policy.reload",
    "convert": "sbus.cli.policy.convert",
}


@click.group(
    cls=LazyGroup,
    modules=_MODULES,
    short_help="Check, explain, compare and reload policies.",
    epilog="""\
\b
Examples:
  sbus policy check /etc/sbus/policy.toml
  sbus policy explain --user alice publish sensors/a
  sbus policy diff new.toml
  sbus policy reload
  sbus policy convert --from=mosquitto /etc/mosquitto/acl
""",
)
def policy() -> None:
    """Check, explain, compare and reload policies: the files that say who may publish and subscribe to what.

    A policy is a file, or a directory of *.toml. Users and groups are those of this system.
    """
