"""A backlog that users share: the one of a link, which carries the messages of many.

.. rubric:: Theory of operation

The messages of each publisher's user have a line of their own, and the lines are served in turn, `TURN` bytes each. So
a message waits for a turn of each other user, however much these have there. Of one user, hence of one publisher, the
order stays. Replies go first, in the order of their questions.

The part of one user is at most (rest + own) / (n + 1), where n users have messages there, as in a mailbox
(`sbus.fair.lines`), and an empty part takes one run of any size. So a user that floods a link always leaves room for
the next one, and loses its own messages alone.

The users are those of the messages' signatures (`sbus.flood.naming`): a link asks who publishes before it says that its
queue is shared. What came before that has no signature, and is one user's. In a line, only the first message of a run
need be signed, as in the order of arrival; the first one of a turn is signed when it leaves.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator, Sequence
from itertools import chain, islice
from operator import attrgetter

from sbus.flood.naming import Mark, Signed, sign, sign_each
from sbus.routing.runs import find_type, total_size

__all__ = ["TURN", "SharedBacklog"]

TURN = 16 << 10
"""Bytes that one user's line sends in its turn, about: a few packets for each change of the publisher's name."""


_user = attrgetter("user")


def _last_of(packets: list[bytes], before: Mark | None) -> Mark | None:
    """Return the mark of the last one of some messages.

    :param before: that of the message in front of them.
    """
    last = packets[-1]
    if type(last) is Signed:
        return last.__dict__
    at = find_type(packets, Signed, 0)
    while at >= 0:
        before = packets[at].__dict__
        at = find_type(packets, Signed, at + 1)
    return before


class _Line:
    """One user's messages, in their order of arrival.

    :ivar packets: the messages, behind those that are gone; `front` is the index of the first.
    :ivar size: the bytes of the messages.
    :ivar mark: that of the last one that is gone.
    """

    __slots__ = ("front", "mark", "packets", "size")

    def __init__(self) -> None:
        self.packets: list[bytes] = []
        self.mark: Mark | None = None
        self.front = self.size = 0

    def __len__(self) -> int:
        return len(self.packets) - self.front

    def end_of_turn(self, at: int, most: int) -> int:
        """Return the index behind the last message of a turn.

        :param at: the index of the first.
        :param most: the number of messages at most.
        """
        packets, left = self.packets, TURN
        end = min(at + most, len(packets))
        while at < end and left > 0:
            left -= len(packets[at])
            at += 1
        return at

    def drop(self, count: int) -> None:
        """Remove messages from the front."""
        packets, front = self.packets, self.front + count
        gone = packets[self.front : front]
        self.size -= total_size(gone)
        self.mark = _last_of(gone, self.mark)
        if front * 2 > len(packets):
            del packets[:front]
            front = 0
        else:
            packets[self.front : front] = [b""] * count
        self.front = front


class SharedBacklog:
    """A backlog with a line for each user; see `sbus.flood.backlogs.FifoBacklog` for its methods.

    :param packets: what it has, in the order of arrival.
    """

    ranked = unranked = 0

    __slots__ = ("_count", "_lines", "_replies", "_taken", "_turns")

    marks: Sequence[int] = ()
    """This order knows no places for receipts."""

    def __init__(self, packets: Iterator[bytes]) -> None:
        self._lines: OrderedDict[Hashable, _Line] = OrderedDict()  # in the order of their next turns
        self._replies: deque[bytes] = deque()
        self._count = 0  # messages
        self._taken = 0  # replies
        self._turns: list[tuple[Hashable, int]] = []  # of whom messages were taken, and how many
        if waiting := list(packets):
            self.push(waiting)

    def __len__(self) -> int:
        return len(self._replies) + self._count

    def __iter__(self) -> Iterator[bytes]:
        lines = (sign_each(line.packets[line.front :], line.mark) for line in self._lines.values())
        return chain(self._replies, *lines)

    def has_room(self, user: Hashable, messages: int, size: int, rest: int, rest_size: int) -> bool:
        """Return whether a user may add messages.

        :param rest: the number of messages that there is room for in all.
        :param rest_size: their bytes.
        """
        line = self._lines.get(user)
        if line is None:
            return True
        parts, own = len(self._lines) + 1, len(line)
        return own + messages <= (rest + own) // parts and line.size + size <= (rest_size + line.size) // parts

    def rank(self, most: int) -> None:
        """Do nothing: no message has a rank."""

    def push(self, packets: list[bytes]) -> None:
        """Add messages, of which the first one is signed, or replies."""
        if type(packets[0]) is Signed:
            if find_type(packets, Signed, 1) < 0:
                self._add(packets[0].user, packets)
                return
            try:
                users = set(map(_user, packets))
            except AttributeError:
                users = set()
            if len(users) == 1:
                self._add(users.pop(), packets)
                return
        user: Hashable = None
        for packet in packets:
            if type(packet) is Signed:
                user = packet.user
            if type(packet) is Signed or type(packet) is bytes:
                self._add(user, [packet])
            else:
                self._replies.append(packet)

    def _add(self, user: Hashable, packets: list[bytes]) -> None:
        line = self._lines.get(user)
        if line is None:
            line = self._lines[user] = _Line()
        line.packets += packets
        line.size += total_size(packets)
        self._count += len(packets)

    def pop_message(self) -> bytes | None:
        """See `FifoBacklog.pop_message`."""
        for user, line in self._lines.items():
            packet = line.packets[line.front]
            self._drop(user, 1)
            return bytes(packet)
        return None

    def _drop(self, user: Hashable, count: int) -> None:
        """Remove a user's first messages, and end its turn."""
        line = self._lines[user]
        line.drop(count)
        self._count -= count
        if line:
            self._lines.move_to_end(user)
        else:
            del self._lines[user]

    def take(self, count: int) -> list[bytes]:
        """See `FifoBacklog.take`."""
        taken = list(islice(self._replies, count))
        self._taken = len(taken)
        self._turns = []
        waiting = deque((user, line, line.front, line.mark) for user, line in self._lines.items())
        while (left := count - len(taken)) and waiting:
            user, line, at, mark = waiting.popleft()
            packets = line.packets
            end = line.end_of_turn(at, left) if waiting else min(at + left, len(packets))
            if type(packets[at]) is bytes and mark is not None:
                packets[at] = sign(packets[at], mark)
            part = packets[at:end]
            taken += part
            self._turns.append((user, end - at))
            if end < len(packets):
                waiting.append((user, line, end, _last_of(part, mark)))
        return taken

    def ack(self, sent: int) -> None:
        """See `FifoBacklog.ack`."""
        sent -= (replies := min(sent, self._taken))
        for _ in range(replies):
            self._replies.popleft()
        turns, self._turns = self._turns, []
        for user, count in turns:
            if not sent:
                break
            self._drop(user, min(count, sent))
            sent -= min(count, sent)
