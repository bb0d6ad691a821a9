"""The number of open descriptors, and their limit."""

from __future__ import annotations

import contextlib
import os
import resource
import sys

import pytest

from sbus.syscalls import descriptors


def test_open_descriptors():
    """A descriptor more is counted as one more."""
    before = descriptors.open_descriptors()
    assert before >= 3
    one = os.open(os.devnull, os.O_RDONLY)
    try:
        assert descriptors.open_descriptors() == before + 1
    finally:
        os.close(one)
    assert descriptors.open_descriptors() == before


def test_older_kernels(monkeypatch):
    """Where the size of /proc/self/fd says nothing, its entries are counted, and the result is the same."""
    expected = len(os.listdir("/proc/self/fd")) - 1
    monkeypatch.setattr(os, "stat", lambda path: os.stat_result([0] * 10))
    assert descriptors.open_descriptors() == expected


def test_without_proc(monkeypatch):
    """Without /proc nothing is counted."""

    def nothing(path):
        raise FileNotFoundError(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", nothing)
        patch.setattr(os, "listdir", nothing)
        count = descriptors.open_descriptors()
    assert count == 0


@pytest.mark.parametrize(("soft", "limit"), [(1000, 1000), (resource.RLIM_INFINITY, sys.maxsize)])
def test_limit(monkeypatch, soft, limit):
    """The limit is the soft one; without any, it is larger than every count."""
    monkeypatch.setattr(resource, "getrlimit", lambda what: (soft, resource.RLIM_INFINITY))
    assert descriptors.descriptor_limit() == limit


def test_room_for_descriptors():
    """There is room for what the process may still open, up to what is asked for."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)

        def open_one() -> int:
            descriptor = os.dup(0)
            stack.callback(os.close, descriptor)
            return descriptor

        highest = max(map(int, os.listdir("/proc/self/fd")))
        while open_one() < highest:
            pass  # no free number is left below
        before = descriptors.open_descriptors()
        resource.setrlimit(resource.RLIMIT_NOFILE, (before + 60, limits[1]))
        assert [descriptors.room_for(count, 0) for count in (0, 1, 50, 60, 61, 10_000)] == [0, 1, 50, 60, 60, 60]
        for left in range(60, 0, -1):
            assert descriptors.room_for(left, 0) == descriptors.room_for(100, 0) == left
            open_one()
        assert descriptors.room_for(1, 0) == 0
        with pytest.raises(OSError, match="Too many"):
            open_one()
    assert descriptors.room_for(100, 0) == 100


def test_a_limit_that_cannot_be_raised_stays(monkeypatch):
    """The kernel refuses a hard limit above fs.nr_open, though the process has it."""

    def refuse(*arguments):
        raise PermissionError

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(resource, "setrlimit", refuse)
    descriptors.raise_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
