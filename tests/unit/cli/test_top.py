"""What ``sbus top`` shows, without a terminal."""

from __future__ import annotations

import os
from typing import Any

import pytest

from sbus.cli.admin.screen import _SEQUENCE
from sbus.cli.admin.top import View
from sbus.cli.admin.words import format_bytes, format_span


def status(at: float, published: int) -> dict[str, Any]:
    counters = {"published": published, "published_bytes": 10 * published, "routed": 2 * published, "dropped": 0}
    return {
        "time": at,
        "version": "1",
        "pid": 1,
        "started_at": 0.0,
        "clients": 1,
        "clients_limit": 16,
        "queues": 0,
        "queue_messages": 0,
        "queue_bytes": 0,
        "queue_limit_bytes": 1 << 20,
        "held_publishers": 0,
        "memory_bytes": 0,
        "memory_limit_bytes": 1 << 20,
        "counters": {**counters, "dropped_by": {}},
    }


def client(number: int, **more: Any) -> dict[str, Any]:
    row = {
        "client": number,
        "pid": os.getpid(),
        "uid": 0,
        "listener": "main",
        "connected_at": 0.0,
        "patterns": 1,
        "queue_messages": 0,
        "queue_bytes": 0,
        "lost_messages": 0,
        "is_congested": False,
        "blocked_by": [],
    }
    return {**row, **more}


def test_rates():
    """Rates are differences of two answers; after a restart of the bus there are none."""
    view = View("queue")
    view.update(status(10.0, 100), [client(1, lost_messages=5)])
    assert view.as_json()["rates"] == {}
    view.update(status(12.0, 300), [client(1, lost_messages=25)])
    assert view.as_json()["rates"]["published"] == 100
    text = "\n".join(view.lines(24))
    assert "in 100 messages/s" in text
    assert text.splitlines()[5].split()[-2:] == ["10", "-"]
    view.update({**status(14.0, 0), "started_at": 13.0}, [])
    assert view.as_json()["rates"] == {}


def test_state():
    """A publisher that is held names its receivers; a receiver that is behind says so."""
    view = View("queue")
    view.update(status(1.0, 0), [client(1, blocked_by=[2, 3]), client(2, is_congested=True)])
    lines = view.lines(24)
    assert lines[5].endswith("held by 2,3")
    assert lines[6].endswith("behind")


def test_denials():
    """What users were not allowed to do last is named by user and rule, above the table; without any, nothing is."""
    view = View("queue")
    found = status(1.0, 0)
    view.update(found, [client(1)])
    assert view.lines(24)[3] == ""
    rows = [{"uid": 0, "rule": "quiet", "count": 1_200}, {"uid": 4_000_000, "rule": "closed", "count": 1}]
    view.update({**found, "time": 3.0, "denied": rows, "counters": {**found["counters"], "denied": 1_200}}, [client(1)])
    assert view.lines(24)[3] == "denied 600/s: root quiet 1,200, 4000000 closed 1"


@pytest.mark.parametrize("height", range(1, 12))
def test_height(height: int):
    """No more lines than the terminal has; the help is the last one if there is room."""
    view = View("queue")
    view.update(status(1.0, 0), [client(n) for n in range(20)])
    lines = view.lines(height)
    assert len(lines) <= height
    if height > 6:
        assert lines[-1].startswith("q quit")


def test_keys():
    """Sequences of arrow keys are ignored; a filter is typed, corrected, left and cleared."""
    assert _SEQUENCE.sub("", "a\x1b[Ab\x1b[1;5Cc\x1bOPd") == "abcd"
    view = View("queue")
    assert all(map(view.press, "/ax\x7fb\r"))
    assert view.filter == "ab"
    assert all(map(view.press, "/c\x1b"))
    assert view.filter == "ab"
    view.press("\x1b")
    assert view.filter == ""
    assert not view.press("q")


def test_words():
    """Spans have two units, and sizes have binary ones."""
    assert [format_span(s) for s in (5, 65, 3700, 90000)] == ["5s", "1m 5s", "1h 1m", "1d 1h"]
    assert [format_bytes(s) for s in (5, 1536, 5 << 20, 7 << 40)] == ["5 B", "1.5 KiB", "5.0 MiB", "7168.0 GiB"]
