"""Messages that nobody is subscribed to: the one definition, for the counter, the metric and the events.

A message is *unrouted* if every receiver on its route is an observer: a client with ``observer/on``, such as the
recorder or the page in the browser, or the store of last values. A publisher without echo is not on the route of its
own messages. A receiver that has left does not count, although its patterns are dropped later. So the answer is that of
``probe`` and of ``interest`` (`sbus.server.asks.interest`): 0.
"""

from __future__ import annotations

from collections.abc import Collection, Set

from sbus.server.core.interfaces import Receiver

__all__ = ["is_unrouted"]


def is_unrouted(
    receivers: tuple[Receiver, ...], uncounted: Set[Receiver], muted: Collection[Receiver], skip: object = None
) -> bool:
    """Return whether all receivers of a message are observers or have left.

    :param skip: a receiver that does not get the message: its publisher, without echo.
    """
    if receivers and (first := receivers[0]) is not skip and first not in uncounted and first not in muted:
        return False  # almost always; a generator takes five times as long
    return all(receiver is skip or receiver in uncounted or receiver in muted for receiver in receivers)
