"""Denials: what a client that has asked for them (``denied/on``) is told of what it may not do.

A denial is a reply. While `MAX_REPLIES` replies wait, further denials are only counted, and one more tells their number
when there is room. So denials alone never keep a client from being read, as other replies do: a client that only
publishes, and reads nothing, is not held up by them.
"""

from __future__ import annotations

from sbus.protocol.notices import DENIED, SEVERAL, denied
from sbus.server.core.interfaces import Client
from sbus.server.core.limits import MAX_REPLIES

__all__ = ["tell"]


def tell(client: Client, verb: bytes, key: bytes, rule: str) -> None:
    """Tell a client what it may not do, now or in a sum.

    :param verb: ``MSG`` or ``SUB``.
    :param key: the key or pattern.
    :param rule: the name of the rule.
    """
    if not client.untold and client.waiting_replies < MAX_REPLIES:
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
