"""The authors of messages that cross a link, between two buses that are scripts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbus.link.core import LinkCore, Side
from sbus.link.wire import Wire
from sbus.protocol import notices
from sbus.protocol.packets import build, parse

BELOW, ABOVE = Side.BELOW, Side.ABOVE
NAME = b"!/cred/1/0/77"
ALICE, BOB = NAME + b"/!/cred/100/1000/501", NAME + b"/!/cred/100/1001/502"
CAROL = b"!/cred/100/1002/503"


class Script(Wire):
    """A link whose buses answer what a test says."""

    def __init__(self, name: bytes = NAME, knows: tuple[bool, bool] = (True, True), grants: bool = True) -> None:
        self.sent: tuple[list[bytes], list[bytes]] = ([], [])
        self.name = name
        self.knows = knows
        self.grants = grants
        self.core = LinkCore(self, [b""], [b""])
        self.connect(BELOW)
        self.connect(ABOVE)

    def connect(self, side: Side) -> None:
        """Connect to one of the buses, which answers all that the link asks."""
        self.core.connected(side)
        done = 0
        while done < len(self.sent[side]):
            done += 1
            self.answer(side, self.sent[side][done - 1])

    def answer(self, side: Side, packet: bytes) -> None:
        verb, key, _ = parse(packet)
        answers = {
            b"!/cred/whoami": self.name,
            b"chain/off": b"",
            b"link/path": b"%032d %b" % (side, (b"leaf", b"root")[side]),
        }
        if self.knows[side]:
            answers[b"sender/on"] = b""
        if self.grants or side is BELOW:
            answers[b"interest/patterns"] = b""
        if verb == b"CMSG" and key in answers:
            self.core.received(side, [build(b"CMSG", key, answers[key])], 0.0)

    def lose(self, side: Side) -> None:
        self.core.disconnected(side)

    def take(self, side: Side) -> list[bytes]:
        """What the link has sent to a bus since the last look, of messages and authors."""
        sent, self.sent[side][:] = list(self.sent[side]), []
        return [packet for packet in sent if packet.startswith((b"MSG a", b"CMSG link/sender"))]

    def bring(self, side: Side, *packets: bytes) -> list[bytes]:
        """What the link sends to the other bus for a batch from one bus."""
        self.core.received(side, list(packets), 0.0)
        return self.take(side.other)

    # --- `Wire` ------------------------------------------------------------------------------

    def send(self, side: Side, packets: list[bytes]) -> None:
        self.sent[side].extend(packets)

    def bundle(self, side: Side, limit: int) -> None: ...
    def limit(self, side: Side, size: int) -> None: ...
    def disconnect(self, side: Side, reason: str, retry: float | None) -> None: ...
    def is_up(self, up: bool, master: str) -> None: ...
    def log(self, text: str) -> None: ...


def by(number: int, credentials: bytes) -> bytes:
    return notices.sender(number, credentials)


def told(number: int, credentials: bytes) -> bytes:
    return b"CMSG link/sender\0%d %b" % (number, credentials)


ITSELF = b"CMSG link/sender\0"
ONE, TWO = b"MSG a\0001", b"MSG a\0002"


def test_notices_are_passed_on_in_front_of_their_messages():
    """Both ways, number and credentials cross as they came, before the messages that they name."""
    link = Script()
    assert link.bring(BELOW, by(5, ALICE), ONE, TWO) == [told(5, ALICE), ONE, TWO]
    assert link.bring(BELOW, ONE) == [ONE]
    assert link.bring(BELOW, ONE, by(6, BOB), TWO) == [ONE, told(6, BOB), TWO]
    assert link.bring(ABOVE, by(5, CAROL), ONE) == [told(5, CAROL), ONE]
    assert link.core.carried == [5, 1]


def test_author_is_told_when_it_changes():
    """A notice that says what the other bus knows is not passed on."""
    link = Script()
    assert link.bring(BELOW, by(5, ALICE), ONE, by(5, ALICE), ONE) == [told(5, ALICE), ONE, ONE]


def test_batch_with_a_run_is_one_list():
    """A run and its notice go to the other bus together; a batch without a notice goes as it is."""
    link = Script()
    calls: list[list[bytes]] = []
    link.send = lambda side, packets: calls.append(packets)  # type: ignore[method-assign]
    batch = [by(5, ALICE), *[ONE] * 100, by(6, BOB), *[TWO] * 100]
    link.core.received(BELOW, batch, 0.0)
    assert [len(call) for call in calls] == [202]
    batch = [ONE] * 64
    link.core.received(BELOW, batch, 0.0)
    assert calls[1] is batch


@pytest.mark.parametrize("credentials", [CAROL, b"!/cred/1/0/78/!/cred/1/1/1", NAME])
def test_link_vouches_upwards_for_clients_below_alone(credentials):
    """Whatever name the bus below gives, its publishers are above those of that bus: never the link, nor others."""
    link = Script()
    assert link.bring(BELOW, by(5, ALICE), ONE) == [told(5, ALICE), ONE]
    assert link.bring(BELOW, by(6, credentials), TWO) == [told(6, NAME + b"/" + credentials), TWO]


def test_program_around_the_bus_below_is_the_link_above():
    """A program without a name is no client: what it publishes is the link's."""
    link = Script()
    assert link.bring(BELOW, by(5, ALICE), ONE, by(0, notices.NOBODY), TWO) == [told(5, ALICE), ONE, ITSELF, TWO]


def test_messages_on_their_way_when_the_link_is_renamed_are_not_the_links_own():
    """They have the publisher's former name: the master gets the present one, not the link, which is root perhaps."""
    link = Script()
    assert link.bring(BELOW, by(5, ALICE), ONE) == [told(5, ALICE), ONE]
    longer = b"!/cred/0/0/3/" + NAME
    link.core.received(ABOVE, [b"CMSG chain\0" + longer], 0.0)
    assert link.take(ABOVE) == [told(5, ALICE.replace(NAME, longer))]
    assert link.bring(BELOW, by(6, BOB), TWO) == [told(6, BOB.replace(NAME, longer)), TWO]
    assert link.bring(BELOW, by(6, BOB.replace(NAME, longer)), TWO) == [TWO]


def test_messages_on_their_way_when_the_master_restarts_are_not_the_links_own():
    """A master in a tree that restarts has its own master only later, so the link has a shorter name at first."""
    longer = b"!/cred/0/0/3/" + NAME
    link = Script(name=longer)
    alice, bob = ALICE.replace(NAME, longer), BOB.replace(NAME, longer)
    assert link.bring(BELOW, by(5, alice), ONE) == [told(5, alice), ONE]
    link.lose(ABOVE)
    link.name = NAME
    link.connect(ABOVE)
    assert link.bring(BELOW, TWO, by(6, bob), TWO) == [told(5, ALICE), TWO, told(6, BOB), TWO]


def test_name_that_gets_too_long_is_not_told():
    """The limit is that of the name that the master gets."""
    link = Script()
    chain = b"/".join([b"!/cred/1/0/9"] * 38) + b"/!/cred/1/1/1"
    assert len(b"6 " + chain) <= notices.LONGEST_SENDER < len(b"6 " + NAME + b"/" + chain)
    assert link.bring(BELOW, by(5, ALICE), ONE, by(6, chain), TWO)[2:] == [ITSELF, TWO]


def test_program_around_the_master_is_not_that_around_the_bus_below():
    """What the program around the master publishes is the link's below."""
    link = Script()
    assert link.bring(ABOVE, by(5, CAROL), ONE, by(0, notices.NOBODY), TWO) == [told(5, CAROL), ONE, ITSELF, TWO]


def test_name_that_is_too_long_is_not_told():
    """The chain of a dozen buses and more would be taken for no name: the messages are the link's."""
    link = Script()
    chain = b"/".join([NAME] * 40) + b"/!/cred/1/1/1"
    assert link.bring(ABOVE, by(5, CAROL), ONE, by(6, chain), TWO)[2:] == [ITSELF, TWO]


@pytest.mark.parametrize(
    "settings",
    [{"knows": (False, False)}, {"name": b"!/cred/0/0/0"}, {"name": b"!/cred/65534/65534/9"}],
    ids=["old servers", "no PID", "unmapped IDs"],
)
def test_nobody_is_named_where_names_prove_nothing(settings):
    """With buses that know no senders, or IDs that mean nothing on the other side, the link is the sender."""
    link = Script(**settings)
    assert link.bring(BELOW, by(5, ALICE), ONE) == [ONE]
    assert link.bring(ABOVE, by(5, CAROL), ONE) == [ONE]


def test_bus_that_knows_no_senders_is_told_none():
    """An old master gets no names, and the bus below those from it that there are."""
    link = Script(knows=(True, False))
    assert link.bring(BELOW, by(5, ALICE), ONE) == [ONE]
    assert link.bring(ABOVE, by(5, CAROL), ONE) == [told(5, CAROL), ONE]


def test_master_that_does_not_trust_the_link_is_told_none():
    """A master on which the link is an ordinary client would not obey it."""
    link = Script(grants=False)
    assert link.bring(BELOW, by(5, ALICE), ONE) == [ONE]
    assert link.bring(ABOVE, by(5, CAROL), ONE) == [told(5, CAROL), ONE]


def test_reconnecting_starts_anew():
    """A new connection is told the author that the other one is still at; one that was lost names nobody."""
    link = Script()
    assert link.bring(BELOW, by(5, ALICE), ONE) == [told(5, ALICE), ONE]
    assert link.bring(ABOVE, by(5, CAROL), ONE) == [told(5, CAROL), ONE]
    link.lose(ABOVE)
    assert link.bring(BELOW, by(6, BOB), ONE) == []
    link.connect(ABOVE)
    assert link.bring(BELOW, TWO) == [told(6, BOB), TWO]
    assert link.bring(ABOVE, TWO) == [ITSELF, TWO]
    link.lose(BELOW)
    link.connect(BELOW)
    link.connect(ABOVE)
    assert link.bring(BELOW, ONE) == [ONE]
    assert link.bring(ABOVE, ONE) == [ONE]


AUTHORS = [(5, ALICE), (6, BOB), (7, ALICE), (0, notices.NOBODY), (8, CAROL)]
STEPS = st.lists(st.tuples(st.sampled_from([BELOW, ABOVE]), st.lists(st.sampled_from([None, *AUTHORS]), max_size=12)))


@given(STEPS)
def test_each_message_has_its_author_on_the_other_side(steps):
    """Whatever the batches, the last author told before a message is its own, or the link if it vouches for no such."""
    link = Script()
    here: dict[Side, bytes] = {BELOW: b"", ABOVE: b""}
    there: dict[Side, bytes] = {BELOW: b"", ABOVE: b""}
    for side, batch in steps:
        packets, expected = [], []
        for each in batch:
            if each is None:
                packets.append(ONE)
                expected.append(here[side])
                continue
            packets.append(by(*each))
            number, name = each
            if side is BELOW and name == CAROL:
                name = NAME + b"/" + CAROL
            here[side] = b"" if name == notices.NOBODY else b"%d %b" % (number, name)
        found = []
        for packet in link.bring(side, *packets):
            if packet == ONE:
                found.append(there[side])
            else:
                assert packet.startswith(ITSELF)
                assert packet[len(ITSELF) :] != there[side]
                there[side] = packet[len(ITSELF) :]
        assert found == expected
