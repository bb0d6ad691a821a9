"""A group of commands that imports each command when it is used.

``sbus pub`` in a shell loop pays for its start-up every time. So it imports only its own command, and not, for example,
`multiprocessing` for ``bench`` or `csv` for ``spark traffic``.
"""

from __future__ import annotations

import importlib
import keyword
from collections.abc import Mapping
from typing import Any

import click

__all__ = ["LazyGroup"]


class LazyGroup(click.Group):
    """A group of commands that imports each command when it is used.

    :param modules: the module of each command; the command is the module's attribute of the command's name, with ``_``
        behind a keyword of Python.
    """

    def __init__(self, *args: Any, modules: Mapping[str, str], **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._modules = modules

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._modules:
            return None
        name = f"{cmd_name}_" if keyword.iskeyword(cmd_name) else cmd_name
        command = getattr(importlib.import_module(self._modules[cmd_name]), name)
        assert isinstance(command, click.Command), cmd_name
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in self._modules and not name.startswith("-") and not ctx.resilient_parsing:
            from difflib import get_close_matches

            near = get_close_matches(name, self._modules, n=1)
            ctx.fail(f"No such command {name!r}." + (f" Did you mean {near[0]!r}?" if near else ""))
        return super().resolve_command(ctx, args)
