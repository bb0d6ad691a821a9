"""The choice between a compiled module and its plain twin."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from sbus.speedups import choose


def compiled() -> str:
    return "the compiled twin"


def plain() -> str:
    return "the plain twin"


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that stands for a compiled one, with functions in another order."""
    module = ModuleType("tests.built")
    module.__dict__.update(second=plain, first=compiled)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delenv("SBUS_PURE", raising=False)
    return module.__name__


@pytest.mark.parametrize("wanted", [None, "", "0"])
def test_a_compiled_module_is_used(built: str, monkeypatch: pytest.MonkeyPatch, wanted: str | None) -> None:
    """The compiled functions are used where they were built, in the order asked for."""
    if wanted is not None:
        monkeypatch.setenv("SBUS_PURE", wanted)
    assert choose(built, first=plain, second=compiled) == (compiled, plain)


def test_pure_python_can_be_forced(built: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``SBUS_PURE=1`` the plain functions are used although compiled ones exist."""
    monkeypatch.setenv("SBUS_PURE", "1")
    assert choose(built, first=plain) == (plain,)


def test_without_a_compiled_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the compiled module was not built, the plain functions are used."""
    monkeypatch.delenv("SBUS_PURE", raising=False)
    assert choose("sbus._never_built", first=plain) == (plain,)
