"""Posting: which messages go by mail, and how they get into it.

While several users are active, a group of receivers of another user gets its messages at once only if it is small and
none of its receivers waits for mail. Every other group gets an entry (`sbus.server.bus.mail`), or loses the messages if
there is no room for one. `sbus.server.bus.delivery` has the theory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import islice

from twisted.logger import Logger

from sbus.fair import Scheduler
from sbus.flood import PROGRAM, PayloadMessage
from sbus.routing.route import Group, Route
from sbus.routing.runs import total_size
from sbus.server.bus.mail import Gap, Letter, Mail, Post
from sbus.server.core.interfaces import ICredentials, Publisher, Receiver

__all__ = ["AT_ONCE", "AT_ONCE_KIB", "OF_OTHERS", "Posting", "account_of"]

AT_ONCE = 512
"""The maximal number of a user's receivers that get a message at once: about 1 ms (row ``fan-out``, with 1,000)."""
AT_ONCE_KIB = 4 << 10
"""The maximal size in KiB of copies made at once, beyond the first KiB of each message (row ``max-packets``)."""
OF_OTHERS = 2
"""The maximal number of another user's receivers that get a message at once, at the publisher's expense. With 8, the
readers of row ``eager-8`` took two thirds of the publisher's throughput."""
_ASKED = 16
"""The number of a user's receivers for which the policy decides whether they may block a publisher. As a rule, the
answer is the same for all of them, and asking for all would cost 3,900 steps in row ``eager-most``."""


class Posting(Post):
    """Decides who gets a message by mail, and posts it.

    :param credentials: decides whether a receiver may block a publisher.
    :param scheduler: whose turn it is.
    """

    log = Logger(namespace="sbus.bus")

    __slots__ = ("_credentials",)

    def __init__(self, credentials: ICredentials, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self._credentials = credentials

    def has_room_for(self, packet: bytes, route: Route[Receiver], publisher: Publisher) -> bool:
        """Return whether `deliver` would handle a message of this publisher."""
        if not self.scheduler.is_busy:
            return True
        _, later = self._split(self._copied(packet), route, publisher)
        return all(
            group.user is not publisher.user or self._has_mail_room(group, [packet], account_of(publisher))
            for group in later
        )

    def _copied(self, packet: bytes) -> int:
        """Return the bytes of a copy of a message."""
        return len(packet)

    def _split(
        self, size: int, route: Route[Receiver], publisher: Publisher | None
    ) -> tuple[list[Receiver], list[Group[Receiver]]]:
        """Return the receivers that get a run at once, and the groups that get it by mail.

        :param size: the bytes of a copy of the run.
        """
        now: list[Receiver] = []
        later: list[Group[Receiver]] = []
        own = None if publisher is None else publisher.user
        for group in route.groups:
            receivers, user = group.receivers, group.user
            if user is not None:
                many = len(receivers)
                if many > (AT_ONCE if user is own else OF_OTHERS) or many * size > AT_ONCE_KIB << 10:
                    later.append(group)
                    continue
                lines = user.lines
                if lines.mail and any(map(lines.waits, receivers)):
                    later.append(group)
                    continue
            now += receivers
        return now, later

    def _has_mail_room(
        self, group: Group[Receiver], packets: list[bytes], account: Hashable, after_gap: bool = False
    ) -> bool:
        lines = group.user.lines
        work = len(packets) * len(group.receivers) * lines.ns
        return bool(lines.has_room(account, work, total_size(packets), after_gap))

    def _post(
        self,
        groups: list[Group[Receiver]],
        packets: list[bytes],
        publisher: Publisher | None,
        has_echo: bool,
        payload: PayloadMessage | None = None,
    ) -> None:
        """Put a run into the mail of these groups' users; a group without room there loses it.

        :param payload: the only message of the run, if its payload is in sealed memory.
        """
        size, count = total_size(packets), len(packets)
        if publisher is None:
            sender = account = None
            signature = PROGRAM
        else:
            sender, signature = publisher.user.lines, publisher.signature
            account = signature.user if signature.is_vouched else sender
        for group in groups:
            lines = group.user.lines
            last = lines.mail[-1] if lines.mail else None
            gap = last if isinstance(last, Gap) and last.takes() else None
            kept = None if payload is None else payload.held(group.user)
            has_room = lines is sender or self._has_mail_room(group, packets, account, gap is not None)
            if not has_room or (payload is not None and kept is None):
                if gap is None:
                    gap = Gap(self, lines)
                    self.scheduler.append(lines, gap)
                gap.add(group, count, size)
                continue
            waiter = publisher if self._may_be_blocked(publisher, group) else None
            skip = publisher if lines is sender and not has_echo else None
            if kept is not None or waiter is not None or type(last) is not Mail or not last.takes(group, skip, count):  # type: ignore[arg-type]
                last = Mail(self, group, skip, waiter, kept)  # type: ignore[arg-type]
                self.scheduler.append(lines, last)
            last.add(packets if kept is None else [kept], size, account, signature)
            if waiter is not None:
                waiter.wait_for_mail()

    def post(self, client: Receiver, kind: str, open_letter: Callable[[], object]) -> bool:
        """Put a letter for a client into its user's mail, if anything waits there for the client.

        :returns: False if nothing waits; then the caller must act at once, without the letter.
        """
        lines = client.user.lines
        if not lines.waits(client):
            return False
        self.scheduler.append(lines, Letter(self, lines, client, kind, open_letter))
        return True

    def _may_be_blocked(self, publisher: Publisher | None, group: Group[Receiver]) -> bool:
        """Return whether a receiver of the group's user may block a publisher."""
        blockers = group.user.blockers
        return bool(blockers) and any(self._may_block(each, publisher) for each in islice(blockers, _ASKED))

    def _may_block(self, receiver: Receiver, publisher: Publisher | None) -> bool:
        try:
            return publisher is not None and self._credentials.mayBlock(receiver.peer, publisher.peer)
        except Exception:
            self.log.failure(
                "Error in the credentials policy: client {number} blocks nobody", number=getattr(receiver, "number", 0)
            )
            return False


def account_of(publisher: Publisher) -> Hashable:
    """Return the owner of the mailbox part that messages take: the publisher's user, or the author named by a link."""
    signature = publisher.signature
    return signature.user if signature.is_vouched else publisher.user.lines
