"""The protocol's strategies for messages that cannot be sent at once."""

from __future__ import annotations

from typing import Any

from zope.interface import implementer

from sbus.flood.interfaces import IHardStrategy, ISoftStrategy, Verdict

__all__ = ["HARD_STRATEGIES", "SOFT_STRATEGIES", "Strategy"]


@implementer(ISoftStrategy, IHardStrategy)
class Strategy:
    """A strategy that always gives the same verdict.

    Its selector says whether it is soft or hard.
    """

    def __init__(self, selector: bytes, always: Verdict) -> None:
        self.selector = selector
        self.always: Verdict | None = always

    def __repr__(self) -> str:
        return f"<Strategy {self.selector.decode()}>"

    def decide(self, queue: Any, packet: bytes) -> Verdict:
        assert self.always is not None
        return self.always


SOFT_ERROR = Strategy(b"blocking/soft/error", Verdict.CLOSE)
"""The strategy of a receiver that is about to be disconnected."""
SOFT_STRATEGIES = (
    Strategy(b"blocking/soft/queue", Verdict.KEEP),
    Strategy(b"blocking/soft/discard", Verdict.DROP),
    Strategy(b"blocking/soft/block", Verdict.BLOCK),
    SOFT_ERROR,
    Strategy(b"blocking/soft/latest", Verdict.REPLACE),
)
"""The strategies of the protocol for a full socket; the first is the default."""
HARD_STRATEGIES = (
    Strategy(b"blocking/hard/discard", Verdict.DROP),
    Strategy(b"blocking/hard/block", Verdict.BLOCK),
    Strategy(b"blocking/hard/error", Verdict.CLOSE),
)
"""The strategies of the protocol for a queue at its limit; the first is the default."""
