"""What all tests of the transport share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn ends by what there is to do, and not by the time that a busy machine takes for it."""
    monkeypatch.setattr("sbus.seqpacket.multiplexer._PASSES_TIME", 60.0)
    monkeypatch.setattr("sbus.seqpacket.multiplexer._SHORT_PASSES_TIME", 60.0)
