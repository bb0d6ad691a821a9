"""One client's choices about the messages that it receives, as an immutable value."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from sbus.flood.backlogs import ORDERS
from sbus.flood.interfaces import IHardStrategy, IQueueOrder, ISoftStrategy, Verdict
from sbus.flood.strategies import HARD_STRATEGIES, SOFT_STRATEGIES

__all__ = ["DEFAULT_SETTINGS", "ClientSettings"]


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """The choices that a client has made with control messages.

    All clients that chose nothing share `DEFAULT_SETTINGS`.

    :ivar soft: the strategy for a message when the socket is full.
    :ivar hard: the strategy for a message when the queue is at its limit.
    :ivar order: the order in which the queue is sent.
    :ivar newest_first: whether ``order/stack`` was chosen after ``order/queue``; it counts for equal ranks.
    :ivar echo: whether the client receives its own messages, if it subscribed to them.
    :ivar bundles: whether the client sends and takes bundles.
    :ivar payloads: whether the client sends and takes large payloads in sealed memory.
    :ivar bye: whether the client gets the reason before the server disconnects it.
    :ivar receipts: whether the client gets a receipt where messages for it were dropped.
    :ivar sender: whether the server names the publishers of the client's messages to it.
    :ivar denied: whether the client gets a denial for each refusal, and stays; else the server disconnects it.
    :ivar observer: whether the client's subscriptions count as no interest.
    :ivar chain: whether the client is notified when its name changes, on a bus with a master.
    """

    soft: ISoftStrategy = SOFT_STRATEGIES[0]
    hard: IHardStrategy = HARD_STRATEGIES[0]
    order: IQueueOrder = ORDERS[0]
    newest_first: bool = False
    echo: bool = True
    bundles: bool = False
    payloads: bool = False
    bye: bool = False
    receipts: bool = False
    sender: bool = False
    denied: bool = False
    observer: bool = False
    chain: bool = False

    def with_order(self, order: IQueueOrder) -> ClientSettings:
        """Return these settings with another order.

        The order may also say whether the newest message goes first.
        """
        newest_first = self.newest_first if order.newestFirst is None else order.newestFirst
        return replace(self, order=order, newest_first=newest_first)

    def can_block(self) -> bool:
        """Return whether the strategies can block a publisher."""
        return self.soft.always in (Verdict.BLOCK, None) or self.hard.always in (Verdict.BLOCK, None)

    def describe(self) -> dict[str, bytes | bool]:
        """Return the choices as the control messages that select them."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return found | {name: found[name].selector for name in ("soft", "hard", "order")}


DEFAULT_SETTINGS = ClientSettings()
"""The choices of a client that has made none."""
