"""The way up: the link of a bus to its master, and the buses above it.

.. rubric:: Theory of operation

A bus has at most one master. A *link* connects the two: a client of both, of root or of the server's user
(`sbus.link`). The server does not know the master. It obeys the few control messages of the link:

=========  ===========================================================================================================
matter     what the bus does
=========  ===========================================================================================================
path       It has an identifier, 128 random bits, and a name. The link reports the buses above; anybody may ask for the
           list, and gets it again when it changes. A link that finds its own bus in the master's list has found a loop.
names      The link reports its own name at the master, ``P``. From then on a client here is called
           ``P/!/cred/<gid>/<uid>/<pid>``. A key or pattern that begins with P means its rest, here; so does one with a
           former value of P, as replies to it may be on their way. The rest has to be a secret key, so P is no detour
           to an open one.
secrets    If secrets go up, each secret key has one destination: one that begins with P is for a client here, every
           other one for the link alone. Without a link such a message is dropped and counted.
fences     A reply to ``whoami`` says that the client's subscriptions are in force. It waits, for `PATIENCE` seconds at
           most, for the link's word (``link/fence``) if one of them is still on its way up, and if secrets go up
           until P is known. Replies after it wait, too.
bridges    A bridge to other hosts is a link without a master. It says ``link/up`` with no name and confirms nothing, so
           only ``is_up`` changes.
losses     The link reports the messages that it has lost: their sums to the operator, their keys to the receivers.
=========  ===========================================================================================================

Messages pay nothing for it: routes of keys that P or the link changes are not cached, and no other keys come here.

Rejected: rewriting keys in the link. A delivered message is the published packet, byte for byte; also, a client
compares the key with its own name.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable

from twisted.internet.interfaces import IDelayedCall, IReactorTime

from sbus.errors import CloseReason
from sbus.flood import Signature
from sbus.protocol import controls
from sbus.protocol.keys import PeerCredentials
from sbus.protocol.notices import parse_sender
from sbus.server.core.interfaces import Client, Receiver
from sbus.server.core.limits import MAX_REPLIES
from sbus.syscalls.users import is_owner

__all__ = ["FORMER", "PATIENCE", "Upstream"]

PATIENCE = 1.0
"""Seconds that a reply to ``whoami`` waits for the master's word about subscriptions."""
FORMER = 16
"""Former names of the link that keep their meaning."""
LONGEST_PATH = 16_384
"""Bytes of the list of buses above: some hundred buses."""

_SECRET = b"/!/cred/"
_RETRY = 1.0
"""Seconds until a client that reads slowly is reminded of a path that has changed."""


class Upstream:
    """The link of one bus, and its reports.

    :param clock: for time-outs.
    :param flush: sends the packets that were queued for clients.
    :param forget_routes: called when keys get another meaning.
    :param rename: called when the names of all clients have changed.
    :param miss: notifies the receivers of a key of losses; called with the link, the key, messages and bytes.
    :param number_of: returns the number of the change by which a link learns of a pattern
        (`sbus.server.asks.pattern_lists.PatternLists.number_of`).
    :param owner_of: returns the UID that a UID counts as, where users share something; by default each is its own.
    :ivar identity: identifies the bus.
    :ivar name: the name of the bus, for people.
    :ivar secrets_go_up: whether secret keys that are not of this bus are for the link.
    :ivar link: the client that is the link, from its first word on.
    :ivar is_up: whether the link carries messages.
    :ivar has_link: whether there has been a link since the start of the server.
    :ivar lost: messages that the links of this bus have lost on the way up and on the way down.
    :ivar dropped_secrets: secret messages that were dropped because there was no link.
    """

    def __init__(
        self,
        clock: IReactorTime,
        *,
        name: str,
        secrets_go_up: bool,
        flush: Callable[[], None],
        forget_routes: Callable[[], None],
        rename: Callable[[], None],
        miss: Callable[[Client, bytes, int, int], None],
        number_of: Callable[[Client, bytes], int],
        owner_of: Callable[[int], int] | None = None,
    ) -> None:
        self.identity = secrets.token_hex(16)
        self.name = "".join(c if c.isprintable() else "?" for c in name)
        self.secrets_go_up = secrets_go_up
        self.link: Client | None = None
        self.is_up = self.has_link = False
        self.lost = (0, 0)
        self._lost_before = (0, 0)
        self.dropped_secrets = 0
        self._clock = clock
        self._flush = flush
        self._forget_routes = forget_routes
        self._rename = rename
        self._miss = miss
        self._number_of = number_of
        self._owner_of = owner_of
        self._prefix: bytes | None = None
        self._former: deque[bytes] = deque(maxlen=FORMER)
        self._above = b""
        self._watchers: dict[Client, bool] = {}
        self._named: dict[Client, bytes] = {}
        self._confirmed = 0
        self._is_bridge = False
        self._fresh: dict[Receiver, dict[bytes, int]] = {}
        self._holding: dict[Client, deque[tuple[int, float]]] = {}
        self._timer: IDelayedCall | None = None
        self._path_timer: IDelayedCall | None = None

    # --- names and keys ----------------------------------------------------------------------

    @property
    def is_chained(self) -> bool:
        """Whether some secret keys have another meaning than on a bus without a master."""
        return self._prefix is not None or self.secrets_go_up

    def name_of(self, peer: PeerCredentials) -> bytes:
        """Return the name of a client of this bus."""
        own = b"!/cred/%d/%d/%d" % (peer.gid, peer.uid, peer.pid)
        return b"%b/%b" % (self._prefix, own) if self._prefix else own

    def signature_of(self, client: Client) -> Signature:
        """Return the signature of a client of this bus, with its name in the tree."""
        return Signature(client.number, client.peer, self._prefix or b"", client.user.uid)

    def local(self, key: bytes) -> bytes:
        """Return the meaning of a key or a pattern on this bus: the same without P, if it begins with P."""
        if key.startswith(b"!/"):
            for prefix in (self._prefix, *self._former):
                if prefix and key.startswith(prefix + _SECRET):
                    return key[len(prefix) + 1 :]
        return key

    def receivers(self, key: bytes, look_up: Callable[[bytes], tuple[Receiver, ...]]) -> tuple[Receiver, ...] | None:
        """Return the receivers of a secret key, if they are not those that the key has on any bus; else None."""
        local = self.local(key)
        if local is not key:
            return look_up(local)
        if not self.secrets_go_up or self._prefix == b"":
            return None
        if not self.is_up or self.link is None or (self._prefix and key.startswith(self._prefix + b"/")):
            return ()
        return (self.link,)

    def count_secret(self, key: bytes) -> None:
        """Count a secret message that has no receivers: it is dropped if it is for the link, and there is none."""
        if not (self.is_up and self.link is not None) and self.local(key) is key:
            self.dropped_secrets += 1

    # --- replies that wait -------------------------------------------------------------------

    def whoami(self, client: Client) -> None:
        """Send a client its name, as soon as its subscriptions are in force above."""
        fence = max(self._fresh.get(client, {}).values(), default=0)
        if client not in self._holding and not self._must_wait(client, fence):
            client.reply(controls.WHOAMI, self.name_of(client.peer))
            return
        client.hold_replies()
        self._holding.setdefault(client, deque()).append((fence, self._clock.seconds() + PATIENCE))
        self._set_timer()

    def subscribed(self, receiver: Receiver, pattern: bytes) -> None:
        """Note a new subscription to an open pattern, while there is a link."""
        if self.link is not None and receiver is not self.link and not self._is_bridge:
            number = self._number_of(self.link, pattern)
            if number > self._confirmed:
                self._fresh.setdefault(receiver, {})[pattern] = number

    def unsubscribed(self, receiver: Receiver, pattern: bytes) -> None:
        """Forget a subscription."""
        if self._fresh:
            fresh = self._fresh.get(receiver)
            if fresh is not None and fresh.pop(pattern, 0) and not fresh:
                del self._fresh[receiver]

    def _must_wait(self, client: Client, fence: int) -> bool:
        if client is self.link:
            return False
        if self.secrets_go_up and self._prefix is None:
            return True
        return self.is_up and fence > self._confirmed

    def _release(self) -> None:
        """Send the replies that no longer have to wait."""
        now = self._clock.seconds()
        for client, holds in tuple(self._holding.items()):
            is_late = False
            while holds:
                fence, deadline = holds[0]
                is_late = is_late or deadline <= now
                if self._must_wait(client, 0 if is_late else fence):
                    break
                holds.popleft()
                is_late = False
                client.release_reply(controls.WHOAMI, self.name_of(client.peer))
            if not holds:
                self._holding.pop(client, None)
        self._set_timer()
        self._flush()

    def stop_waiting(self, client: Client) -> None:
        """Send a client its replies now, as its subscriptions end; without P there is no answer to send."""
        if not self._must_wait(client, 0):
            for _ in self._holding.pop(client, ()):
                client.release_reply(controls.WHOAMI, self.name_of(client.peer))

    def _set_timer(self) -> None:
        if self._timer is None and self._holding and not (self.secrets_go_up and self._prefix is None):
            first = min(holds[0][1] for holds in self._holding.values())
            self._timer = self._clock.callLater(max(0.001, first - self._clock.seconds()), self._time_is_up)

    def _time_is_up(self) -> None:
        self._timer = None
        self._release()

    # --- messages of the link ----------------------------------------------------------------

    def handle(self, client: Client, key: bytes, payload: bytes | None) -> bool:
        """Handle a control message of a link, or a question about the path.

        :returns: False if the message is unknown to this client.
        """
        is_trusted = is_owner(client.peer.uid)
        if key == controls.LINK_PATH and (payload is None or (client is not self.link and not is_trusted)):
            self._watchers[client] = True
            client.reply(controls.LINK_PATH, self.path)
            return True
        if not is_trusted:
            return False
        if key == controls.LINK_SENDER:
            return self._name(client, payload)
        if key == controls.LINK_GAP:
            messages, size, lost_key = [*(payload or b"").split(b" ", 2), b"", b"", b""][:3]
            if lost_key and _number(messages):
                self._miss(client, lost_key, _number(messages), _number(size))
            return True
        if key == controls.LINK_LOST and payload is None:
            client.share_queue()
            return True
        if self.link is None and key in (controls.LINK_PATH, controls.LINK_UP):
            self.link = client
            self.has_link = True
            self._is_bridge = False
            self._lost_before = self.lost
        elif client is not self.link:
            if key in (controls.LINK_PATH, controls.LINK_UP):
                client.close(CloseReason.SECOND_LINK)
                return True
            return False
        if key == controls.LINK_PATH:
            self._set_path(payload or b"")
        elif key == controls.LINK_UP:
            self._is_bridge = payload is None
            if payload is None:
                self.is_up = True
                self._fresh.clear()
            else:
                self._up(payload)
        elif key == controls.LINK_DOWN:
            self._down()
        elif key == controls.LINK_FENCE:
            self._confirm(_number(payload))
        elif key == controls.LINK_LOST:
            up, _, down = (payload or b"").partition(b" ")
            self.lost = (self._lost_before[0] + _number(up), self._lost_before[1] + _number(down))
        return True

    def _name(self, link: Client, payload: bytes | None) -> bool:
        """Make the named publisher the author of the link's next messages; without a valid name, the link itself."""
        named = parse_sender(payload) if payload else None
        if named is not None:
            link.signature = Signature.vouched(*named, self._owner_of)
            return True
        link.signature = self.signature_of(link)
        return not payload

    def _up(self, prefix: bytes) -> None:
        self.is_up = True
        if prefix != self._prefix:
            if self._prefix:
                self._former.append(self._prefix)
            if prefix in self._former:
                self._former.remove(prefix)
            self._prefix = prefix
            self._forget_routes()
            self._rename()
            for client, known in self._named.items():
                name = self.name_of(client.peer)
                if name != known:
                    self._named[client] = name
                    client.notify(controls.CHAIN, name)
        self._release()

    def _down(self) -> None:
        self.is_up = False
        self._fresh.clear()
        self._release()

    def _confirm(self, number: int) -> None:
        self._confirmed = max(self._confirmed, number)
        for receiver, fresh in tuple(self._fresh.items()):
            for pattern in [each for each, at in fresh.items() if at <= number]:
                del fresh[pattern]
            if not fresh:
                del self._fresh[receiver]
        self._release()

    # --- path and names, for clients that have asked -----------------------------------------

    @property
    def path(self) -> bytes:
        """The buses up to the root: a line for each, with its identifier and its name."""
        own = f"{self.identity} {self.name}".encode()
        return own + b"\n" + self._above if self._above else own

    def _set_path(self, above: bytes) -> None:
        above = above[:LONGEST_PATH]
        if above != self._above:
            self._above = above
            self._watchers = dict.fromkeys(self._watchers, False)
            self._tell_path()

    def _tell_path(self) -> None:
        for client, knows in self._watchers.items():
            if not knows and client.waiting_replies < MAX_REPLIES:
                self._watchers[client] = True
                client.notify(controls.LINK_PATH, self.path)
        if not all(self._watchers.values()) and self._path_timer is None:
            self._path_timer = self._clock.callLater(_RETRY, self._tell_path_again)
        self._flush()

    def _tell_path_again(self) -> None:
        self._path_timer = None
        self._tell_path()

    def observe_name(self, client: Client, wants: bool) -> None:
        """Send a client its name whenever it changes, or stop doing so."""
        if wants:
            self._named[client] = self.name_of(client.peer)
        else:
            self._named.pop(client, None)

    def forget(self, client: Receiver) -> None:
        """Forget a client that has disconnected, or stopped reading."""
        self._watchers.pop(client, None)  # type: ignore[call-overload]
        self._named.pop(client, None)  # type: ignore[call-overload]
        self._holding.pop(client, None)  # type: ignore[call-overload]
        self._fresh.pop(client, None)
        if client is self.link:
            self.link = None
            self._set_path(b"")
            self._down()


def _number(text: bytes | None) -> int:
    return int(text) if text and text.isdigit() and len(text) < 20 else 0
