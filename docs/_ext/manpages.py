"""Sphinx: manual pages made of the help texts.

``.. commandhelp:: sbus journal ls``
    everything that the command's ``--help`` says, as sections of a manual page

With the builder ``man``, each command of ``sbus`` gets a page, in ``docs/man/commands``, which is made here each time.
What the pages and ``--help`` say cannot differ, as both are the same objects.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click
from docutils import nodes
from sbusdocs import Generated

from sbus.cli.main import cli

if TYPE_CHECKING:
    from sphinx.application import Sphinx

COMMANDS = "man/commands"


def commands() -> Iterator[click.Context]:
    """Give the context of each command of ``sbus``, groups before their commands."""
    root = click.Context(cli, info_name="sbus", **cli.context_settings)
    waiting = [root]
    while waiting:
        context = waiting.pop(0)
        yield context
        command = context.command
        if isinstance(command, click.Group):
            for name in command.list_commands(context):
                found = command.get_command(context, name)
                assert found is not None, name
                waiting.append(click.Context(found, info_name=name, parent=context, **found.context_settings))


def page_name(context: click.Context) -> str:
    """Return the name of a command's page, such as ``sbus-journal-ls``."""
    return context.command_path.replace(" ", "-")


def man_pages(author: str) -> list[tuple[str, str, str, str, int]]:
    """Return the setting ``man_pages`` of conf.py for all commands."""
    return [
        (f"{COMMANDS}/{page_name(context)}", page_name(context), _summary(context.command), author, 1)
        for context in commands()
    ]


class CommandHelp(Generated):
    """The help of one command."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        wanted = self.arguments[0]
        for context in commands():
            if context.command_path == wanted:
                return list(_sections(context))
        raise self.error(f"there is no command {wanted!r}")


def _summary(command: click.Command) -> str:
    text = command.get_short_help_str(limit=200).rstrip(".")
    return text[:1].lower() + text[1:]


def _sections(context: click.Context) -> Iterator[nodes.Node]:
    command = context.command
    yield _section("Synopsis", [nodes.paragraph("", "", nodes.strong(text=_usage(context)))])
    yield _section("Description", _paragraphs(command.help or ""))
    records = [record for p in command.get_params(context) if (record := p.get_help_record(context))]
    options = [record for record in records if record[1]]
    if options:
        yield _section("Options", [_definitions(options)])
    if isinstance(command, click.Group):
        found = [(name, command.get_command(context, name)) for name in command.list_commands(context)]
        rows = [(f"{page_name(context)}-{name}(1)", c.get_short_help_str(200)) for name, c in found if c is not None]
        yield _section("Commands", [_definitions(rows)])
    if command.epilog:
        yield _section("Notes", _paragraphs(command.epilog))
    if context.parent is not None:
        names = f"{page_name(context.parent)}(1), sbus-protocol(7)"
    else:
        names = "sbusd(8), sbus-protocol(7)"
    yield _section("See also", [nodes.paragraph(text=names)])


def _usage(context: click.Context) -> str:
    return context.command.get_usage(context).removeprefix("Usage: ")


def _section(title: str, content: list[nodes.Node]) -> nodes.section:
    return nodes.section("", nodes.title(text=title), *content, ids=[nodes.make_id(title)])


def _paragraphs(text: str) -> list[nodes.Node]:
    """Return a help text's paragraphs; those that click leaves as they are become literal blocks."""
    found: list[nodes.Node] = []
    for paragraph in re.split(r"\n[ \t]*\n", text.strip("\n")):
        if not paragraph.strip():
            continue
        if paragraph.lstrip().startswith("\b"):
            found.append(nodes.literal_block(text=paragraph.lstrip().removeprefix("\b").strip("\n")))
        else:
            found.append(nodes.paragraph(text=" ".join(paragraph.split())))
    return found


def _definitions(rows: list[tuple[str, str]]) -> nodes.definition_list:
    items = [
        nodes.definition_list_item(
            "", nodes.term("", "", nodes.strong(text=term)), nodes.definition("", nodes.paragraph(text=text))
        )
        for term, text in rows
    ]
    return nodes.definition_list("", *items)


def write_stubs(app: Sphinx) -> None:
    """Make the page of each command."""
    directory = Path(app.srcdir, COMMANDS)
    shutil.rmtree(directory, ignore_errors=True)
    if app.builder.name != "man":
        return
    directory.mkdir(parents=True)
    for context in commands():
        name = page_name(context)
        text = f":orphan:\n\n{name}\n{'=' * len(name)}\n\n.. commandhelp:: {context.command_path}\n"
        (directory / f"{name}.rst").write_text(text)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("commandhelp", CommandHelp)
    app.connect("builder-inited", write_stubs)
    return {"parallel_read_safe": True}
