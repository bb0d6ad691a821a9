"""Lists of the admin socket: the best rows of many, and a list in pieces."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from sbus.admin.pages import Asked, Problem
from sbus.server.bus.registry import SubscriptionRegistry
from sbus.server.core.interfaces import Client

__all__ = ["MOST", "Best", "client_of", "limit_of", "listed"]

MOST = 1000
"""Rows of one answer."""
_DEFAULT = 100

T = TypeVar("T")


class Best(Generic[T]):
    """The rows with the highest ranks, in a bounded heap.

    :param limit: rows to keep.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._heap: list[tuple[Any, int, T]] = []
        self._number = 0
        self.total = 0

    def add(self, rank: Any, row: T) -> None:
        """Add a row; of equal ranks the first one wins."""
        self.total += 1
        self._number -= 1
        entry = rank, self._number, row
        if len(self._heap) < self._limit:
            heapq.heappush(self._heap, entry)
        elif entry > self._heap[0]:
            heapq.heapreplace(self._heap, entry)

    def ranked(self) -> list[tuple[Any, T]]:
        """Return the rows kept with their ranks, the best first."""
        return [(rank, row) for rank, _, row in sorted(self._heap, reverse=True)]


def limit_of(asked: Asked) -> int:
    """Return the limit of rows that a request has.

    :raises sbus.admin.pages.Problem: if it is not a number, or out of range.
    """
    return asked.number("limit", _DEFAULT, 1, MOST)


def client_of(registry: SubscriptionRegistry, asked: Asked, name: str) -> Client | None:
    """Return the client whose number a parameter of a request gives; None without that parameter.

    :raises sbus.admin.pages.Problem: if the number is out of range, or there is no such client.
    """
    number = asked.number(name, 0, 1, 999_999_999)
    if not number:
        return None
    client = registry.clients.get(number)
    if client is None:
        raise Problem(404, f"there is no client {number}: sbus clients lists them")
    return client


def listed(name: str, rows: Iterable[Mapping[str, Any] | None], **fields: Any) -> Iterator[str]:
    """Yield the pieces of an object with fields and one list, a row in each piece; None makes an empty piece."""
    yield json.dumps(fields)[:-1] + (", " if fields else "") + f'"{name}": ['
    comma = ""
    for row in rows:
        if row is None:
            yield ""
            continue
        yield comma + json.dumps(row)
        comma = ",\n"
    yield "]}\n"
