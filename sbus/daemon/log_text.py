"""Log events as lines of text, with priorities where journald reads them.

A line is its time, its level and its text: ``2026-10-06T12:00:00+0000 warn: ...``. The output of a service usually goes
to the journal of systemd, which has the time already. journald takes the number in front of a line, such as ``<4>``,
for its priority (sd-daemon(3)), so that ``journalctl -p warning`` and alerts work. ``JOURNAL_STREAM`` names the device
and inode of that stream (systemd.exec(5)). A file or a pipe that the output was redirected to is another one, and gets
no numbers.
"""

from __future__ import annotations

import os
from typing import TextIO

from twisted.logger import FileLogObserver, ILogObserver, LogEvent, LogLevel, eventAsText, formatTime

__all__ = ["LEVELS", "is_journal", "line_of", "text_log"]

LEVELS = tuple(level.name for level in LogLevel.iterconstants())
"""Names of the levels, the lowest first."""
_PRIORITIES = {LogLevel.debug: 7, LogLevel.info: 6, LogLevel.warn: 4, LogLevel.error: 3, LogLevel.critical: 2}
_CONTROLS = {number: f"\\x{number:02x}" for number in (*range(32), *range(127, 160)) if chr(number) not in "\t\n"}
"""Escapes for control characters: a line may quote untrusted text and be shown on a terminal."""


def line_of(event: LogEvent) -> str | None:
    """Return an event as text that ends with a newline; its further lines are indented. None: it has no text."""
    text = _text(event)
    if not text:
        return None
    level = event.get("log_level", LogLevel.info).name
    return f"{formatTime(event.get('log_time'))} {level}: {text}".replace("\n", "\n\t") + "\n"


def is_journal(stream: TextIO) -> bool:
    """Return whether journald reads a stream."""
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):  # closed, or not a file at all
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def text_log(stream: TextIO | None) -> ILogObserver:
    """Return an observer that writes events as text, each line with its priority if journald reads them.

    :param stream: None if the descriptor was closed when the process started: then nothing is written.
    """
    if stream is None:
        stream = open(os.devnull, "w")  # noqa: SIM115
    return FileLogObserver(stream, _prioritized if is_journal(stream) else line_of)


def _text(event: LogEvent) -> str:
    return eventAsText(event, includeTimestamp=False, includeSystem=False).translate(_CONTROLS)


def _prioritized(event: LogEvent) -> str | None:
    prefix = f"<{_PRIORITIES.get(event.get('log_level'), 6)}>"
    return "".join(f"{prefix}{line}\n" for line in _text(event).splitlines()) or None
