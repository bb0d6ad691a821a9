"""The recorder: a client that writes the messages of a bus to a journal.

===================  =================================================================================
`RecorderService`    the recorder as a Twisted service, for any application
`Settings`           how it records: patterns, batches, syncs, segments, retention
`Counters`           what it has recorded
===================  =================================================================================

``twistd sbus-recorder`` runs it as a separate process, and ``twistd sbus --record=DIR`` as a child process beside the
bus. It has no privileges: it connects, subscribes and chooses its flood control like any other client.
docs/pipeline/2-recorder.rst is the guide.

A module is imported when a name of it is first used, so importing `sbus.recorder` imports neither Twisted nor PyArrow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sbus.lazy import lazy_names

if TYPE_CHECKING:
    from sbus.recorder.pipeline import Counters
    from sbus.recorder.service import RecorderService
    from sbus.recorder.settings import Settings

__all__ = ["Counters", "RecorderService", "Settings"]

__getattr__ = lazy_names(
    __name__,
    {
        "Counters": ".pipeline",
        "RecorderService": ".service",
        "Settings": ".settings",
    },
)
