"""The replies that a client expects on its connection, in the order of its questions.

The server answers questions in order, and ignores control messages that it does not know. So the reply to ``whoami``
proves more than the client's name: a question that was asked before it and is not answered yet never will be.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from sbus.client.dispatch import Waiter
from sbus.errors import UsageError
from sbus.protocol.controls import WHOAMI
from sbus.protocol.packets import CMSG, build

__all__ = ["CallingWaiter", "Questions"]

_REPLY = build(CMSG, WHOAMI, b"")
"""The beginning of the server's reply to ``whoami``."""


class _Question(NamedTuple):
    """A question: the control message's key, its subject, the waiter for the reply, and the error without one."""

    control: bytes
    subject: bytes
    waiter: Waiter | None
    ignored: str


class CallingWaiter:
    """A waiter that calls functions.

    :param on_result: called with the reply.
    :param on_error: called with the error instead.
    """

    def __init__(
        self,
        on_result: Callable[[bytes], object] = lambda _: None,
        on_error: Callable[[Exception], object] = lambda _: None,
    ) -> None:
        self._on_result = on_result
        self._on_error = on_error

    def set_result(self, value: bytes) -> None:
        """Call the function for a reply."""
        self._on_result(value)

    def set_exception(self, error: Exception) -> None:
        """Call the function for an error."""
        self._on_error(error)


class Questions:
    """The questions of one connection that have no reply yet.

    :ivar ignored: the control messages among the questions that the server has ignored.
    :ivar count: how many questions there have been, on all connections.
    """

    def __init__(self) -> None:
        self.ignored: set[bytes] = set()
        self.count = 0
        self._asked: deque[_Question] = deque()

    def are_open_after(self, packets: Iterable[bytes]) -> bool:
        """Return whether a reply to ``whoami``, which ends each block of questions, is due after some packets."""
        due = sum(question.control == WHOAMI for question in self._asked)
        return due > 0 and due > sum(packet.startswith(_REPLY) for packet in packets)

    def ask(self, control: bytes, subject: bytes, waiter: Waiter | None, *, ignored: str = "") -> None:
        """Expect a reply, or for a question other than ``whoami``, none at all.

        :param subject: what distinguishes this question from others with the same control message, such as a key.
        :param waiter: completed with the reply, or with a `UsageError` if the server has ignored the question.
        :param ignored: the text of that error.
        """
        self.count += 1
        self._asked.append(_Question(control, subject, waiter, ignored))

    def answer(self, control: bytes, subject: bytes, value: bytes) -> bool:
        """Complete the oldest question of this kind that a reply may belong to; return whether there is one."""
        for at, question in enumerate(self._asked):
            if question.control == WHOAMI:
                return False  # its reply comes first
            if question.control == control and question.subject == subject:
                del self._asked[at]
                if question.waiter is not None:
                    question.waiter.set_result(value)
                return True
        return False

    def answer_whoami(self, value: bytes) -> bool:
        """Complete the oldest ``whoami``, and before it the questions that the server has ignored.

        :returns: whether a waiter has got the reply.
        """
        while self._asked:
            question = self._asked.popleft()
            if question.control == WHOAMI:
                if question.waiter is None:
                    return False
                question.waiter.set_result(value)
                return True
            self.ignored.add(question.control)
            if question.waiter is not None:
                question.waiter.set_exception(UsageError(question.ignored))
        return False

    def take(self) -> list[Waiter]:
        """Forget all questions, and return their waiters."""
        waiters = [question.waiter for question in self._asked if question.waiter is not None]
        self._asked.clear()
        self.ignored.clear()
        return waiters
