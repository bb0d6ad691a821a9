"""A short run of each fuzz target, with the same inputs each time."""

from __future__ import annotations

from collections import deque
from itertools import islice

import pytest

from sbus.protocol import bundles
from tests.fuzz.bundles import PIECES, inputs, packets_of, try_input


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_packets_and_bundles(seed: int) -> None:
    """A few hundred random inputs find nothing."""
    for data in islice(inputs(seed), 250):
        try_input(data)


def test_inputs_are_of_all_kinds() -> None:
    """The inputs include good bundles, damaged ones, nested ones, and every type of packet."""
    seen = [packet for data in islice(inputs(0), 2000) for packet in packets_of(data)]
    wrapped = [packet for packet in seen if packet[:4] == b"BNDL"]
    assert any(bundles._split(packet) for packet in wrapped)
    assert any(not bundles._split(packet) for packet in wrapped)
    assert any(packet[8:12] == b"BNDL" for packet in wrapped)
    assert set(PIECES) <= set(seen)


def test_checks_notice_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target fails with a function that loses the last packet of a bundle."""
    whole = bundles.unbundle
    monkeypatch.setattr(bundles, "unbundle", lambda packets: whole(packets)[:-1])
    with pytest.raises(AssertionError):
        deque(map(try_input, islice(inputs(0), 100)), maxlen=0)
