"""The reading end of a connection: how many packets are read at once."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest

from sbus.client.inlet import Inlet
from sbus.protocol.bundles import MAX_BUNDLE
from sbus.syscalls.batch import BATCH


@pytest.mark.parametrize(("bundle_limit", "most", "received"), [(0, 0, BATCH), (MAX_BUNDLE, 0, 8), (0, 3, 3)])
def test_how_many_packets_are_read_at_once(bundle_limit, most, received):
    """A batch, or what is asked for; fewer where bundles are agreed on, since each has many messages."""
    core = SimpleNamespace(asks_limit=False, bundle_limit=bundle_limit)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    with ours, theirs:
        for at in range(BATCH + 1):
            theirs.send(b"%d" % at)
        inlet = Inlet(core, 1_000)  # type: ignore[arg-type]
        inlet.connected()
        packets, ended = inlet.read(ours, most)
    assert (packets, ended) == ([b"%d" % at for at in range(received)], False)
