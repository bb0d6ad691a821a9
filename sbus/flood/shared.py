"""The backlog that users share: that of a link, which carries the messages of many users.

.. rubric:: Theory of operation

Each user has a part of the backlog, with the messages of its publishers (`_Line`). The parts are served in turn, about
`TURN` bytes each. So a message waits for one turn of each other user, whatever the length of their parts. The messages
of one user, hence of one publisher, keep their order. Replies go first, in the order of their questions.

The part of one user is at most (rest + own) / (n + 1): *rest* is the free room, *own* is what the user has, and *n* is
the number of users with messages, as in a mailbox (`sbus.fair.lines`). An empty part takes one run of any size. So a
user that floods a link always leaves room for the next user, and loses only its own messages.

The users come from the messages' signatures (`sbus.flood.naming`): a link asks for senders before it declares its queue
shared. Messages from before that have no signature, and count as those of one user. In a part, as in the order of
arrival, only the first message of a run must be signed; the first message of a turn is signed when it leaves.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator, Sequence
from itertools import chain, islice
from operator import attrgetter

from sbus.flood.naming import Mark, Signed, mark_of, sign, sign_each
from sbus.routing.runs import find_type, total_size

__all__ = ["TURN", "SharedBacklog"]

TURN = 16 << 10
"""Bytes that one user's part sends in its turn, about: several packets for each notice of a publisher."""


_user = attrgetter("user")


def _last_of(packets: list[bytes], before: Mark | None) -> Mark | None:
    """Return the mark of the last of some messages.

    :param before: the mark of the message before them.
    """
    last = packets[-1]
    if isinstance(last, Signed):
        return mark_of(last)
    at = find_type(packets, Signed, 0)
    while at >= 0:
        before = mark_of(packets[at])  # type: ignore[arg-type]
        at = find_type(packets, Signed, at + 1)
    return before


class _Line:
    """One user's messages, in their order of arrival.

    :ivar packets: the messages, after those that have left; `front` is the index of the first message.
    :ivar size: the bytes of the messages.
    :ivar mark: the mark of the last message that has left.
    """

    __slots__ = ("front", "mark", "packets", "size")

    def __init__(self) -> None:
        self.packets: list[bytes] = []
        self.mark: Mark | None = None
        self.front = self.size = 0

    def __len__(self) -> int:
        return len(self.packets) - self.front

    def end_of_turn(self, at: int, most: int) -> int:
        """Return the index after the last message of a turn.

        :param at: the index of the first message.
        :param most: the maximal number of messages.
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
    """A backlog with a part for each user; see `sbus.flood.backlogs.FifoBacklog` for its methods.

    :param packets: the first packets, in the order of arrival.
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
        self._turns: list[tuple[Hashable, int]] = []  # the users whose messages were taken, and how many
        if waiting := list(packets):
            self.push(waiting)

    def __len__(self) -> int:
        return len(self._replies) + self._count

    def __iter__(self) -> Iterator[bytes]:
        lines = (sign_each(line.packets[line.front :], line.mark) for line in self._lines.values())
        return chain(self._replies, *lines)

    def has_room(self, user: Hashable, messages: int, size: int, rest: int, rest_size: int) -> bool:
        """Return whether a user may add messages.

        :param rest: the free room in the queue, in messages.
        :param rest_size: the free room in bytes.
        """
        line = self._lines.get(user)
        if line is None:
            return True
        parts, own = len(self._lines) + 1, len(line)
        return own + messages <= (rest + own) // parts and line.size + size <= (rest_size + line.size) // parts

    def rank(self, most: int) -> None:
        """Do nothing: no message has a rank."""

    def push(self, packets: list[bytes]) -> None:
        """Add messages, the first one signed, or replies."""
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
        """Remove a user's first messages and end its turn."""
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
