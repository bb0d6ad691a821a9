"""Answers of clients that mean no good: they reach a terminal as text, and ``sbus queue`` says that they are none."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import sbus as package
from sbus.client.api import Request
from sbus.errors import RequestFailed
from sbus.syscalls.polling import is_readable
from tests.integration.cli.commands import failure, sbus
from tests.support.harness import Bus

FORGED = "\x1b]0;title\x07\x1b[2J\x1b[31mred\x1b[0m\r\nsbus: all is well\u202e"
SHOWN = r"\x1b]0;title\x07\x1b[2J\x1b[31mred\x1b[0m\x0d\x0asbus: all is well\xe2\x80\xae"
Answering = Callable[[bytes, bytes | str], None]


@pytest.fixture
def answering(shared: Bus) -> Iterator[Answering]:
    """Answer requests with a key: ``answering(b'key', b'answer')``; a text is that of a failure."""
    is_over = threading.Event()
    with package.connect(str(shared.address)) as bus:

        def answer(request: Request, answer: bytes | str) -> bytes:
            if isinstance(answer, str):
                raise RequestFailed(answer)
            return answer

        def respond(key: bytes, text: bytes | str) -> None:
            bus.respond(key, lambda request: answer(request, text))
            bus.fence()
            if not thread.is_alive():
                thread.start()

        def run() -> None:
            while not is_over.is_set():
                if is_readable(bus, 0.05):
                    bus.get_ready()

        thread: Any = threading.Thread(target=run)
        yield respond
        is_over.set()
        if thread.is_alive():
            thread.join()


def test_the_text_of_a_failure(shared: Bus, answering: Answering) -> None:
    """What a responder says is text of one line, also if it would clear the screen or forge a line."""
    answering(b"answers/one", FORGED)
    assert failure(shared, "request", "answers/one") == f"sbus: {SHOWN}"


def test_names_of_workers_and_states(shared: Bus, answering: Answering) -> None:
    """``sbus queue ls NAME`` shows names as text, whoever gave them."""
    forged = rb'"\u001b[2J\nx"'
    answering(
        b"queue/forged/admin/ls",
        b'{"jobs": {%b: 1}, "workers": [{"name": %b, "jobs": 1, "credit": 2}], "problem": %b}' % ((forged,) * 3),
    )
    shown = r"\x1b[2J\x0ax"
    lines = [f"1 {shown}", f"worker {shown}: 1 of 2 jobs", f"the disk refuses: {shown}"]
    assert sbus(shared, "queue", "ls", "forged")[0].decode().splitlines() == lines


@pytest.mark.parametrize(
    ("verb", "answer"),
    [
        ("ls", b"not json"),
        ("ls", b'{"jobs": {"ready": 1}, "workers": [{"name": "x"}], "problem": null}'),
        ("ls --json", b"[]"),
        ("peek", b"\xff"),
        ("peek", b"[" * 100_000),
        ("dead --json", b"[1]"),
        ("retry", b'["x"]'),
        ("retry", b"Infinity"),
        ("drain --yes", b'{"a'),
        ("drain --yes", b"9" * 5000),
    ],
)
def test_answers_that_are_none(shared: Bus, answering: Answering, verb: str, answer: bytes) -> None:
    """An answer that no service of a queue would give is one line, and nothing of it is printed."""
    key = f"queue/none/admin/{verb.split()[0].replace('dead', 'peek')}"
    answering(key.encode(), answer)
    error = failure(shared, "queue", verb.split()[0], "none", *verb.split()[1:])
    assert error == f"sbus: the answer is not a queue service's: sbus explain {key} shows who answers"
