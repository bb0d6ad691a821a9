"""Authority at the admin socket."""

from __future__ import annotations

import os
import socket

import pytest

from sbus.admin.access import Access, parse_group
from sbus.errors import UsageError


def test_modes() -> None:
    """The path of the socket lets in those who may ask, and all if a group may read the metrics."""
    assert Access().mode == 0o600
    assert Access(admin=1).mode == 0o660
    assert Access(admin=1, metrics=2).mode == 0o666


def test_the_servers_user_may_ask_everything() -> None:
    """A process of the server's own user may ask everything, without any group."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        found = Access().authority(ours)
    assert (found.peer.pid, found.is_owner, found.is_admin, found.may_read) == (os.getpid(), True, True, True)


def test_unknown_groups_are_refused() -> None:
    """A group that does not exist is an error that names the remedy."""
    with pytest.raises(UsageError, match="getent group"):
        parse_group("no-such-group", "--admin-group")
