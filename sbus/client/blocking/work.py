"""The jobs of a worker in the blocking client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

from sbus.client.workers import Job, WorkCore
from sbus.errors import Closed

__all__ = ["Work"]


class Work(WorkCore):
    """The jobs of one worker: read them in a loop, or use it with ``with`` around that."""

    def __iter__(self) -> Iterator[Job]:
        """Yield jobs until the work or the bus is closed; leaving the loop closes the work."""
        try:
            while True:
                yield self.get()
        except Closed as e:
            if not self._bus._is_own(e):
                raise
        finally:
            self.close()

    def get(self, timeout: float | None = None) -> Job:
        """Wait for the next job.

        :raises sbus.errors.TimedOut: if none has come within `timeout` seconds.
        """
        job: Job = self._bus._run(self._next(), timeout)
        return job

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._bus.limit(None if kind is None else 0.0):  # as for a subscription
            self.close()
