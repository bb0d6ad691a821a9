"""Requests: the control messages that are not choices, and their answers.

Protocol: "Who am I?", "Interest", "Last values", "Links".
"""

from __future__ import annotations

from collections.abc import Callable

from sbus.errors import Violation, ViolationReason
from sbus.protocol import controls
from sbus.protocol.keys import Dialect
from sbus.protocol.packets import CMSG, build
from sbus.protocol.patterns import pattern_cost
from sbus.server.asks.interest import Interest, watch_memory
from sbus.server.asks.last_values import LastValues
from sbus.server.asks.pattern_lists import PatternLists
from sbus.server.asks.upstream import Upstream
from sbus.server.core.interfaces import Client
from sbus.server.core.limits import Limits
from sbus.server.core.users import User
from sbus.syscalls.users import is_owner

__all__ = ["Requests"]


class Requests:
    """Answers requests.

    :param last_values: None if the bus keeps none.
    :param subscribe: subscribes a client whose user has room for this much more memory besides.
    :param check_user_patterns: makes room for one more watch of a user; raises a `Violation` if there is none.
    :param enlist: called with a client that connects buses.
    :param upstream: handles the control messages of links.
    :param public_interest: whether all users may ask about interest; else only root and the server's user.
    """

    def __init__(
        self,
        interest: Interest,
        pattern_lists: PatternLists,
        last_values: LastValues | None,
        subscribe: Callable[[Client, bytes, int], None],
        check_user_patterns: Callable[[User], None],
        enlist: Callable[[Client], None],
        limits: Limits,
        dialect: Dialect,
        upstream: Upstream,
        *,
        public_interest: bool,
    ) -> None:
        self._interest = interest
        self._pattern_lists = pattern_lists
        self._last_values = last_values
        self._subscribe = subscribe
        self._check_user_patterns = check_user_patterns
        self._enlist = enlist
        self._limits = limits
        self._dialect = dialect
        self._public_interest = public_interest
        self._upstream = upstream
        self._handlers: dict[bytes, Callable[[Client, bytes | None], bool]] = {
            controls.WHOAMI: self._whoami,
            controls.INTEREST_ON: self._watch,
            controls.INTEREST_OFF: self._unwatch,
            controls.PROBE: self._probe,
            controls.LAST: self._last,
            controls.INTEREST_PATTERNS: self._list_patterns,
        }

    def handle(self, client: Client, key: bytes, payload: bytes | None) -> bool:
        """Answer a request.

        :param payload: the bytes after the NUL; None without a NUL.
        :returns: False if the request is unknown to this client.
        :raises Violation: if the client broke a rule with it.
        """
        handler = self._handlers.get(key)
        if handler is None:
            return key in _LINK and self._upstream.handle(client, key, payload)
        return handler(client, payload)

    def _whoami(self, client: Client, _: bytes | None) -> bool:
        if not client.is_write_closed:
            self._upstream.whoami(client)
        return True

    def _watch(self, client: Client, key: bytes | None) -> bool:
        if key is None or not self._may_ask(client):
            return False
        if self._interest.find(client, key) is None:
            cost = pattern_cost(key, self._dialect.separator)
            if len(client.patterns) + self._interest.count(client) >= self._limits.max_patterns:
                raise Violation(ViolationReason.TOO_MANY_PATTERNS)
            if client.pattern_bytes + cost > self._limits.max_pattern_bytes:
                raise Violation(ViolationReason.TOO_MANY_PATTERN_BYTES)
            self._check_user_patterns(client.user)
            if not client.user.may_hold(watch_memory(key, self._dialect.separator)):
                raise Violation(ViolationReason.USER_MEMORY)
        watch = self._interest.watch(client, key)
        watch.sent = watch.value
        client.reply(controls.INTEREST, b"%d %b" % (watch.value, key))
        return True

    def _unwatch(self, client: Client, key: bytes | None) -> bool:
        if not self._may_ask(client):
            return False
        if key is None:
            self._interest.unwatch_all(client)
            client.reply(controls.INTEREST_OFF, b"")
        else:
            client.reply(controls.INTEREST, b"%d %b" % (self._interest.unwatch(client, key), key))
        return True

    def _probe(self, client: Client, key: bytes | None) -> bool:
        if key is None or not self._may_ask(client):
            return False
        count = self._interest.probe(client, key)
        client.reply(controls.PROBE, b"%d %b" % (count if is_owner(client.peer.uid) else min(count, 1), key))
        return True

    def _list_patterns(self, client: Client, payload: bytes | None) -> bool:
        if not is_owner(client.peer.uid):
            return False
        self._enlist(client)
        self._pattern_lists.start(client)
        return True

    def _last(self, client: Client, pattern: bytes | None) -> bool:
        if pattern is None:
            return False
        values = None if self._dialect.is_secret(pattern) else self._last_values
        self._subscribe(client, pattern, 0 if values is None else values.snapshot_memory)
        if values is None:
            client.reply(controls.LAST_DONE, pattern)
        else:
            done = build(CMSG, controls.LAST_DONE, pattern)
            client.send_snapshot(*values.snapshot(client, pattern, done))
        return True

    def _may_ask(self, client: Client) -> bool:
        return self._public_interest or is_owner(client.peer.uid)


_LINK = frozenset(
    (
        controls.LINK_UP,
        controls.LINK_DOWN,
        controls.LINK_FENCE,
        controls.LINK_PATH,
        controls.LINK_LOST,
        controls.LINK_GAP,
        controls.LINK_SENDER,
    )
)
