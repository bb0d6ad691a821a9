"""Waiting for a descriptor, however large its number is."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator

import pytest

from sbus.syscalls.polling import has_hung_up, is_readable, is_writable


@pytest.fixture
def many_open_files() -> Iterator[None]:
    """So many open files that the next descriptor is more than select(2) takes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 2048), hard), hard))
    held: list[int] = []
    try:
        while not held or held[-1] < 1024:
            held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        yield
    finally:
        for each in held:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_large_descriptors(many_open_files: None) -> None:
    """A descriptor from 1024 on is waited for like any other."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert ours.fileno() >= 1024
        assert not is_readable(ours)
        assert is_writable(ours, None)
        theirs.send(b"x")
        assert is_readable(ours, None)
        assert not has_hung_up(ours)
        theirs.close()
        assert has_hung_up(ours)
        assert is_readable(ours), "the end of the file"


def test_long_waits() -> None:
    """A wait of a hundred years is more than poll(2) takes."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert is_writable(ours, 3e9)
