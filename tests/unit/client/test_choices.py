"""A client's choices survive a reconnect: a new server ends up knowing what the old one knew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sbus.client.choices import Choices
from sbus.client.core import _OWN_CONTROLS, ClientCore, Message
from sbus.client.watches import Watch
from sbus.protocol.controls import BUNDLE_OFF, BUNDLE_ON, CONTROLS, WHOAMI, group_of
from tests.support.examples import examples


class Sink:
    """A subscription that drops its messages."""

    pattern = b""
    callback: Callable[[Message], object] | None = None

    def begin(self) -> None:
        """Do nothing: no messages of others are kept."""

    def deliver(self, messages: list[Message]) -> None:
        """See `sbus.client.core.Sink`."""


class Server:
    """What a server knows of one client, by the wording of the protocol and without the table.

    :ivar settings: the newest key of each group.
    :ivar direction: the newest of order/queue and order/stack, which order/random keeps.
    :ivar patterns: subscriptions with their counts.
    :ivar watched: the keys whose subscribers it reports.
    """

    def __init__(self) -> None:
        self.settings = {
            b"blocking/soft": b"blocking/soft/queue",
            b"blocking/hard": b"blocking/hard/discard",
            b"order": b"order/queue",
            b"echo": b"echo/on",
            b"bundle": b"bundle/off",
            b"bye": b"bye/off",
            b"receipts": b"receipts/off",
            b"sender": b"sender/off",
        }
        self.direction = b"order/queue"
        self.patterns: dict[bytes, int] = {}
        self.watched: set[bytes] = set()

    def handle(self, packet: bytes) -> None:
        """Handle a packet of the client."""
        verb, _, rest = packet.partition(b" ")
        if verb == b"SUB":
            self.patterns[rest] = self.patterns.get(rest, 0) + 1
        elif verb == b"UNSUB":
            self.patterns[rest] -= 1
            if not self.patterns[rest]:
                del self.patterns[rest]
        elif verb == b"CMSG":
            key, _, payload = rest.partition(b"\0")
            if key == b"last":
                self.patterns[payload] = self.patterns.get(payload, 0) + 1
            elif key == b"interest/on":
                self.watched.add(payload)
            elif key == b"interest/off":
                self.watched.discard(payload)
            group = key.rpartition(b"/")[0]
            if group in self.settings:
                self.settings[group] = key
            if key in (b"order/queue", b"order/stack", b"order/acme"):
                self.direction = key

    def knows(self) -> tuple[dict[bytes, bytes], bytes, set[bytes], set[bytes]]:
        """Return all that the server keeps for the client, but for the counts, which `patterns` has."""
        return self.settings, self.direction, set(self.patterns), self.watched


PLUGINS = (b"blocking/soft/acme", b"blocking/hard/acme", b"order/acme")
OTHERS = (b"other/thing", b"nothing")
BUILT_IN = [control.key for control in CONTROLS if control.key.partition(b"/")[0] not in _OWN_CONTROLS]
keys = st.sampled_from([*BUILT_IN, *PLUGINS, *OTHERS])


class Reconnecting(RuleBasedStateMachine):
    """A client that makes choices on one connection, beside a new connection that only gets the resync packets."""

    def __init__(self) -> None:
        super().__init__()
        self.core = ClientCore(bundles=True, bye=True, on_lost=lambda lost: None)
        self.server = Server()
        for packet in self.core.resync_packets():
            self.server.handle(packet)
        self.sinks: list[Sink] = []
        self.watches: list[Watch] = []

    @rule(key=keys)
    def set(self, key: bytes) -> None:
        """Send a control message."""
        self.server.handle(self.core.control(key))

    @rule(pattern=st.sampled_from([b"", b"a", b"a/*", b"b/"]), last=st.booleans(), sender=st.booleans())
    def subscribe(self, pattern: bytes, last: bool, sender: bool) -> None:
        """Subscribe, perhaps to a pattern that has a subscription already."""
        self.sinks.append(Sink())
        for packet in self.core.subscribe(pattern, self.sinks[-1], last=last, sender=sender):
            self.server.handle(packet)

    @rule(key=st.sampled_from([b"", b"a", b"a/*"]))
    def watch(self, key: bytes) -> None:
        """Watch a key, perhaps one that is watched already."""
        self.watches.append(Watch(key))
        for packet in self.core.watch(self.watches[-1]):
            self.server.handle(packet)

    @rule(data=st.data())
    def unwatch(self, data: st.DataObject) -> None:
        """End a watch, or one that has ended."""
        if self.watches:
            for packet in self.core.extensions.unwatch(data.draw(st.sampled_from(self.watches))):
                self.server.handle(packet)

    @rule(data=st.data())
    def unsubscribe(self, data: st.DataObject) -> None:
        """End one of the subscriptions, or one that has ended."""
        if self.sinks:
            for packet in self.core.unsubscribe(data.draw(st.sampled_from(self.sinks))):
                self.server.handle(packet)

    @rule()
    def reconnect(self) -> None:
        """Lose the connection; the choices stay."""
        before = self.core.state()
        self.core.disconnected()
        assert self.core.state() == before
        self.server = Server()
        for packet in self.core.resync_packets():
            self.server.handle(packet)

    @invariant()
    def a_new_server_learns_the_same(self) -> None:
        """The resync packets lead a new server to the state of the old one."""
        new = Server()
        for packet in self.core.state().packets():
            new.handle(packet)
        assert new.knows() == self.server.knows()

    @invariant()
    def counts_are_those_of_the_subscriptions(self) -> None:
        """The snapshot counts the subscriptions that have not ended."""
        assert sum(count for _, count in self.core.state().patterns) == len(list(self.core.sinks()))


TestReconnecting = Reconnecting.TestCase
TestReconnecting.settings = settings(max_examples=examples(50), stateful_step_count=30)


def test_every_field_is_sent() -> None:
    """A field that `packets` ignores would be lost with the connection: a new field needs an example here."""
    subscribed = Choices(patterns=((b"a", 1),))
    examples = {
        "controls": Choices(controls=(b"echo/off",)),
        "watched": Choices(watched=(b"a",)),
        "patterns": subscribed,
        "last": replace(subscribed, last=(b"a",)),
    }
    assert examples.keys() == {field.name for field in fields(Choices)}
    without = {"last": subscribed.packets()}
    assert all(example.packets() != without.get(name, []) for name, example in examples.items())


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.key.decode())
def test_table_says_what_is_repeated(control) -> None:
    """A repeated control message is in force after it was chosen; another one never is."""
    chosen = Choices().with_control(control.key)
    assert chosen.controls == ((control.key,) if control.repeated else ())
    assert group_of(control.key) == control.group


def test_a_question_is_not_repeated() -> None:
    """A client does not repeat ``whoami`` after reconnecting, because it is a question, not a choice."""
    assert Choices().with_control(WHOAMI) == Choices()


def test_message_that_is_not_repeated_ends_the_choice_of_its_group() -> None:
    """bundle/off leaves nothing of bundle/on to repeat."""
    assert Choices().with_control(BUNDLE_ON).with_control(BUNDLE_OFF) == Choices()


def test_refinement_keeps_the_direction() -> None:
    """order/random stands behind the direction chosen before it, until a new direction replaces both."""
    stack = Choices().with_control(b"order/stack").with_control(b"order/random")
    assert stack.controls == (b"order/stack", b"order/random")
    assert stack.with_control(b"order/random") == stack
    assert stack.with_control(b"order/queue").controls == (b"order/queue",)


def test_strategies_of_plugins_are_repeated() -> None:
    """A key without a row counts if its group has rows, and replaces the choice of that group."""
    chosen = Choices().with_control(b"blocking/soft/block")
    for key in (*PLUGINS, *OTHERS):
        chosen = chosen.with_control(key)
    assert chosen.controls == PLUGINS
