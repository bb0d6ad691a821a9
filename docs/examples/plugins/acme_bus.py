"""Components for sbus: a credentials policy, a soft strategy, a hard strategy and an order."""

from __future__ import annotations

import os

from twisted.plugin import IPlugin
from zope.interface import implementer

from sbus.errors import Violation, ViolationReason
from sbus.flood import SendQueue
from sbus.interfaces import (
    ICredentials,
    ICredentialsPolicy,
    IHardStrategy,
    IQueueOrder,
    ISoftStrategy,
    PeerCredentials,
    SecretKey,
    Verdict,
)
from sbus.server import AccessSettings, KernelPolicy


@implementer(ICredentials)
class HouseRules:
    """The kernel's policy, with two more rules: on subscriptions to everything, and on ``system/``."""

    restrictsPublishing = True
    verdictSeconds = 60.0

    def __init__(self, kernel: ICredentials) -> None:
        self._kernel = kernel

    def mayConnect(self, peer: PeerCredentials) -> bool:
        return self._kernel.mayConnect(peer)

    def checkSubscription(self, peer: PeerCredentials, pattern: bytes, secret: SecretKey | None) -> None:
        self._kernel.checkSubscription(peer, pattern, secret)  # this is what keeps secrets secret
        first = pattern.partition(b"/")[0]
        if not pattern or b"*" in first:
            raise Violation(ViolationReason.REFUSED_SUBSCRIPTION)

    def mayPublish(self, peer: PeerCredentials, key: bytes) -> bool:
        return not key.startswith(b"system/") or peer.uid in (0, os.getuid())

    def mayBlock(self, receiver: PeerCredentials, publisher: PeerCredentials) -> bool:
        return self._kernel.mayBlock(receiver, publisher)


@implementer(IPlugin, ICredentialsPolicy)
class HouseRulesPolicy:
    name = "house-rules"
    description = "as kernel, but no pattern matches every first segment, and system/ is for the server's user"

    def make(self, settings: AccessSettings) -> HouseRules:
        return HouseRules(KernelPolicy().make(settings))


@implementer(IPlugin, ISoftStrategy)
class Recent:
    """Keep the ten newest of the messages that the socket does not accept."""

    selector = b"blocking/soft/recent"
    always = None

    def decide(self, queue: SendQueue, packet: bytes) -> Verdict:
        while queue.messages >= 10 and queue.drop_next():
            pass
        return Verdict.KEEP


@implementer(IPlugin, IHardStrategy)
class MakeRoom:
    """At the limit, drop the messages that would be sent next instead of the new one."""

    selector = b"blocking/hard/make-room"
    always = None

    def decide(self, queue: SendQueue, packet: bytes) -> Verdict:
        enough = queue.size - len(packet)
        while queue.drop_next():
            if queue.size <= enough or not queue.messages:
                return Verdict.KEEP
        return Verdict.DROP


@implementer(IPlugin, IQueueOrder)
class SmallestFirst:
    """Send the smallest packet first, and equal sizes in order of arrival."""

    selector = b"order/smallest"
    newestFirst = None
    arrival = False

    def rank(self, arrival: int, size: int, newest_first: bool) -> tuple[int, int]:
        return size, arrival
