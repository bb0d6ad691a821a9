"""Parts of the test doubles for clients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn, TypeVar

from sbus.client.api import ClientApi
from sbus.client.core import Sink
from sbus.client.payloads import Buffer

__all__ = ["Waiter", "WithoutCalls"]

Sub = TypeVar("Sub", bound=Sink)


class WithoutCalls(ClientApi[Sub]):
    """A client whose tests run the coroutines themselves, so that the calls of users have no implementation."""

    @property
    def state(self) -> NoReturn:
        raise NotImplementedError

    def publish(self, key: bytes | str, payload: Buffer = b"") -> NoReturn:
        raise NotImplementedError

    def publish_many(self, messages: Iterable[tuple[bytes | str, Buffer]]) -> NoReturn:
        raise NotImplementedError

    def payloads(self) -> NoReturn:
        raise NotImplementedError

    def whoami(self, timeout: float | None = None) -> NoReturn:
        raise NotImplementedError

    def fence(self, timeout: float | None = None) -> NoReturn:
        raise NotImplementedError

    def has_subscribers(self, key: bytes | str, timeout: float | None = 10.0) -> NoReturn:
        raise NotImplementedError

    def watch_subscribers(self, key: bytes | str) -> NoReturn:
        raise NotImplementedError

    def inbox(self, name: bytes | str) -> NoReturn:
        raise NotImplementedError

    def request(self, key: bytes | str, payload: bytes = b"", timeout: float | None = 10.0) -> NoReturn:
        raise NotImplementedError

    def answer_proofs(self) -> NoReturn:
        raise NotImplementedError

    def verify(self, peer: bytes | str, timeout: float | None = 10.0) -> NoReturn:
        raise NotImplementedError

    def enqueue(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError

    def work(self, queue: str, credit: int = 1) -> NoReturn:
        raise NotImplementedError


class Waiter:
    """A waiter that records its outcomes."""

    def __init__(self) -> None:
        self.outcomes: list[Any] = []

    def set_result(self, value: bytes) -> None:
        self.outcomes.append(value)

    def set_exception(self, error: Exception) -> None:
        self.outcomes.append(error)
