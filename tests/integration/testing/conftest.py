"""Here servers start as they do for users of `sbus.testing`."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def forked_servers() -> None:
    """Leave them as they are."""
