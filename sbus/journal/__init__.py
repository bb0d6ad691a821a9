"""The journal: the messages of a bus on disk, as Arrow files.

==================================  ==================================================================
`JournalWriter`                     writes a journal, as the recorder does
`JournalReader`, `Slice`, `read`    find rows and read them, beside the writer or without one
`find_journals`                     finds journals by paths and globs
`advance`                           records how far a consumer of a journal has read
`retain`                            deletes old segments
`COLUMNS`, `Kind`                   the columns of a row, and the kinds of rows
`MESSAGES`, `GAPS`                  the kinds of messages, and of gaps
==================================  ==================================================================

How it works: a journal is a directory of *segments*, which only grow. Each has three files: its rows
(``.arrows``), an index of the batches in it (``.idx``), and when it is closed a summary (``.json``). One writer appends
to the newest segment; any number of readers, on this machine, read all of them without locks. What connects the two is
the last *sync record* of an index: the writer syncs both files and then adds the record; readers see nothing after it.
So what a reader has seen survives a power cut, and what a power cut takes back no reader has seen.

The parts, from the bottom: `disk` (the calls that change files), `schema` (columns, formats and their bytes), `layout`
(the files and their names), `index`, `summary`, `segment` (one segment being written), `writer`, `reader`; and beside
these `lock` and `place` (of the writer), `consumers`, `retention`, `verify`, `clock` and `keytext`. None of them
imports Twisted, Spark, or any other room of this package but `sbus.errors`. docs/pipeline/3-journal.rst specifies the
format and what is promised.

A module is imported when a name of it is first used, so importing `sbus.journal` does not import PyArrow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sbus.lazy import lazy_names

if TYPE_CHECKING:
    from sbus.journal.consumers import advance
    from sbus.journal.reader import JournalReader, Slice, find_journals, read
    from sbus.journal.retention import retain
    from sbus.journal.schema import COLUMNS, GAPS, MESSAGES, Kind
    from sbus.journal.writer import JournalWriter

__all__ = [
    "COLUMNS",
    "GAPS",
    "MESSAGES",
    "JournalReader",
    "JournalWriter",
    "Kind",
    "Slice",
    "advance",
    "find_journals",
    "read",
    "retain",
]

__getattr__ = lazy_names(
    __name__,
    {
        "COLUMNS": ".schema",
        "GAPS": ".schema",
        "MESSAGES": ".schema",
        "JournalReader": ".reader",
        "JournalWriter": ".writer",
        "Kind": ".schema",
        "Slice": ".reader",
        "advance": ".consumers",
        "find_journals": ".reader",
        "read": ".reader",
        "retain": ".retention",
    },
)
