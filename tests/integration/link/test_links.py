"""Servers behind servers, as real processes: what crosses, under which names, and what a link cannot be used for."""

from __future__ import annotations

import os
import signal
import time

from tests.integration.link.conftest import StartBus, link_pid
from tests.support.harness import WHOAMI, Client


def name_of(client: Client) -> bytes:
    """The client's credentials, as its bus says them."""
    client.send(WHOAMI)
    return client.recv().partition(b"\0")[2]


def test_three_levels(tree: StartBus) -> None:
    """A message crosses two links in either direction, from leaf to leaf, once, and only where it is wanted."""
    root = tree("root")
    middle = tree("middle", root)
    leaf, other = tree("leaf", middle), tree("other", root)
    top, one, two = root.client(b"a/"), leaf.client(b"a/*"), other.client(b"a/1")
    sent = [one.msg(b"a/1", b"from the leaf"), top.msg(b"a/1", b"from the root"), top.msg(b"a/2")]
    assert sorted(one.receive(3)) == sorted(sent)
    assert sorted(top.receive(3)) == sorted(sent)
    assert sorted(two.receive(2)) == sorted(sent[:2])
    assert not any(client.sync() for client in (one, two, top))
    assert middle.client().sync() == []
