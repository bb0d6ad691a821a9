"""A page of the admin socket: a request with its parameters, pieces of an answer, and a problem.

``sbus web`` answers its own requests with the same requests and problems.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl

__all__ = ["CLIENT_SORTS", "EVENTS", "Asked", "Page", "Pieces", "Problem", "split_target"]

CLIENT_SORTS = ("number", "queue", "lost", "memory", "patterns")
"""The orders of clients: the values of ``sort=``."""

_MOST_PARAMETERS = 16

EVENTS = "text/event-stream"
"""The content type of a page that never ends."""

Pieces = Iterator[str | None]
"""The pieces of a body. Each takes a fraction of a slice to make; None: there is nothing now, ask again later."""


class Problem(Exception):
    """A request that cannot be answered (RFC 9457).

    :param status: the HTTP status.
    :param detail: what happened, why, and what to do.
    """

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


def split_target(target: bytes, host: bytes | None) -> tuple[bytes, bytes]:
    """Return the path and the query of the target of a request.

    :param host: the ``Host`` header. A target in absolute form (RFC 9112) has it in front of the path, after ``http://``.
    """
    prefix = b"http://" + (host or b"")
    if host and target[: len(prefix)].lower() == prefix.lower():
        target = target[len(prefix) :] or b"/"
    path, _, query = target.partition(b"?")
    return path, query


@dataclass(frozen=True, slots=True)
class Asked:
    """A request.

    :ivar parameters: the parameters of the query; bytes that are not UTF-8 are surrogates (``surrogateescape``).
    :ivar is_owner: whether root or the server's own user asks, and not a member of the admin group.
    """

    parameters: Mapping[str, str]
    is_owner: bool = True

    @classmethod
    def with_query(cls, query: bytes, is_owner: bool = True) -> Asked:
        """Return a request with the parameters of a query; of several with one name, the last.

        :param query: what follows the ``?`` of the URL.
        :raises Problem: if there are too many parameters.
        """
        try:
            pairs = parse_qsl(
                query.decode("ascii", "surrogateescape"),
                keep_blank_values=True,
                errors="surrogateescape",
                max_num_fields=_MOST_PARAMETERS,
            )
        except ValueError:
            raise Problem(400, f"the query has more than {_MOST_PARAMETERS} parameters: leave some out") from None
        return cls(dict(pairs), is_owner)

    def need(self, name: str) -> str:
        """Return a parameter.

        :raises Problem: if it is missing.
        """
        try:
            return self.parameters[name]
        except KeyError:
            raise Problem(400, f"the parameter {name}= is missing: add ?{name}=...") from None

    def number(self, name: str, default: int, lowest: int, highest: int) -> int:
        """Return a parameter that is a number.

        :raises Problem: if it is not a number, or out of range.
        """
        text = self.parameters.get(name)
        if text is None:
            return default
        if not (text.isascii() and text.isdigit() and len(text) < 10 and lowest <= int(text) <= highest):
            raise Problem(400, f"{name}={text[:20]}: give a number from {lowest} to {highest}")
        return int(text)


Page = Callable[[Asked], Pieces]
"""Answers a request; raises `Problem`, at the latest with the first piece."""
