"""What the command ``sbus`` imports: only the command that is used, and never Twisted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from sbus.cli.group import LazyGroup
from sbus.cli.journal import journal
from sbus.cli.lake import lake
from sbus.cli.main import cli
from sbus.cli.spark import spark


def loaded_by(*arguments: str) -> set[str]:
    """Return the modules that ``sbus`` has loaded when it exits."""
    script = (
        "import sys, atexit; atexit.register(lambda: print('loaded', *sys.modules));"
        f"sys.argv = ['sbus', *{arguments!r}]; from sbus.cli import run; run()"
    )
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith("COV")
    }  # coverage imports a lot
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environ)
    return set(done.stdout.rpartition("loaded ")[2].split())


@pytest.mark.parametrize(
    "arguments", [("pub", "--help"), ("match", "a", "a"), ("journal", "cat", "--help"), ("lake", "ls", "--help")]
)
def test_other_commands_are_not_imported(arguments: tuple[str, ...]) -> None:
    """A command does not pay for the start-up of the others."""
    loaded = loaded_by(*arguments)
    assert loaded.isdisjoint({"sbus.cli.bench", "multiprocessing", "sbus.cli.spark", "pyarrow", "pyspark"})
    assert loaded.isdisjoint({"twisted", "zope.interface"})


_LARGE = {
    *("asyncio", "concurrent.futures", "csv", "ctypes", "hashlib", "hmac", "importlib.metadata", "logging"),
    *("multiprocessing", "pathlib", "pyarrow", "secrets", "tempfile", "twisted", "unittest"),
}
_OF_HTTP = {"email.parser", "http.client", "random", "ssl"}


@pytest.mark.parametrize("name", ["pub", "sub", "get", "probe", "request", "whoami", "ping", "match", "serve"])
def test_quick_commands_import_nothing_large(name: str) -> None:
    """A command that is over in a moment loads no module that takes long and is of no use to it."""
    assert loaded_by(name, "--help").isdisjoint(_LARGE | _OF_HTTP)


@pytest.mark.parametrize("name", ["status", "clients", "patterns", "users", "explain", "monitor", "top"])
def test_commands_of_operators_import_http_at_most(name: str) -> None:
    """A command that asks the admin socket loads what HTTP needs, and nothing else that takes long."""
    assert loaded_by(name, "--help").isdisjoint(_LARGE)


def test_the_list_of_commands_needs_no_library() -> None:
    """The help of the whole command works without Arrow, Spark and Twisted."""
    assert loaded_by("--help").isdisjoint({"pyarrow", "pyspark", "twisted"})


@pytest.mark.parametrize("group", [cli, journal, lake, spark], ids=["sbus", "journal", "lake", "spark"])
def test_every_command_is_there(group: LazyGroup) -> None:
    """Every name in a group's table leads to a command of that name, and no other name does."""
    context = click.Context(group)
    names = group.list_commands(context)
    assert names
    for name in names:
        command = group.get_command(context, name)
        assert command is not None
        assert command.name == name
        assert command.get_short_help_str()
    assert group.get_command(context, "nonsense") is None


@pytest.mark.parametrize("module", ["sbus", "sbus.cli", "sbus.server.run.sbusd"])
def test_current_directory_is_not_imported_from(tmp_path: Path, module: str) -> None:
    """``python -m sbus.cli`` runs no file of the current directory that has the name of a module it needs."""
    for name in ("click", "twisted", "zope", "signal_tools", "pwd", "argparse", "select"):
        (tmp_path / f"{name}.py").write_text("print('hijacked', flush=True)\n")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    result = subprocess.run(
        [sys.executable, "-m", module, "--help"], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60
    )
    assert "hijacked" not in result.stdout + result.stderr
    assert "usage" in (result.stdout + result.stderr).lower()
