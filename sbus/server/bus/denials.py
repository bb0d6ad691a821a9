"""Denials: the replies about refusals to a client that has asked for them (``denied/on``).

A denial is a reply. While `MAX_REPLIES` replies wait, further denials are only counted, and one more gives their
number when there is room. So denials alone never keep a client from being read, as other replies do: a client that only
publishes, and reads nothing, is not held up by them. Only the answer to a ``SUB`` is never summed up: a client must
know which of its subscriptions it has.
"""

from __future__ import annotations

from sbus.protocol.notices import DENIED, SEVERAL, denied
from sbus.protocol.packets import SUB
from sbus.server.core.interfaces import Client
from sbus.server.core.limits import MAX_REPLIES

__all__ = ["tell"]


def tell(client: Client, verb: bytes, key: bytes, rule: str, is_answer: bool) -> None:
    """Send a client a denial, now or in a sum.

    :param verb: ``MSG`` or ``SUB``.
    :param key: the key or pattern.
    :param rule: the name of the rule.
    :param is_answer: whether the client has just sent that; else a new policy has ended a subscription.
    """
    is_single = not client.untold and client.waiting_replies < MAX_REPLIES
    if is_single or (is_answer and verb == SUB):
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
