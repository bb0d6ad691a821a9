"""The formats of ``sbus journal export`` and ``import``: the option, and the module of each."""

from __future__ import annotations

import importlib
import os
from typing import Any

import click

from sbus.distribution import needs
from sbus.errors import UsageError

__all__ = ["format_option", "load_format"]

_EXTRAS = {"mcap": "mcap", "jsonl": "recorder", "parquet": "recorder"}
"""The extra that each format needs."""

format_option = click.option(
    "--format",
    "format_",
    type=click.Choice(list(_EXTRAS)),
    help="Format of the file.  [default: that of its name, such as run.mcap]",
)


def load_format(name: str | None, path: str | None) -> Any:
    """Return the module of a format, with ``write`` and ``read``.

    :param name: the name of the format; None: that of the file.
    :param path: the file; None: standard output.
    :raises UsageError: if neither says which format it is, or a library is missing.
    """
    if name is None:
        name = os.path.splitext(path or "")[1].removeprefix(".").lower()
        if name not in _EXTRAS:
            file = "standard output has no name" if path is None else f"{path}: its name does not end with a format"
            raise UsageError(f"{file}: choose one with --format={{{','.join(_EXTRAS)}}}")
    with needs(_EXTRAS[name]):
        return importlib.import_module(f"sbus.interchange.{name}")
