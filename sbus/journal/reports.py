"""Report to journals how far a consumer has taken them, so that retention may delete these rows."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Mapping

from sbus.journal.consumers import advance, check_consumer
from sbus.journal.following import Offset
from sbus.journal.reader import JournalReader

__all__ = ["Reports"]

_RETRY_INTERVAL = 10.0
"""Seconds until a report to a journal that could not be written is repeated."""

_log = logging.getLogger("sbus.journal")


class Reports:
    """The reports of one archive, or of one stream.

    A consumer's name belongs to one lake or stream, by its ID. Another one under that name is refused: its reports
    would let retention delete rows that the first one lacks. If the file of the consumer cannot be read, the consumer
    continues; its reports fail until it can be, and are refused then.

    :param consumer: the name under which it reports.
    :param identity: the ID of the lake or stream.
    :param location: where that is, for errors.
    """

    def __init__(self, consumer: str, identity: str, location: str) -> None:
        self._consumer = consumer
        self._identity = identity
        self._location = location
        self._reported: Offset = {}
        self._unwritable: set[str] = set()  # directories of journals, each logged once
        self._retry_at = math.inf

    @property
    def is_due(self) -> bool:
        """Whether a report that failed should be repeated now."""
        return time.monotonic() >= self._retry_at

    def check(self, journals: Mapping[str, JournalReader]) -> None:
        """Check that no other lake or stream has the name.

        :raises sbus.errors.JournalError: if one has.
        """
        for journal in journals.values():
            with contextlib.suppress(OSError):  # the report fails too: it warns, and is repeated
                check_consumer(journal.directory, self._consumer, self._identity, self._location)

    def send(self, journals: Mapping[str, JournalReader], offset: Offset) -> None:
        """Report to the journals that all rows before an offset are safe.

        :raises sbus.errors.JournalError: if another lake or stream has taken the name meanwhile.
        """
        self._retry_at = math.inf
        for journal_id, journal in journals.items():
            next_seq = offset.get(journal_id, 0)
            if self._reported.get(journal_id) == next_seq:
                continue
            try:
                advance(journal.directory, self._consumer, next_seq, identity=self._identity)
            except OSError as e:
                self._retry_at = time.monotonic() + _RETRY_INTERVAL
                if journal.directory not in self._unwritable:
                    self._unwritable.add(journal.directory)
                    _log.warning(
                        "%s: the progress of the consumer %r cannot be written there (%s), so retention keeps the "
                        "rows; check its permissions and the free space",
                        journal.directory,
                        self._consumer,
                        e.strerror,
                    )
            else:
                self._reported[journal_id] = next_seq
                self._unwritable.discard(journal.directory)
