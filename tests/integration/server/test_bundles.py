"""Bundles over real sockets: negotiation, framing, and the same meaning as plain packets."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sbus.protocol.bundles import _pack, _unbundle
from tests.support.examples import examples
from tests.support.harness import WHOAMI, Client, goes_on, numbered
from tests.support.packets import bundle
from tests.support.waiting import paused

ON = b"CMSG bundle/on"
ANSWER = b"CMSG bundle/on\x0065536"


def bundling(bus, *patterns: bytes) -> Client:
    """A client that has asked for bundles, and received the reply."""
    client = bus.client(*patterns)
    client.send(ON)
    assert client.recv() == ANSWER
    return client


def messages(client: Client, count: int) -> list[bytes]:
    """Receive this number of packets, bundled or not."""
    packets: list[bytes] = []
    while len(packets) < count:
        packets += _unbundle([client.recv()])
    return packets


@pytest.fixture(scope="module", params=["compiled", "plain"])
def shared(request, module_bus):
    """A bus with the compiled helper, and one without."""
    return module_bus(env={"SBUS_PURE": "1" if request.param == "plain" else "0"})


def test_on_and_off(shared):
    """The server replies to both questions; after off, a bundle is a violation, and the server sends none."""
    a = bundling(shared, b"x")
    a.send(bundle(b"MSG x\x001", b"MSG x\x002"))
    assert messages(a, 2) == [b"MSG x\x001", b"MSG x\x002"]
    a.send(b"CMSG bundle/off")
    assert a.recv() == b"CMSG bundle/off\0"
    b = shared.client()
    for packet in (sent := numbered(b"x", 100)):
        b.send(packet)
    assert a.receive(100) == sent
    a.send(bundle(b"MSG x\x003", b"MSG x\x004"))
    assert a.has_ended()


@pytest.mark.parametrize("together", [True, False], ids=["in a bundle", "plain"])
def test_no_bundle_is_taken_behind_the_end(shared, together):
    """Off and then a bundle is a violation, also if the server reads both at once; what came before holds."""
    reader, a = shared.client(b"x"), bundling(shared)
    end = (b"MSG x\x001", b"CMSG bundle/off")
    with paused(shared.pid):
        for packet in [bundle(*end)] if together else end:
            a.send(packet)
        a.send(bundle(b"MSG x\x002", b"MSG x\x003"))
    before_the_end = list(iter(a.recv, b""))
    assert before_the_end in ([], [b"CMSG bundle/off\0"])  # answered, if the server has read one after the other
    assert reader.sync() == [b"MSG x\x001"]


def test_bundles_may_be_asked_for_again(shared):
    """Off and on again at once: the bundle behind that is taken."""
    a = bundling(shared, b"x")
    with paused(shared.pid):
        for packet in (b"CMSG bundle/off", ON, bundle(b"MSG x\x001", b"MSG x\x002")):
            a.send(packet)
    assert [a.recv(), a.recv()] == [b"CMSG bundle/off\0", ANSWER]
    assert messages(a, 2) == [b"MSG x\x001", b"MSG x\x002"]


def test_who_has_not_asked_never_sees_one(shared):
    """A plain receiver gets plain packets of what was sent in a bundle."""
    plain, sender = shared.client(b"k"), bundling(shared)
    sent = numbered(b"k", 500, size=64)
    sender.send(bundle(*sent))
    assert plain.receive(500) == sent


def test_a_bundle_may_follow_the_question_at_once(shared):
    """A client need not wait for the reply: the server accepts a bundle right behind the question."""
    a = shared.client(b"k")
    a.send(ON)
    a.send(bundle(b"MSG k\x001", b"MSG k\x002"))
    assert a.recv() == ANSWER
    assert messages(a, 2) == [b"MSG k\x001", b"MSG k\x002"]


def test_a_bundle_from_who_has_not_asked_is_a_violation(shared):
    """No packet in it takes effect, and no other client is affected."""
    reader, bad = shared.client(b"k"), shared.client()
    bad.send(bundle(b"MSG k\x001"))
    assert bad.has_ended()
    assert reader.sync() == []
    assert goes_on(shared)


@pytest.mark.parametrize(
    "wrong",
    [
        b"BNDL",
        bundle(b"MSG k\x001") + b"\0",
        bundle(b"MSG k\x001", b"MSG k\x002")[:-1],
        bundle(b"MSG k\x001", b""),
        bundle(b"MSG k\x001", bundle(b"MSG k\x002")),
        b"BNDL\xff\xff\xff\xffMSG k\x001",
    ],
)
def test_malformed_framing_has_no_effect(shared, wrong):
    """The framing is checked before any of it is handled: its sender is disconnected, and nothing delivered."""
    reader, bad = shared.client(b"k"), bundling(shared)
    bad.send(wrong)
    assert bad.has_ended()
    assert reader.sync() == []


def test_a_violation_within_counts_where_it_stands(shared):
    """What stood before it holds, what follows does not."""
    reader, bad = shared.client(b"k"), bundling(shared)
    bad.send(bundle(b"MSG k\x001", b"MSG k\x002", b"NONSENSE", b"MSG k\x003"))
    assert bad.has_ended()
    assert reader.sync() == [b"MSG k\x001", b"MSG k\x002"]


def test_every_kind_of_packet_in_a_bundle(shared):
    """Subscriptions, settings and questions take effect in their order."""
    a = bundling(shared)
    a.send(bundle(b"SUB k", b"MSG k\x001", WHOAMI, b"CMSG echo/off", b"MSG k\x002", b"CMSG echo/on", b"UNSUB k"))
    assert messages(a, 2) == [b"MSG k\x001", WHOAMI + b"\0" + a.credentials]
    assert a.sync() == []


def test_secrets_in_a_bundle_are_as_secret(shared):
    """Bundling does not evade a check of credentials."""
    spy, a = bundling(shared, b"", b"*/"), bundling(shared)
    a.send(bundle(b"SUB !/cred////in", b"MSG %b/in\0hidden" % a.credentials, b"MSG open\0x"))
    assert messages(a, 1) == [b"MSG %b/in\0hidden" % a.credentials]
    assert messages(spy, 1) == [b"MSG open\0x"]
    a.send(bundle(b"SUB !/cred///1/in"))
    assert a.has_ended()


def test_a_single_message_goes_plain(shared):
    """A single waiting message is sent as a plain packet, even to a client that accepts bundles."""
    a, b = bundling(shared, b"k"), shared.client()
    for n in range(20):
        packet = b.msg(b"k", b"%d" % n)
        assert a.recv() == packet


def test_bundles_are_formed_and_keep_to_the_limit(shared):
    """What comes in one batch goes out in few packets, none longer than was agreed."""
    a, b = bundling(shared, b"k"), bundling(shared)
    sent = numbered(b"k", 2000, size=90)
    for start in range(0, 2000, 500):
        b.send(bundle(*sent[start : start + 500]))
    got: list[bytes] = []
    packets = 0
    while len(got) < 2000:
        packet = a.recv()
        assert len(packet) <= 65536
        packets += 1
        got += _unbundle([packet])
    assert got == sent
    assert packets < 200


def test_bundles_of_very_many_messages(shared):
    """Bundles that hold too many messages to be taken apart together are handled in their order."""
    publisher, reader = bundling(shared), bundling(shared, b"x")
    sent = numbered(b"x", 20_000)
    for first in range(0, len(sent), 5_000):
        publisher.send(bundle(*sent[first : first + 5_000]))
    assert messages(reader, len(sent)) == sent


def test_replies_stop_inside_a_bundle(shared):
    """A client that asks 1,000 times in one bundle and reads gets 1,000 replies, which do not pile up."""
    a = bundling(shared)
    a.send(bundle(*[WHOAMI] * 1000))
    assert messages(a, 1000) == [WHOAMI + b"\0" + a.credentials] * 1000


def test_block_holds_the_rest_of_a_bundle(bus):
    """A publisher is paused inside its bundle; the rest is delivered in order when the reader drains."""
    server = bus("--queue-messages=100")
    reader, publisher, bystander = bundling(server, b"k"), bundling(server), server.client()
    reader.cmsg(b"blocking/soft/block")
    reader.sync()
    sent = numbered(b"k", 20_000, size=400)
    at = turns = 0
    while turns < 30:  # held back is whose socket stays full while the server serves others
        if publisher.push(bundle(*sent[at : at + 100])):
            at, turns = at + 100, 0
            assert at < len(sent)
        else:
            bystander.sync()
            turns += 1
    assert messages(reader, at) == sent[:at]


PACKETS = st.lists(st.integers(0, 60).map(lambda size: b"." * size), min_size=1, max_size=60)


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(PACKETS, st.lists(st.integers(1, 9), min_size=1, max_size=20), st.sampled_from(["queue", "stack", "random"]))
def test_any_split_gives_every_receiver_the_same(shared, payloads, sizes, order):
    """However packets are bundled on their way in, plain and bundling receivers get all of them, in order."""
    sent = [b"MSG split\0%d" % n + payload for n, payload in enumerate(payloads)]
    with Client(shared.address) as plain, Client(shared.address) as reader, Client(shared.address) as publisher:
        for client in (reader, publisher):
            client.send(ON)
            assert client.recv() == ANSWER
        for client in (plain, reader):
            client.cmsg(b"order/" + order.encode())
            client.sub(b"split")
            assert client.sync() == []
        at = turn = 0
        while at < len(sent):
            some = sent[at : at + sizes[turn % len(sizes)]]
            publisher.send(bundle(*some) if len(some) > 1 else some[0])
            at += len(some)
            turn += 1
        assert messages(plain, len(sent)) == sent
        assert messages(reader, len(sent)) == sent


def test_the_plain_functions_agree_with_this_page():
    """What these tests build by hand is what the package builds."""
    packets = [b"MSG a\0", b"SUB b"]
    assert _pack(packets, 1000, 9) == ([bundle(*packets)], [2])


def test_no_bundles_where_packets_are_short(bus):
    """With packets of less than 64 KiB there is no answer, and a bundle is a violation."""
    client = bus("--max-packet=65535").client()
    client.send(ON)
    assert client.sync() == []
    client.send(bundle(b"MSG k\0", b"MSG k\0"))
    assert client.has_ended()


def test_the_early_dialect_has_none(bus):
    """There the question is an unknown verb."""
    client = bus("--dialect=early").client()
    client.send(ON)
    assert client.has_ended()


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from([b"l/a", b"l/b"]), st.sampled_from([0, 20_000, 60_000, 60_000])),
            st.sampled_from(["join", "leave", "stop"]),
        ),
        max_size=40,
    )
)
def test_large_messages_among_all_else(shared, steps):
    """Large messages come in order among small ones, once each, while others subscribe and leave, and also if the
    receiver has not read for a while: that most of them go on unseen changes nothing."""
    with bundling(shared, b"l/*") as reader, bundling(shared) as publisher, shared.client() as other:
        waiting: list[bytes] = []

        def read() -> None:
            assert messages(reader, len(waiting)) == waiting
            waiting.clear()

        is_stopped = False
        for at, step in enumerate(steps):
            if step == "stop":
                is_stopped = True
            elif step == "join":
                other.sub(b"l/a")
                other.sync()
            elif step == "leave":
                other.unsub(b"l/a")
                other.sync()
            else:
                key, size = step
                waiting.append(b"MSG %b\0%d " % (key, at) + bytes(size))
                publisher.send(waiting[-1])
                if not is_stopped or len(waiting) > 20:
                    is_stopped = False
                    read()
        read()
