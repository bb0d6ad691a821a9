"""The modules that an import loads."""

from __future__ import annotations

import subprocess
import sys

import pytest


def loaded_by(statement: str) -> set[str]:
    """Return the modules that a statement loads in a fresh interpreter."""
    program = f"import sys; before = set(sys.modules); {statement}; print(*set(sys.modules) - before)"
    command = [sys.executable, "-c", program]
    return set(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())


def test_import_of_the_package_loads_next_to_nothing() -> None:
    """``import sbus`` loads the package and its version; the names in it are imported on first use."""
    assert {name for name in loaded_by("import sbus") if name.startswith("sbus")} == {
        "sbus",
        "sbus.lazy",
        "sbus.version",
    }


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        ("import sbus; sbus.connect; sbus.Message; sbus.Bus", {"twisted", "zope", "asyncio", "click"}),
        ("import sbus.client.blocking", {"twisted", "zope", "asyncio"}),
        ("import sbus.client.aio", {"twisted", "zope"}),
    ],
)
def test_client_loads_nothing_of_another_world(statement: str, unwanted: set[str]) -> None:
    """The blocking client needs neither Twisted nor asyncio, the asyncio client no Twisted, both no interfaces."""
    assert {name.partition(".")[0] for name in loaded_by(statement)} & unwanted == set()


def test_everything_that_programs_need_is_in_the_package() -> None:
    """``dir(sbus)`` shows the public names alone; each is the same object as in its module."""
    import sbus
    from sbus import errors
    from sbus.client import api, blocking, connecting, core

    assert {name for name in dir(sbus) if not name.startswith("__")} == set(sbus.__all__) - {"__version__"}
    assert {name: getattr(sbus, name).__name__ for name in sbus.__all__ if name[0].isupper()} == {
        name: name for name in sbus.__all__ if name[0].isupper()
    }
    assert (sbus.connect, sbus.Bus, sbus.Request) == (blocking.connect, blocking.Bus, api.Request)
    assert (sbus.Backoff, sbus.TimedOut, sbus.Message) == (connecting.Backoff, errors.TimedOut, core.Message)


def test_unknown_names_are_no_attributes() -> None:
    """An unknown name raises ImportError, although known names are imported on demand."""
    with pytest.raises(ImportError):
        from sbus import nonsense  # noqa: F401


def test_import_in_an_interpreter_without_arguments() -> None:
    """A program on standard input can import the package, and so can an interactive session."""
    done = subprocess.run([sys.executable], input="import sbus; print(sbus.__name__)", capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "sbus\n"), done.stderr
