"""Denials: the replies about refusals to a client that has asked for them (``denied/on``).

A denial is a reply. While `MAX_REPLIES` replies wait, further denials of messages are only counted, and one more gives
their number when there is room. So denials of messages never keep a client from being read, as other replies do, even
if it only publishes and reads nothing. Denials of subscriptions are never summed up: a client must know which of its
subscriptions are in force. A new policy ends each of them once, so their number is bounded.
"""

from __future__ import annotations

from sbus.protocol.notices import DENIED, SEVERAL, denied
from sbus.protocol.packets import SUB
from sbus.server.core.interfaces import Client
from sbus.server.core.limits import MAX_REPLIES

__all__ = ["tell"]


def tell(client: Client, verb: bytes, key: bytes, rule: str) -> None:
    """Send a client a denial, now or in a sum.

    :param verb: ``MSG`` or ``SUB``.
    :param key: the key or pattern.
    :param rule: the name of the rule.
    """
    if verb == SUB or (not client.untold and client.waiting_replies < MAX_REPLIES):
        client.reply(DENIED, denied(verb, key, rule))
        return
    if not client.untold:

        def tell_sum() -> None:
            if client.waiting_replies < MAX_REPLIES:
                client.on_room = tuple(hook for hook in client.on_room if hook is not tell_sum)
                count, client.untold = client.untold, 0
                client.notify(DENIED, b"%b %d" % (SEVERAL, count))

        client.on_room = (*client.on_room, tell_sum)
    client.untold += 1
