"""What can be said of a message that cannot be sent at once, and the strategies of the protocol that say it."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from zope.interface import implementer

from sbus.interfaces import IHardStrategy, ISoftStrategy

if TYPE_CHECKING:
    from sbus.flood.send_queue import SendQueue

__all__ = ["HARD_STRATEGIES", "SOFT_STRATEGIES", "Strategy", "Verdict"]


class Verdict(enum.Enum):
    """What a strategy says of a message that cannot be sent at once."""

    KEEP = "keep it in the queue, as far as there is room"
    DROP = "drop it for this receiver"
    BLOCK = "keep it in any case, and hold its publisher back"
    CLOSE = "disconnect the receiver"


@implementer(ISoftStrategy, IHardStrategy)
class Strategy:
    """A strategy that always says the same; soft or hard, by its selector."""

    def __init__(self, selector: bytes, always: Verdict) -> None:
        self.selector = selector
        self.always: Verdict | None = always

    def __repr__(self) -> str:
        return f"<Strategy {self.selector.decode()}>"

    def decide(self, queue: SendQueue, packet: bytes) -> Verdict:
        assert self.always is not None
        return self.always


SOFT_STRATEGIES = (
    Strategy(b"blocking/soft/queue", Verdict.KEEP),
    Strategy(b"blocking/soft/discard", Verdict.DROP),
    Strategy(b"blocking/soft/block", Verdict.BLOCK),
    Strategy(b"blocking/soft/error", Verdict.CLOSE),
)
"""The strategies of the protocol for a full socket; the first is the default."""

HARD_STRATEGIES = (
    Strategy(b"blocking/hard/discard", Verdict.DROP),
    Strategy(b"blocking/hard/block", Verdict.BLOCK),
    Strategy(b"blocking/hard/error", Verdict.CLOSE),
)
"""The strategies of the protocol for a queue at its limit; the first is the default."""
