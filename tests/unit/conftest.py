"""What all unit tests share."""

from __future__ import annotations

import pytest

from sbus.server.bus import protocol


@pytest.fixture(autouse=True)
def _price_of_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the compiled helper, reading has a price of its own; the work that tests count must not depend on it."""
    monkeypatch.setattr(protocol, "READING", 0)
