"""The manual pages: built by Sphinx, one for each command, with everything that ``--help`` says."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from sbus.cli.main import cli
from tests.support import ROOT

pytest.importorskip("sphinx", reason="Sphinx is not installed: run make docs")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the manual pages, and return their directory."""
    made = tmp_path_factory.mktemp("man")
    options = ["-W", "-q", "-b", "man", "-t", "man", "-d", made / "doctrees"]
    command = [sys.executable, "-m", "sphinx", *options, ROOT / "docs", made / "pages"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return made / "pages"


def commands(context: click.Context) -> Iterator[click.Context]:
    """Give a command's context, and those of all commands in it."""
    yield context
    command = context.command
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from commands(click.Context(found, info_name=name, parent=context))


def words(page: Path) -> str:
    """Return a page's words, without the markup of roff."""
    text = re.sub(r"^\.\S+ ?", "", page.read_text(), flags=re.MULTILINE)
    text = re.sub(r"\\f[BIPR]|\\&", "", text)
    for markup, character in (("\\-", "-"), ("\\(aq", "'"), ("\\(dq", '"'), ("\\e", "\\")):
        text = text.replace(markup, character)
    return " ".join(text.split())


def test_each_command_has_its_page(pages: Path) -> None:
    """A page has each option of the command's --help, with the same text; there is no page without a command."""
    made = {page.name for page in pages.glob("sbus*.1")}
    for context in commands(click.Context(cli, info_name="sbus")):
        name = context.command_path.replace(" ", "-") + ".1"
        made.remove(name)
        text = words(pages / name)
        for parameter in context.command.get_params(context):
            record = parameter.get_help_record(context)
            if record is not None and record[1]:
                assert record[0] in text, name
                assert " ".join(record[1].split()) in text, name
    assert not made


@pytest.mark.parametrize(("name", "section"), [("sbus-protocol.7", "PACKETS"), ("sbusd.8", "EXIT STATUS")])
def test_the_pages_that_are_written(pages: Path, name: str, section: str) -> None:
    """The pages on the protocol and on the daemon are there, and whole."""
    assert f"\n.SH {section}\n" in (pages / name).read_text()
