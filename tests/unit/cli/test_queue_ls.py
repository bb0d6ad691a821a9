"""What ``sbus queue ls`` makes of the answers of all queues."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from sbus.cli.queue import _ask_all
from sbus.errors import TimedOut


class Answered:
    """A connection on which some answers come at once."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)

    @contextmanager
    def connect(self, timeout: float) -> Iterator[Any]:
        yield self

    def whoami(self) -> bytes:
        return b"!/cred/1/2/3"

    def subscribe(self, pattern: bytes) -> Any:
        return self

    def has_subscribers(self, key: bytes) -> bool:
        return True

    def publish(self, key: bytes, payload: bytes) -> None:
        pass

    def get(self, timeout: float) -> Any:
        if not self.answers:
            raise TimedOut("nothing has come in time")
        return SimpleNamespace(payload=self.answers.pop(0))


def test_answers_that_are_none_are_passed_over() -> None:
    """Any client may answer, also with other things; each service has one line, however it writes its JSON."""
    answer = b'+{"queue": "jobs",\n"jobs": {"ready": 1}}'
    target: Any = Answered(b"-no", b"", b"+[]", b'+{"queue": "x"}', b"+" + b"[" * 100_000, answer, answer)
    assert _ask_all(target, 1.0) == [("jobs", "1 ready", '{"queue": "jobs", "jobs": {"ready": 1}}')]
