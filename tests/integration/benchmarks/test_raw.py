"""The publishers without a library: the packets that they make, and that all of them are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import keeping, raw
from sbus.protocol.bundles import MAX_BUNDLE, unbundle
from sbus.protocol.packets import MSG, parse


@pytest.mark.slow
def test_packets_differ_in_their_numbers() -> None:
    """A template is filled with numbers from any one on; bundles are full, and plain packets have the same content."""
    samples = list(raw.samples())
    assert {key for key, _ in samples} == set(raw.KEYS)
    assert {8 + len(rest) for _, rest in samples} == set(range(8, 61))
    number = 10**9
    expected = iter(samples)
    for template in raw.bundles():
        bundle = template.fill(number)
        assert MAX_BUNDLE - 150 < len(bundle) <= MAX_BUNDLE
        found = [parse(packet) for packet in unbundle([bundle])]
        for at, (packet, (key, rest)) in enumerate(zip(found, expected, strict=False)):
            assert packet == (MSG, key, (number + at).to_bytes(8, "little") + rest)
        assert len(unbundle([template.first(3).fill(0)])) == 3
        assert template.fill(0) != bundle
    assert raw.plain()[7].fill(5) == b"MSG %b\0%b%b" % (samples[7][0], (5).to_bytes(8, "little"), samples[7][1])


@pytest.mark.slow
@pytest.mark.parametrize("bundled", [False, True])
def test_everything_is_kept(tmp_path: Path, bundled: bool) -> None:
    """A recorder and JetStream's file store keep every message; the comparison ends a run that has lost one."""
    kept = keeping.keep_in_journal(tmp_path, 3000, bundled=bundled)
    assert kept.rate > 0
    kept = keeping.keep_in_jetstream(tmp_path, 3000, pipelined=bundled, sync_interval="2m")
    assert kept.cpu > 0
