"""Denials: who gets the error, and that both ends agree on the subscriptions afterwards."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sbus.client.core import ClientCore, Message
from sbus.client.denials import Denial, DenialLog, raise_denied
from sbus.client.extensions import Extensions
from sbus.errors import NotAllowed, UsageError
from sbus.protocol.notices import LONGEST_DENIED, SEVERAL
from tests.support.examples import examples
from tests.unit.client.fakes import Waiter

WHOAMI = b"CMSG !/cred/whoami"
NAME = WHOAMI + b"\0!/cred/1/2/3"


class Sink:
    """A subscription.

    :ivar error: what has ended it.
    """

    pattern = b""

    def __init__(self, callback: Any = None) -> None:
        self.callback = callback
        self.messages: list[Message] = []
        self.error: NotAllowed | None = None

    def begin(self) -> None:
        """Do nothing: no messages of others are kept."""

    def deliver(self, messages: list[Message]) -> None:
        assert self.error is None
        self.messages += messages


class Asking:
    """A client that asks for denials.

    :ivar sent: the packets that it has sent since the last `take`.
    :ivar denials: what ``on_denied`` got.
    """

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.denials: list[Denial] = []
        self.core = ClientCore(on_denied=self.denials.append, refuse=self._refuse)
        self.sent += self.core.resync_packets()

    def _refuse(self, sink: Any, error: NotAllowed) -> bool:
        self.sent += self.core.unsubscribe(sink)
        sink.error = error
        return sink.callback is None

    @property
    def requests(self) -> Any:
        return self.core.extensions.denials

    def subscribe(self, pattern: bytes, callback: Any = None, **options: bool) -> Sink:
        sink = Sink(callback)
        self.sent += self.core.subscribe(pattern, sink, **options)
        return sink

    def take(self) -> list[bytes]:
        sent, self.sent = self.sent, []
        return sent

    def receive(self, *packets: bytes) -> None:
        self.core.receive(list(packets))


# --- requests ------------------------------------------------------------------------------------


def test_a_request_gets_the_denial_of_its_key() -> None:
    """The oldest request with the key that the server may not have handled fails; others and messages are left."""
    client, waiters = Asking(), [Waiter() for _ in range(4)]
    for key, waiter in zip((b"a", b"b", b"b", b"c"), waiters, strict=True):
        client.requests.expect(key, waiter)
    client.requests.settle(waiters[1])
    client.receive(b"CMSG denied\0MSG b some.rule", b"CMSG denied\0MSG b some.rule")
    assert [len(waiter.outcomes) for waiter in waiters] == [0, 0, 1, 0]
    error = waiters[2].outcomes[0]
    assert (error.verb, error.key, error.rule) == (b"MSG", b"b", "some.rule")
    assert client.denials == [Denial(b"MSG", b"b", "some.rule")]


def test_long_keys_are_cut() -> None:
    """A request and a subscription whose keys the server cuts get their denials, and no other subscription does."""
    client, waiter, long = Asking(), Waiter(), b"k" * (LONGEST_DENIED + 5)
    cut = long[:LONGEST_DENIED]
    client.requests.expect(long, waiter)
    sink, other = client.subscribe(long, last=True), client.subscribe(cut[:-1])
    client.receive(b"CMSG denied\0MSG %b r" % cut, *[b"CMSG denied\0SUB %b r" % cut] * 2)
    assert len(waiter.outcomes) == 1
    assert sink.error is not None
    assert other.error is None
    assert client.denials == []


def test_keys_with_spaces() -> None:
    """The rule begins behind the last space, so a key may have some."""
    client, waiter = Asking(), Waiter()
    client.requests.expect(b"a key ", waiter)
    client.receive(b"CMSG denied\0MSG a key  rule")
    assert [str(error.key) for error in waiter.outcomes] == [str(b"a key ")]


def test_a_sum_concerns_no_call() -> None:
    """What the server sums up fails no request and no subscription; ``on_denied`` gets the number."""
    client, waiter = Asking(), Waiter()
    client.requests.expect(b"k", waiter)
    sink = client.subscribe(b"k")
    client.receive(b"CMSG denied\0several 12")
    assert client.denials == [Denial(SEVERAL, b"", "", 12)]
    assert (waiter.outcomes, sink.error) == ([], None)


# --- subscriptions -------------------------------------------------------------------------------


def test_every_subscription_with_the_pattern_ends() -> None:
    """They share one at the server, which has dropped it. One with a callback raises nothing: ``on_denied`` is told."""
    client = Asking()
    one, two, other = client.subscribe(b"k"), client.subscribe(b"k"), client.subscribe(b"k/")
    client.receive(b"CMSG denied\0SUB k r")
    assert one.error is not None
    assert two.error is not None
    assert (other.error, client.denials) == (None, [])
    assert list(client.core.sinks()) == [other]
    client.subscribe(b"k/", lambda message: None)
    client.receive(b"CMSG denied\0SUB k/ r")
    assert other.error is not None
    assert client.denials == [Denial(b"SUB", b"k/", "r")]
    assert client.core.resync_packets() == [b"CMSG denied/on"]


def test_both_ends_agree_after_a_late_denial() -> None:
    """If the denial was about a subscription that has ended here, the newer one ends at the server too."""
    client = Asking()
    first = client.subscribe(b"k")
    client.sent += client.core.unsubscribe(first)
    client.subscribe(b"k")
    client.take()
    client.receive(b"CMSG denied\0SUB k r")
    assert client.take() == [b"UNSUB k"]


def test_a_denial_of_nothing_that_is_here() -> None:
    """A denial of a pattern without a subscription, as of one that has been closed, is reported."""
    client = Asking()
    client.receive(b"CMSG denied\0SUB k r")
    assert client.denials == [Denial(b"SUB", b"k", "r")]


def test_a_snapshot_that_is_refused() -> None:
    """The server refuses ``last`` and ``SUB``, which is reported once; other subscriptions miss nothing meanwhile."""
    client = Asking()
    wide, sink = client.subscribe(b""), client.subscribe(b"k/", last=True)
    client.receive(b"CMSG bye/on\0", b"CMSG denied\0SUB k/ r", b"MSG k/a\0live", b"CMSG denied\0SUB k/ r", NAME)
    assert [message.payload for message in wide.messages] == [b"live"]
    assert sink.error is not None
    assert client.denials == []
    client.receive(b"CMSG denied\0SUB k/ r")
    assert client.denials == [Denial(b"SUB", b"k/", "r")]


# --- asking --------------------------------------------------------------------------------------


def test_it_is_asked_for_on_every_connection() -> None:
    """The question is among the first packets, before the subscriptions; its answer is an extension's."""
    client = Asking()
    client.subscribe(b"k")
    client.receive(b"CMSG denied/on\0")
    assert client.core.extensions.answered == {"denied"}
    client.core.disconnected()
    client.core.connected(1000)
    assert client.core.resync_packets() == [b"CMSG denied/on", b"SUB k"]
    assert client.core.extensions.answered == set()


def test_a_server_that_does_not_know_it() -> None:
    """The next ``whoami`` of an older server is answered as ever."""
    client, waiter = Asking(), Waiter()
    client.core.whoami(waiter)
    client.receive(NAME)
    assert waiter.outcomes == [b"!/cred/1/2/3"]


def test_the_library_asks_itself() -> None:
    """An application that sends the question is told what to do instead."""
    with pytest.raises(UsageError, match="on_denied"):
        Asking().core.control("denied/off")


@pytest.mark.parametrize("payload", [b"", b"MSG", b"MSG k", b"several", b"several x", b"several -1"])
def test_malformed_denials(payload: bytes) -> None:
    """What is no denial goes to ``on_control``, as every unknown control message."""
    reported: list[tuple[bytes, bytes]] = []
    core = ClientCore(on_control=lambda *control: reported.append(control), on_denied=lambda denial: None)
    core.receive([b"CMSG denied\0" + payload])
    assert reported == [(b"denied", payload)]


def test_without_the_question_denials_are_unknown() -> None:
    """A client that has not asked passes them on."""
    reported: list[tuple[bytes, bytes]] = []
    ClientCore(on_control=lambda *control: reported.append(control)).receive([b"CMSG denied\0MSG k r"])
    assert reported == [(b"denied", b"MSG k r")]


# --- what people read ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "rule", "parts"),
    [
        (b"MSG", "sensors", ["may not publish 'k/x y'", "(rule: sensors)", "sbus policy explain --user"]),
        (b"SUB", "default", ["may not subscribe to", "no rule of the policy allows it", "subscribe 'k/x y'"]),
        (b"MSG", "closed", ["the key is closed", "publish 'k/x y'"]),
        (b"SUB", "closed", ["it matches closed keys, and no rule allows all of it", "subscribe 'k/x y'"]),
        (b"SUB", "secret", ["only the client with that name", "whoami"]),
        (b"SUB", "credentials", ["a plug-in of the server refuses it"]),
    ],
)
def test_text_of_the_error(verb: bytes, rule: str, parts: list[str]) -> None:
    """It is one line that says what, by which rule, and whom to ask; the error survives pickling."""
    error = NotAllowed(verb, b"k/x y", rule)
    for part in parts:
        assert part in str(error)
    assert "\n" not in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (again.verb, again.key, again.rule, str(again)) == (verb, b"k/x y", rule, str(error))


def test_each_key_is_logged_once() -> None:
    """A message that is refused a thousand times is one line, and the lines have an end."""
    lines: list[str] = []
    log = DenialLog(lines.append)
    for _ in range(1000):
        log.add(Denial(b"MSG", b"k", "r"))
    assert len(lines) == 1
    log.add(Denial(SEVERAL, b"", "", 5))
    assert "has refused more than it lists: 5" in lines[1]
    for number in range(1000):
        log.add(Denial(b"MSG", b"%d" % number, "r"))
    assert len(lines) == 65
    assert "on_denied=" in lines[-1]


def test_raising_denials() -> None:
    """For programs that end with the first denial; a sum comes behind others, and raises nothing."""
    with pytest.raises(NotAllowed):
        raise_denied(Denial(b"MSG", b"k", "r"))
    raise_denied(Denial(SEVERAL, b"", "", 5))


# --- the property --------------------------------------------------------------------------------

PATTERNS = [b"a"]  # what happens to one says all, and interesting histories are found sooner


class Refusing(RuleBasedStateMachine):
    """A client and a server whose policy changes at any moment; packets wait in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.client = Asking()
        self.forbidden: set[bytes] = set()
        self.at_server: list[bytes] = []
        self.to_client: list[bytes] = []
        self.sinks: list[Sink] = []
        self.closed: set[Sink] = set()
        self.requests: list[Waiter] = []

    @rule(pattern=st.sampled_from(PATTERNS), last=st.booleans())
    def subscribe(self, pattern: bytes, last: bool) -> None:
        self.sinks.append(self.client.subscribe(pattern, last=last))

    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        if self.sinks:
            sink = data.draw(st.sampled_from(self.sinks))
            self.closed.add(sink)
            self.client.sent += self.client.core.unsubscribe(sink)

    @rule(key=st.sampled_from(PATTERNS))
    def publish(self, key: bytes) -> None:
        self.client.sent.append(self.client.core.publish(key, b""))

    @rule(key=st.sampled_from(PATTERNS))
    def request(self, key: bytes) -> None:
        """A request, whose answer to the question behind it settles it."""
        waiter = Waiter()
        self.requests.append(waiter)
        self.client.requests.expect(key, waiter)
        self.client.sent += [self.client.core.publish(key, b"request %d" % len(self.requests)), WHOAMI]
        extensions: Extensions = self.client.core.extensions

        class Settling(Waiter):
            def set_result(self, value: bytes) -> None:
                extensions.denials.settle(waiter)
                if not waiter.outcomes:
                    waiter.set_result(b"handled")

        extensions.questions.ask(WHOAMI[len(b"CMSG ") :], b"", Settling())

    @rule(pattern=st.sampled_from(PATTERNS))
    def reload(self, pattern: bytes) -> None:
        """Forbid a pattern, which revokes subscriptions, or allow it again."""
        self.forbidden ^= {pattern}
        if pattern in self.forbidden and pattern in self.at_server:
            self.at_server = [each for each in self.at_server if each != pattern]
            self.to_client.append(b"CMSG denied\0SUB %b r" % pattern)

    @rule()
    def serve(self) -> None:
        """Let the server handle what the client has sent."""
        for packet in self.client.take():
            verb, _, key = packet.partition(b"\0")[0].partition(b" ")
            if packet.startswith(b"CMSG last\0"):
                verb, key = b"last", packet.partition(b"\0")[2]
            if verb in (b"SUB", b"last"):
                if key in self.forbidden:
                    self.to_client.append(b"CMSG denied\0SUB %b r" % key)
                else:
                    self.at_server.append(key)
                    if verb == b"last":
                        self.to_client.append(b"CMSG last/done\0" + key)
            elif verb == b"UNSUB":
                if key in self.at_server:
                    self.at_server.remove(key)
            elif verb == b"MSG":
                if key in self.forbidden:
                    self.to_client.append(b"CMSG denied\0MSG %b r" % key)
            elif packet == WHOAMI:
                self.to_client.append(NAME)
            elif packet.endswith(b"/on"):
                self.to_client.append(packet + b"\0")

    @rule()
    def deliver(self) -> None:
        """Let the client handle what the server has sent."""
        packets, self.to_client = self.to_client, []
        self.client.receive(*packets)

    @invariant()
    def nobody_waits_for_ever(self) -> None:
        """When nothing is on its way, every open subscription is at the server, and every request has its outcome."""
        if self.client.sent or self.to_client:
            return
        waiting = {sink.pattern for sink in self.sinks if sink.error is None and sink not in self.closed}
        assert set(self.at_server) == waiting
        assert not waiting & self.forbidden
        assert all(len(waiter.outcomes) == 1 for waiter in self.requests)

    @initialize()
    def begin(self) -> None:
        self.serve()
        self.deliver()


Refusing.TestCase.settings = settings(max_examples=examples(400), stateful_step_count=50, deadline=None)
TestRefusing = Refusing.TestCase
