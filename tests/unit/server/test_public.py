"""The public face of `sbus.server`."""

from __future__ import annotations

import subprocess
import sys

import pytest

import sbus.server


def test_all_names_are_there():
    """Every public name can be imported from the package."""
    for name in sbus.server.__all__:
        assert getattr(sbus.server, name).__name__ == name


def test_other_names_are_not():
    """Another name is an AttributeError, as for any module."""
    with pytest.raises(AttributeError, match=r"module 'sbus\.server' has no attribute 'Nothing'"):
        sbus.server.Nothing  # noqa: B018


def test_importing_costs_nothing():
    """The package does not import Twisted before a name of it is used: sbusd listens before that."""
    code = "import sys, sbus.server; print(any(name.partition('.')[0] in ('twisted', 'zope') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
