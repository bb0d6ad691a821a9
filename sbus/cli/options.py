"""What the parts of ``sbus`` share: the options that say which bus, types of arguments, and how numbers are told."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from sbus.client.blocking import Bus, connect
from sbus.client.connecting import find_address
from sbus.protocol.keys import CURRENT, EARLY, Dialect
from sbus.protocol.packets import DEFAULT_MAX_PACKET

__all__ = ["AS_BYTES", "COUNT", "DIALECTS", "SECONDS", "Target", "pluralize", "to_connect", "with_target"]

F = TypeVar("F", bound=Callable[..., Any])

DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in (CURRENT, EARLY)}


AS_BYTES = os.fsencode
"""The type of keys, patterns and payloads: the argument, byte for byte as it was given."""
COUNT = click.IntRange(min=1)
SECONDS = click.FloatRange(min=0, min_open=True)


@dataclass(slots=True)
class Target:
    """Which bus is meant, and how to talk to it."""

    socket: str | None = None
    dialect: str = CURRENT.name
    max_packet: int = DEFAULT_MAX_PACKET

    @property
    def address(self) -> str:
        return find_address(self.socket)

    def connect(self, **settings: Any) -> Bus:
        """Connect to it.

        :raises sbus.errors.ConnectError: with the reason and the remedy.
        """
        return connect(self.address, dialect=self.dialect, max_packet=self.max_packet, **settings)


def _remember(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    target = ctx.find_root().ensure_object(Target)
    if value is not None:
        assert param.name is not None
        setattr(target, param.name, value)


def _complete_file(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="file")]


with_target = click.make_pass_decorator(Target, ensure=True)
"""Call the command with the `Target` as its first argument."""


def to_connect(command: F) -> F:
    """Give a command the options that say which bus; they may stand before or behind its name."""
    options = (
        click.option(
            "--socket",
            "-s",
            metavar="ADDRESS",
            expose_value=False,
            callback=_remember,
            shell_complete=_complete_file,
            help="Where the bus is: a path, @NAME or /dev/unix/abstract/HEX.",
        ),
        click.option(
            "--dialect",
            type=click.Choice(list(DIALECTS)),
            expose_value=False,
            callback=_remember,
            help="Revision of the protocol that the server speaks.  [default: current]",
        ),
        click.option(
            "--max-packet",
            type=click.IntRange(min=64),
            metavar="BYTES",
            expose_value=False,
            callback=_remember,
            help=f"Bytes in the longest packet, as at the server.  [default: {DEFAULT_MAX_PACKET}]",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def pluralize(count: int, what: str) -> str:
    """A number of something, in words: ``1 row``, ``2,000 rows``, ``3 batches``."""
    if count != 1:
        what += "es" if what.endswith("ch") else "s"
    return f"{count:,} {what}"
