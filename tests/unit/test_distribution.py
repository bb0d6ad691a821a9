"""The name of the distribution, the other project that is called ``sbus``, and the libraries of extras."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from sbus.distribution import DISTRIBUTION, needs
from sbus.errors import UsageError
from tests.support import ROOT

OVERWRITTEN = "__version__ = '0.2.5'"


def site(directory: Path, init: str, *others: str) -> Path:
    """Make a directory in which this package is installed, with an ``__init__.py`` and further entries beside it."""
    package = directory / "sbus"
    package.mkdir()
    for path in (ROOT / "sbus").iterdir():
        if path.name not in ("__init__.py", "__pycache__"):
            (package / path.name).symlink_to(path)
    (package / "__init__.py").write_text(init)
    for name in others:
        (directory / name).mkdir()
    return directory


def run(directory: Path, program: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(directory)}
    environ = {name: value for name, value in environ.items() if not name.startswith("COV")}
    return subprocess.run(
        [sys.executable, "-P", "-c", program], env=environ, capture_output=True, text=True, timeout=60
    )


SBUS = "import sys; sys.argv = ['sbus', 'match', 'a', 'a']; from sbus.cli import run; run()"
SBUSD = "import sys; sys.argv = ['sbusd', '-a', '/nowhere/bus']; from sbus.server.run.sbusd import main; main()"
TWISTD = "from sbus.server.run.twistd import Options; Options().parseOptions(['--socket=/nowhere/bus'])"


@pytest.mark.parametrize(
    ("program", "name"),
    [(SBUS, "sbus"), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((SBUSD, "sbusd"), (TWISTD, "sbus")))],
)
def test_an_overwritten_package_is_reported(tmp_path: Path, program: str, name: str) -> None:
    """If the other project has overwritten files of this one, each command says so, and how to mend it."""
    done = run(site(tmp_path, OVERWRITTEN), program)
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith(f"{name}: another package called sbus has overwritten a part of this one: ")
    assert "pip uninstall sbus sbusd, then pip install sbusd" in done.stderr


def test_a_neighbour_of_the_same_name_is_reported(tmp_path: Path) -> None:
    """If the other project is installed beside an intact package, a line says so, and the command works."""
    init = (ROOT / "sbus" / "__init__.py").read_text()
    done = run(site(tmp_path, init, "sbus-0.2.5.dist-info", "sbusd-0.1.0.dist-info"), SBUS)
    assert (done.returncode, done.stdout) == (0, "a: matches\n"), done.stderr
    assert done.stderr.count("\n") == 1
    assert re.search(r"another package called sbus is installed in .*: pip uninstall sbus sbusd, then", done.stderr)


def test_a_package_alone_is_not_reported(tmp_path: Path) -> None:
    """This package alone, as pip installs it, is no clash."""
    done = run(site(tmp_path, (ROOT / "sbus" / "__init__.py").read_text(), "sbusd-0.1.0.dist-info"), SBUS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "a: matches\n", "")


def test_the_name_is_used_everywhere() -> None:
    """Every page and every text installs this package by its own name."""
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"] == DISTRIBUTION
    files = [ROOT / "README.rst", ROOT / "pyproject.toml", *ROOT.glob("docs/**/*.rst"), *ROOT.glob("sbus/**/*.py")]
    wrong = re.compile(r"pip install (-\S+ )*'?sbus(?!d)|\bsbus\[(spark|recorder|test|dev)")
    assert [str(file) for file in files if wrong.search(file.read_text())] == []


def test_a_missing_library_is_named_with_the_extra_that_brings_it():
    """If a library of an extra is missing, the error says what to install."""
    with pytest.raises(UsageError, match=r"needs pyarrow.*pip install 'sbusd\[recorder\]'"), needs("recorder"):
        raise ModuleNotFoundError("No module named 'pyarrow.ipc'", name="pyarrow.ipc")


def test_a_module_of_another_library_is_not_blamed_on_the_extra():
    """An import that fails for another reason keeps its own error."""
    with pytest.raises(ModuleNotFoundError), needs("recorder"):
        raise ModuleNotFoundError("No module named 'nonsense'", name="nonsense")
