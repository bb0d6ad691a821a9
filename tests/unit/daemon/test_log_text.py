"""Logs as text, and the priorities for journald."""

from __future__ import annotations

import io
import os
import re
from pathlib import Path

import pytest
from twisted.logger import LogEvent, LogLevel

from sbus.daemon.log_text import LEVELS, is_journal, line_of, text_log


def event(level: str, text: str) -> LogEvent:
    return {
        "log_level": LogLevel.lookupByName(level),
        "log_format": "{text}",
        "text": text,
        "log_time": 0.0,
        "log_namespace": "n",
    }


def test_short_prefix() -> None:
    """A line is its time, its level and its text; further lines are indented."""
    line = line_of(event("warn", "one\ntwo"))
    assert line is not None
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4} warn: one\n\ttwo\n", line)
    assert line_of(event("info", "")) is None


def test_control_characters_are_escaped() -> None:
    """What others have said cannot drive the terminal of who reads the log."""
    line = line_of(event("warn", "\x1b[31m\r\x9b é\tx"))
    assert line is not None
    assert line.endswith("warn: \\x1b[31m\\x0d\\x9b é\tx\n")


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
    assert lines == ["<7>first", "<6>first", "<4>first", "<3>first", "<2>first", "<3>one", "<3>two"]


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
