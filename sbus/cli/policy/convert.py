"""``sbus policy convert``: a policy from the access rules of D-Bus or mosquitto."""

from __future__ import annotations

import importlib

import click

from sbus.errors import UsageError

__all__ = ["convert"]

_CONVERTERS = {"dbus": "sbus.policy.convert_dbus", "mosquitto": "sbus.policy.convert_mosquitto"}


@click.command(
    short_help="Convert access rules of D-Bus or mosquitto.",
    epilog="""\
\b
Examples:
  sbus policy convert --from=dbus /usr/share/dbus-1/system.conf /etc/dbus-1/system.d/org.example.conf
  sbus policy convert --from=mosquitto /etc/mosquitto/acl >/etc/sbus/policy.d/mosquitto.toml
""",
)
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path())
@click.option(
    "--from", "origin", required=True, type=click.Choice(list(_CONVERTERS)), help="The program whose rules these are."
)
def convert(files: tuple[str, ...], origin: str) -> None:
    """Print a policy that allows no more than the access rules in FILE.

    A comment says of each rule that was not converted, or denies more than before, why. Check the
    result with "sbus policy check". Files that D-Bus reads together are converted together.
    """
    texts = [(path, _read(path)) for path in files]
    click.echo(importlib.import_module(_CONVERTERS[origin]).convert(texts), nl=False)


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError as e:
        raise UsageError(f"{path}: it cannot be read: {e.strerror}: correct the path, or run this as root") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: it is not UTF-8: save it as UTF-8") from None
