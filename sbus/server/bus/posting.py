"""Posting: which messages go by mail, and how they get into it.

While several users are active, a group of receivers of another user gets its messages at once only if it is small and
none of its receivers waits for mail. Every other group gets an entry (`sbus.server.bus.mail`), or loses the messages if
there is no room for one. `sbus.server.bus.delivery` has the theory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import islice

from twisted.logger import Logger

from sbus.fair import Lines, Scheduler
from sbus.flood import PROGRAM, PayloadMessage
from sbus.routing.route import Group, Route
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
        return self._has_own_room(later, 1, len(packet), publisher)

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

    def _has_own_room(self, later: list[Group[Receiver]], count: int, size: int, publisher: Publisher | None) -> bool:
        """Return whether there is room for a run in the mail of the publisher's own user; see `_split`.

        :param count: the messages of the run.
        :param size: their bytes.
        """
        if publisher is not None:
            own = publisher.user
            for group in later:
                if group.user is own:
                    work = count * len(group.receivers) * own.lines.ns
                    if not own.lines.has_room(account_of(publisher), work, size):
                        return False
        return True

    def _post(
        self,
        groups: list[Group[Receiver]],
        packets: list[bytes],
        size: int,
        publisher: Publisher | None,
        has_echo: bool,
        payload: PayloadMessage | None = None,
    ) -> None:
        """Put a run into the mail of these groups' users; a group without room there loses it.

        :param size: the bytes of the run.
        :param payload: the only message of the run, if its payload is in sealed memory.
        """
        count = len(packets)
        sender: Lines | None = None
        account: Hashable = None
        signature = PROGRAM
        if publisher is not None:
            sender, signature, account = publisher.user.lines, publisher.signature, account_of(publisher)
        for group in groups:
            lines: Lines = group.user.lines
            last = lines.mail[-1] if lines.mail else None
            gap = last if type(last) is Gap and last.takes() else None
            kept = None if payload is None else payload.held(group.user)
            work = count * len(group.receivers) * lines.ns
            has_room = lines is sender or lines.has_room(account, work, size, gap is not None)
            skip = publisher if lines is sender and not has_echo else None
            if not has_room or (payload is not None and kept is None):
                if gap is None:
                    gap = Gap(self, lines)
                    self.scheduler.append(lines, gap)
                gap.add(group, skip, count, size)  # type: ignore[arg-type]
                continue
            waiter = publisher if group.user.blockers and self._may_be_blocked(publisher, group) else None
            if kept is not None or waiter is not None or type(last) is not Mail or not last.takes(group, skip, count):  # type: ignore[arg-type]
                last = Mail(self, group, skip, waiter, kept)  # type: ignore[arg-type]
                self.scheduler.append(lines, last)
            last.add(packets if kept is None else [kept], size, work, account, signature)
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
        return any(self._may_block(each, publisher) for each in islice(group.user.blockers, _ASKED))

    def _may_block(self, receiver: Receiver, publisher: Publisher | None) -> bool:
        try:
            return publisher is not None and self._credentials.mayBlock(receiver.peer, publisher.peer)
        except Exception:
            self.log.failure(
                "Error in the credentials policy: client {number} blocks nobody", number=getattr(receiver, "number", 0)
            )
            return False


def account_of(publisher: Publisher) -> Hashable:
    """Return the key of the mailbox part that messages take: the publisher's user, or the author named by a link.

    A user counts by its UID: one that leaves and returns is another object, while its messages still wait.
    """
    signature = publisher.signature
    return signature.user if signature.is_vouched else publisher.user.uid
