"""A log for programs: ``twistd --nodaemon --logger=json_log.observer sbus``, one JSON object a line, no debug lines."""

import sys

from twisted.logger import (
    FilteringLogObserver,
    ILogObserver,
    LogLevel,
    LogLevelFilterPredicate,
    jsonFileLogObserver,
)


def observer() -> ILogObserver:
    everything = jsonFileLogObserver(sys.stdout, recordSeparator="")
    return FilteringLogObserver(everything, [LogLevelFilterPredicate(LogLevel.info)])
