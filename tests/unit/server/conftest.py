"""A policy for the bus of a test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sbus.policy import Policy, load


@pytest.fixture
def policy(tmp_path: Path) -> Callable[[str], Policy]:
    """Makes a policy of TOML."""

    def make(text: str) -> Policy:
        path = tmp_path / "policy.toml"
        path.write_text(f"version = 1\n{text}")
        return load(str(path))

    return make
