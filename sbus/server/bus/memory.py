"""Memory as memory: the prices of the state that clients make the server hold, and the steps when it is too much.

Theory of operation
-------------------

`sbus.flood.MemoryAccount` holds one figure for the bus and one for each user. State is charged where it comes and goes,
at the same price both times. Prices are constants, fitted to the growth of the process (docs/server.rst, "Memory"), so
nothing has to be measured when state goes:

==============================================  ======================================================================
what                                            charged
==============================================  ======================================================================
packets and replies that wait                   by their queue (`sbus.flood.send_queue`)
mail                                            to the receivers' user, once for all (`sbus.server.bus.mail`)
letters in the mail, and replies held back      to the client that gets them
patterns, connections                           `pattern_memory`, `CLIENT_MEMORY`. A segment is priced between a shared
                                                and an unshared one: the client that made a trie node is not known.
packets that were read and cannot be handled    to the publisher's user
bytes that the kernel holds unread              as the kernel reports them (SIOCOUTQ)
the route cache                                 to nobody: it serves all users, and has a sixteenth of the limit
==============================================  ======================================================================

At its user's limit a queue counts as full, a subscription ends its client, a new connection is refused, send buffers do
not grow, and a client with replies or letters is not read from. At the limit for all, the *largest holder is shed*: the
user with the most memory loses its largest connection, until a sixteenth of the limit is free (`MemoryGuard.relieve`).
This happens in the next turn of the reactor, or at once where packets were kept: a single turn can read very many.

Asking the kernel costs a system call for each client (1 µs). So the guard asks only while full send buffers could hold
more than an eighth of a limit (`SAMPLED_PART`), and then 256 clients every 50 ms.

Rejected: charging the size of each send buffer (1,000 idle clients would count 64 MB that nobody uses); reading the
process's RSS (Python gives little back, so it does not fall when clients go).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from sbus.errors import CloseReason
from sbus.fair import Scheduler
from sbus.flood import MemoryAccount, UserShare
from sbus.protocol.keys import SecretKey
from sbus.seqpacket.send_buffer import START
from sbus.server.core.interfaces import Client, Receiver
from sbus.server.core.users import User

__all__ = [
    "CLIENT_MEMORY",
    "KEPT_PACKET",
    "LEAST_MAX_MEMORY",
    "MemoryGuard",
    "pattern_memory",
]

LEAST_MAX_MEMORY = 1 << 20
"""The smallest ``--max-memory``, in bytes: enough for some dozen clients."""
CLIENT_MEMORY = 6 << 10
"""The price of a connection without patterns and packets, with its part of the kernel's memory."""
KEPT_PACKET = 56
"""The price of a packet that was read and is kept, beside its bytes."""
SAMPLED_PART = 8
"""The kernel is asked while send buffers could hold more than a limit divided by this number."""

_PATTERN = 490
_SEGMENT = 150  # 390 if no other pattern has it, and 10 if all have it
_WILDCARD_SEGMENT = 410  # 60 if others have it, and 1,000 if none has
_SECRET = 600

_SLACK = 16
"""The part of the limit (one over it) that is free after clients were shed."""
_SAMPLES = 256
_SAMPLE_INTERVAL = 0.05


def pattern_memory(pattern: bytes, separator: bytes, secret: SecretKey | None) -> int:
    """Return the memory of a subscription to a new pattern, in bytes.

    :param secret: the parts of a secret pattern; None for any other.
    """
    matched = secret.rest if secret else pattern
    segments = matched.count(separator)
    memory = _PATTERN + segments * _SEGMENT + 2 * len(pattern)
    if secret:
        memory += _SECRET + len(pattern)
    if b"*" in matched:
        memory += (segments + 1) * _WILDCARD_SEGMENT + len(matched)
    return memory


class MemoryGuard:
    """Keeps the memory of a bus below its limit.

    :param account: the account of the bus.
    :param clients: the connected clients by number.
    :param muted: receivers that have left, and whose last patterns are being dropped.
    :param users: returns all users.
    :param scheduler: charges the user whose clients are shed.
    :ivar buffers: bytes that the send buffers of all clients could hold.
    """

    log = Logger(namespace="sbus.server")

    def __init__(
        self,
        account: MemoryAccount,
        clients: Mapping[int, Client],
        muted: Collection[Receiver],
        clock: IReactorTime,
        users: Callable[[], Iterable[User]],
        scheduler: Scheduler,
    ) -> None:
        self._account = account
        self._clients = clients
        self._users = users
        self._scheduler = scheduler
        self._muted = muted
        self._clock = clock
        self._is_due = False
        self._is_sampling = False
        self._to_sample: list[Client] = []
        self._has_sampled = False
        self.buffers = 0
        account.on_full = self._full

    # --- the kernel's part -------------------------------------------------------------------

    def add_buffer(self, user: UserShare, size: int = START) -> None:
        """Note that the send buffers of a user can hold more; below 0: less."""
        self.buffers += size
        user.buffers += size
        if not self._is_sampling and self._is_tight(user):
            self._is_sampling = True
            self._clock.callLater(_SAMPLE_INTERVAL, self._sample)

    def may_grow(self, user: UserShare, size: int) -> bool:
        """Decide whether a send buffer may grow by `size` bytes, and note it if so."""
        if not user.has_memory(size) or user.buffers + size > user.memory_limit:
            return False
        if self.buffers + size > self._account.limit:
            return False
        self.add_buffer(user, size)
        return True

    def _is_tight(self, user: UserShare) -> bool:
        return self.buffers > self._account.limit // SAMPLED_PART or user.buffers > user.memory_limit // SAMPLED_PART

    def _sample(self) -> None:
        """Ask the kernel about some clients; stop when a whole round has found nobody to ask about."""
        self._is_sampling = False
        if not self._to_sample:
            if not self._has_sampled and not any(map(self._is_tight, self._users())):
                return
            self._to_sample = list(self._clients.values())
            self._has_sampled = False
        some, self._to_sample = self._to_sample[:_SAMPLES], self._to_sample[_SAMPLES:]
        for client in some:
            if self._is_tight(client.user) and not client.is_ending:
                client.sample_kernel()
                self._has_sampled = True
        self._is_sampling = True
        self._clock.callLater(_SAMPLE_INTERVAL, self._sample)

    # --- the limit for all -------------------------------------------------------------------

    def check(self) -> None:
        """Shed at once if the limit is exceeded; only where clients may be closed."""
        if self._account.held > self._account.limit:
            self.relieve()

    def _full(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._clock.callLater(0, self._relieve_soon)

    def _relieve_soon(self) -> None:
        self._is_due = False
        self.relieve()

    def relieve(self) -> None:
        """Disconnect the largest clients of the largest users until there is room again.

        Memory of clients that are being closed does not count: it is about to be free.
        """
        account, began = self._account, self._scheduler.clock()
        target = account.limit - account.limit // _SLACK
        held = account.held
        memory = {user: user.memory for user in self._users()}
        for left in self._muted:
            if left not in left.user.clients:
                memory[left.user] = memory.get(left.user, left.user.memory) - left.pattern_memory
                held -= left.pattern_memory
        there: dict[User, list[tuple[int, int, Client]]] = {}
        while held > target and memory:
            user = max(memory, key=memory.__getitem__)
            if user not in there:  # only the largest users' clients are looked at
                there[user] = []
                for client in user.clients:
                    size = client.memory()
                    if not client.is_ending:
                        there[user].append((size, client.number, client))
                    else:
                        memory[user] -= size
                        held -= size
                there[user].sort()
                continue
            if not there[user]:  # memory charged to a user and to none of its clients goes with the last of these
                held -= memory.pop(user)
                continue
            size, _, client = there[user].pop()
            self.log.warn(
                "memory: {held} of {limit} B: client {number} is disconnected, whose user holds most: it held {size} "
                "of the user's {of_user} B",
                held=held,
                limit=account.limit,
                number=client.number,
                size=size,
                of_user=memory[user],
            )
            memory[user] -= size
            held -= size
            client.close(CloseReason.OUT_OF_MEMORY)
            now = self._scheduler.clock()
            self._scheduler.charge(user.lines, now - began)
            began = now
