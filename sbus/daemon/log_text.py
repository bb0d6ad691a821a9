"""Log events as lines of text, with priorities where journald reads them, and the least level.

The output of a service usually goes to the journal of systemd. journald takes the number in front of a line, such as
``<4>``, for its priority (sd-daemon(3)), so that ``journalctl -p warning`` and alerts work. ``JOURNAL_STREAM``
names the device and inode of that stream (systemd.exec(5)). A file or a pipe that the output was redirected to is
another one, and gets no numbers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TextIO

from twisted.logger import (
    FileLogObserver,
    FilteringLogObserver,
    ILogObserver,
    LogEvent,
    LogLevel,
    LogLevelFilterPredicate,
    formatEventAsClassicLogText,
    textFileLogObserver,
)

__all__ = ["LEVELS", "above", "is_journal", "text_log"]

LEVELS = tuple(level.name for level in LogLevel.iterconstants())
"""Names of the levels, the lowest first."""
_PRIORITIES = {LogLevel.debug: 7, LogLevel.info: 6, LogLevel.warn: 4, LogLevel.error: 3, LogLevel.critical: 2}


def above(level: str, log: ILogObserver) -> ILogObserver:
    """Return an observer that passes on the events of a level and above.

    :param level: one of `LEVELS`.
    """
    if level == LEVELS[0]:
        return log
    return FilteringLogObserver(log, [LogLevelFilterPredicate(defaultLogLevel=LogLevel.lookupByName(level))])


def is_journal(stream: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether journald reads what is written to a stream."""
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):  # closed, or not a file at all
        return False
    return environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def text_log(stream: TextIO | None) -> ILogObserver:
    """Return an observer that writes events as text, each line with its priority if journald reads them.

    :param stream: None if the descriptor was closed when the process started: then nothing is written.
    """
    if stream is None:
        stream = open(os.devnull, "w")  # noqa: SIM115
    return FileLogObserver(stream, _prioritized) if is_journal(stream) else textFileLogObserver(stream)


def _prioritized(event: LogEvent) -> str | None:
    text = formatEventAsClassicLogText(event)
    if text is None:
        return None
    prefix = f"<{_PRIORITIES.get(event.get('log_level'), 6)}>"
    return "".join(prefix + line for line in text.splitlines(keepends=True))
