"""Logs as text: the least level, and the priorities for journald."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from twisted.logger import ILogObserver, LogEvent, LogLevel
from zope.interface import implementer

from sbus.daemon.log_text import LEVELS, above, is_journal, text_log


def event(level: str, text: str) -> LogEvent:
    return {
        "log_level": LogLevel.lookupByName(level),
        "log_format": "{text}",
        "text": text,
        "log_time": 0.0,
        "log_namespace": "n",
    }


@pytest.mark.parametrize("least", LEVELS)
def test_least_level(least: str) -> None:
    """Events of the level and above are logged, and no others."""
    seen: list[LogEvent] = []

    @implementer(ILogObserver)
    def keep(event: LogEvent) -> None:
        seen.append(event)

    log = above(least, keep)
    for level in LEVELS:
        log(event(level, "x"))
    assert [each["log_level"].name for each in seen] == list(LEVELS[LEVELS.index(least) :])


def test_journald_gets_priorities(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where JOURNAL_STREAM names the stream, each line, also those of a traceback, begins with its priority."""
    with open(tmp_path / "journal", "w+") as stream:
        status = os.fstat(stream.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
        log = text_log(stream)
        for level in LEVELS:
            log(event(level, "first"))
        log(event("error", "one\ntwo"))
        stream.seek(0)
        lines = stream.read().splitlines()
    assert [line[:3] for line in lines] == ["<7>", "<6>", "<4>", "<3>", "<2>", "<3>", "<3>"]
    assert all(line[3] != "<" for line in lines)


def test_other_streams_get_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that was redirected elsewhere, or that is no file, gets plain text."""
    monkeypatch.setenv("JOURNAL_STREAM", "8:12345678")
    with open(tmp_path / "file", "w+") as stream:
        assert not is_journal(stream)
        text_log(stream)(event("error", "text"))
        stream.seek(0)
        assert not stream.read().startswith("<")
    assert not is_journal(stream)
    assert not is_journal(io.StringIO())
