"""Constants: no test replaces one, since it would test another program than the one that ships."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import chain

import pytest

from tests.support import ROOT

_CONSTANT = re.compile(r"(?:.*\.)?_?[A-Z][A-Z0-9_]*")
_ASSIGNMENT = re.compile(r"^[ \t]*\w[\w.]*\._?[A-Z][A-Z0-9_]*\s*=(?!=)", re.MULTILINE)
_HINT = re.compile(r"setattr|delattr|patch|\._?[A-Z][A-Z0-9_]*\s*\W?=(?!=)")
"""What is in each module that replaces a constant: the others are not parsed, which takes 5 ms each."""
_REPLACING = ("setattr", "delattr", "patch", "object", "multiple")
"""What replaces an attribute: functions of Python, pytest, Trial and `unittest.mock`."""


def replaced(source: str) -> Iterator[int]:
    """Yield the lines of a module that replace an attribute with the name of a constant.

    The texts of programs that the module starts count too.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            given = [each.value for each in node.args[:2] if isinstance(each, ast.Constant)]
            given += [each.arg for each in node.keywords] if name == "multiple" else []
            if name in _REPLACING and any(isinstance(each, str) and _CONSTANT.fullmatch(each) for each in given):
                yield node.lineno
        elif isinstance(node, ast.Attribute):
            if isinstance(node.ctx, ast.Store) and _CONSTANT.fullmatch(node.attr):
                yield node.lineno
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            for found in _ASSIGNMENT.finditer(node.value):
                yield node.lineno + node.value.count("\n", 0, found.start())


@pytest.mark.parametrize(
    "line",
    [
        'monkeypatch.setattr(module, "LIMIT", 1)',
        'monkeypatch.setattr("package.module._LIMIT", 1)',
        'monkeypatch.delattr(module, "LIMIT_2")',
        'self.patch(module, "LIMIT", 1)',
        'setattr(module, "LIMIT", 1)',
        'with mock.patch.object(module, "LIMIT", 1): pass',
        'with mock.patch("module.LIMIT", 1): pass',
        "with mock.patch.multiple(module, LIMIT=1): pass",
        "module.LIMIT = 1",
        "package.module.LIMIT += 1",
        "module.limit = module.LIMIT = 1",
        'PROGRAM = "import module\\nmodule.LIMIT = 1"',
    ],
)
def test_what_replaces_a_constant(line: str) -> None:
    """Whatever replaces a constant of a module or class is found, with its line."""
    assert _HINT.search(line)
    assert [*replaced(f"\n{line}\n")] in ([2], [3])


@pytest.mark.parametrize(
    "line",
    [
        'monkeypatch.setattr(module, "function", LIMIT)',
        'monkeypatch.setattr("package.module.Class", LIMIT)',
        'monkeypatch.setenv("LIMIT", "1")',
        'monkeypatch.setitem(os.environ, "LIMIT", "1")',
        'client.patch("/v1/LIMIT.txt")',
        "module.limit = module.LIMIT",
        "LIMIT = 1",
        "assert module.LIMIT == 1",
        'TEXT = "module.LIMIT == 1"',
    ],
)
def test_what_replaces_no_constant(line: str) -> None:
    """Functions, variables of the environment and constants of a test's own are no constants of another module."""
    assert [*replaced(line)] == []


def test_no_test_replaces_a_constant() -> None:
    """What ships is what is tested."""
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted(chain((ROOT / "tests").rglob("*.py"), (ROOT / "web" / "tests").rglob("*.py")))
        if path.name != "test_constants.py"
        if _HINT.search(source := path.read_text())
        for line in replaced(source)
    ]
    assert not found, (
        f"these lines replace a constant: {found}: test with the real value (a larger input, a clock of the test's "
        "own), or make the value an argument whose default is the constant"
    )
