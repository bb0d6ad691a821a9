"""Denials: what the server refuses, and the call or reader that gets the error.

Theory of operation
-------------------

The server does not do what the policy forbids, and sends a *denial* (``CMSG denied``): the verb, the key and the rule.
A denial does not name the packet. The server handles packets in order, so the client can find out:

* ``MSG`` (``FMSG`` for a large one) fails the oldest request with this key that the server may not have handled yet. A
  request is followed by a question (`sbus.client.api`), and the answer shows that the server has
  handled the request. An announcement of a worker (`sbus.client.workers`) counts as a request until the work ends.
* ``SUB`` ends every subscription with this pattern, whether the server refuses it or a new policy has revoked it. The
  client also unsubscribes: then both ends agree, even if the denial was about an earlier subscription that had ended
  here.
* Nobody waits for anything else, so ``on_denied`` is called, or the denial is logged.

Each denial is reported once. A request, and a subscription that is read, raises `NotAllowed`. A subscription with a
callback ends, and ``on_denied`` is called.

If the policy is replaced while a request and a message with the same key are on their way, the request may get the
denial of the message. Rejected: a question in front of each request, which would cost each request one more packet.

====================  =================================================
the server sends      reported to
====================  =================================================
``MSG <key> <rule>``  a request or a worker, else ``on_denied``
``SUB <key> <rule>``  the readers; for callbacks, ``on_denied``
``several <n>``       ``on_denied``, as the sum names no call
====================  =================================================
"""

from __future__ import annotations

from collections.abc import Callable

from sbus.client.dispatch import Dispatcher, Sink, Waiter
from sbus.client.snapshots import Snapshots
from sbus.errors import NotAllowed
from sbus.protocol.notices import LONGEST_DENIED, SEVERAL, Denial, parse_denied
from sbus.protocol.packets import FMSG, MSG, SUB

__all__ = ["Denial", "DenialLog", "Denials", "error_of", "raise_denied"]

_MOST_LOGGED = 64
"""Denials that are logged one by one: as many as the server reports one by one to a client that does not read."""


def error_of(denial: Denial) -> NotAllowed:
    """Return the error for a denial of one packet."""
    return NotAllowed(denial.verb, denial.key, denial.rule)


def raise_denied(denial: Denial) -> None:
    """Raise a denial: an ``on_denied`` for programs with the blocking client that end with the first one.

    :raises NotAllowed: unless it sums up others, of which the first has been raised.
    """
    if denial.verb != SEVERAL:
        raise error_of(denial)


class Denials:
    """The denials of one client.

    :param dispatcher: has the subscriptions.
    :param snapshots: end with the subscriptions that they are for.
    :param refuse: called with a subscription to end and the error; returns whether a reader or a caller gets it.
    :param report: called with each denial that no call and no reader gets; None if this client does not ask for any.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        snapshots: Snapshots,
        refuse: Callable[[Sink, NotAllowed], bool],
        report: Callable[[Denial], object] | None,
    ) -> None:
        self._dispatcher = dispatcher
        self._snapshots = snapshots
        self._refuse = refuse
        self._report = report
        self._requests: dict[Waiter, bytes] = {}  # in the order of sending, with their keys

    def expect(self, key: bytes, waiter: Waiter) -> None:
        """Fail `waiter` if the server refuses the message with this key that is sent now."""
        self._requests[waiter] = key[:LONGEST_DENIED]

    def settle(self, waiter: Waiter) -> None:
        """Note that the server has handled the message of `waiter`, or that nobody waits any longer."""
        self._requests.pop(waiter, None)

    def receive(self, payload: bytes) -> bool:
        """Handle a denial; return whether it was asked for and is well-formed."""
        denial = parse_denied(payload)
        if denial is None or self._report is None:
            return False
        if denial.verb == SUB:
            is_reported = self._end_subscriptions(denial)
        else:
            is_reported = denial.verb in (MSG, FMSG) and self._fail_request(denial)
        if not is_reported:
            self._report(denial)
        return True

    def _fail_request(self, denial: Denial) -> bool:
        for waiter, key in self._requests.items():
            if key == denial.key:
                self.settle(waiter)
                waiter.set_exception(error_of(denial))
                return True
        return False

    def _end_subscriptions(self, denial: Denial) -> bool:
        """End the subscriptions with a pattern; return whether nobody else needs the report."""
        was_asked_twice = self._snapshots.refuse(denial.key)  # with ``last`` and with ``SUB``
        sinks = self._dispatcher.sinks_at(denial.key)
        if not sinks:
            return was_asked_twice
        are_raised = [self._refuse(sink, error_of(denial)) for sink in sinks]
        return all(are_raised)


class DenialLog:
    """The denials that were logged for an application without ``on_denied``: each key once.

    :param warn: called with each line.
    """

    def __init__(self, warn: Callable[[str], object]) -> None:
        self._warn = warn
        self._logged: set[tuple[bytes, bytes]] = set()

    def add(self, denial: Denial) -> None:
        """Log a denial, unless its verb and key were logged before."""
        what = denial.verb, denial.key
        if what in self._logged or len(self._logged) > _MOST_LOGGED:
            return
        self._logged.add(what)
        if len(self._logged) > _MOST_LOGGED:
            self._warn("the bus refuses more than this; connect with on_denied= to get every denial")
        elif denial.verb == SEVERAL:
            self._warn(f"the bus has refused more than it lists: {denial.count} messages and subscriptions")
        else:
            self._warn(str(error_of(denial)))
