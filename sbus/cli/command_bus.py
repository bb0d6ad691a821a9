"""The connection of a command to its bus, whose warnings are lines on standard error like every other."""

from __future__ import annotations

from typing import Any

import click

from sbus.client.blocking import Bus
from sbus.client.denials import raise_denied
from sbus.client.options import ConnectOptions

__all__ = ["connect"]


class _CommandBus(Bus):
    def _warn(self, text: str) -> None:
        click.echo(f"sbus: {text}", err=True)

    def _advise(self, text: str) -> None:
        click.echo(f"sbus: {text}", err=True)


def connect(address: str, **settings: Any) -> Bus:
    """Connect to the bus at an address.

    :param settings: as for `sbus.client.options.ConnectOptions`; by default a denial is raised.
    :raises sbus.errors.ConnectError: with the reason and the remedy.
    """
    settings.setdefault("on_denied", raise_denied)
    bus = _CommandBus(address, ConnectOptions(**settings))
    bus._open()
    return bus
