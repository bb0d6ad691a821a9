"""A client's choices, the control messages that make them, and the state that could be handed over."""

from __future__ import annotations

from dataclasses import fields

import pytest

from sbus.flood import ClientSettings, SendQueue
from sbus.protocol import controls
from sbus.protocol.bundles import MAX_BUNDLE
from sbus.server.bus.protocol import BusProtocol
from tests.support.buses import Bus
from tests.unit.server.mailboxes import message, messages


@pytest.mark.parametrize("control", controls.CONTROLS, ids=lambda control: control.key.decode())
def test_every_control_message_is_understood(control):
    """The server understands each row of the table, and answers as its row says, with the key of the question."""
    bus = Bus()
    client = bus.connect()
    client.send(b"CMSG " + control.key + b"\0a payload is ignored")
    replies = client.take()
    assert bus.registry.counters.unknown_controls == 0
    assert client.is_connected
    if control.answer is controls.Answer.NONE:
        assert replies == []
    else:
        (reply,) = replies
        prefix = b"CMSG " + control.key + b"\0"
        assert reply.startswith(prefix)
        assert (reply == prefix) == (control.answer is controls.Answer.EMPTY)
    if control.default:
        assert client.protocol.settings == ClientSettings()
    else:
        assert client.protocol.settings != ClientSettings()


@pytest.mark.parametrize("group", sorted({control.group for control in controls.CONTROLS}))
def test_the_newest_of_a_group_is_in_force(group):
    """Of one group the newest message counts; the choices of other groups stay."""
    rows = [control for control in controls.CONTROLS if control.group == group]
    others = [control for control in controls.CONTROLS if control.group != group]
    for last in rows:
        bus = Bus()
        client, fresh = bus.connect(), bus.connect()
        for control in (*others, *rows, last):
            client.send(b"CMSG " + control.key)
        for control in (*others, last):
            fresh.send(b"CMSG " + control.key)
        if last.refines:
            fresh.send(*[b"CMSG " + control.key for control in (rows[-2], last)])
        assert client.protocol.settings == fresh.protocol.settings


@pytest.mark.parametrize(
    ("before", "choice", "expected"),
    [
        (b"CMSG blocking/soft/queue", b"CMSG blocking/soft/discard", [1]),
        (b"CMSG blocking/soft/discard", b"CMSG blocking/soft/queue", [2]),
        (b"CMSG blocking/soft/queue", b"CMSG blocking/soft/error", [1]),
    ],
)
def test_a_choice_concerns_no_earlier_message_of_the_same_batch(before, choice, expected):
    """If a client publishes to itself and chooses in one batch, the earlier choice applies to its earlier messages."""
    bus = Bus()
    client = bus.connect()
    client.send(b"SUB k", before)
    client.stall()
    client.send(message(1), choice, *[message(2)] * (choice != b"CMSG blocking/soft/error"))
    client.drain()
    assert client.take() == messages(*expected)


def test_the_state_of_settings():
    """Every choice is in the description, as a plain value."""
    bus = Bus()
    client = bus.connect()
    client.send(b"CMSG blocking/soft/block", b"CMSG blocking/hard/error", b"CMSG order/stack", b"CMSG order/random")
    client.send(
        b"CMSG echo/off",
        b"CMSG bundle/on",
        b"CMSG bye/on",
        b"CMSG receipts/on",
        b"CMSG observer/on",
        b"CMSG sender/on",
        b"CMSG denied/on",
    )
    client.send(b"CMSG chain/on", b"CMSG payload/on")
    state = client.protocol.settings.describe()
    assert set(state) == {field.name for field in fields(ClientSettings)}
    assert state == {
        "soft": b"blocking/soft/block",
        "hard": b"blocking/hard/error",
        "order": b"order/random",
        "newest_first": True,
        "echo": False,
        "bundles": True,
        "payloads": True,
        "bye": True,
        "receipts": True,
        "sender": True,
        "denied": True,
        "observer": True,
        "chain": True,
    }
    assert client.transport.bundle_limit == MAX_BUNDLE


NOT_STATE = {
    "_delivery", "_scheduler", "registry", "transport", "queue", "naming", "user",  # other objects
    "_departure", "is_ending",  # time left
    "_fast_path", "_in_force", "direct", "has_echo", "pattern_bytes", "pattern_memory",  # follow from the rest
    "_identity", "_rights", "is_free", "_pace",  # the kernel is asked again, and the policy
    "_is_loading", "front", "on_room",  # a client asks again
    "_held",  # released at the end of the server
    "_letters", "_mail",  # counts of entries of the mail, which is described by itself
    "drain", "_is_blocked", "_is_waiting", "is_paused",  # found out again
    "_buffer", "_in_kernel", "_kept", "_unsent",  # figures of the account, which a new connection makes anew
}  # fmt: skip


def test_the_state_of_a_connection():
    """Each field of a connection is in its description, or follows from something else: none can be forgotten."""
    bus = Bus()
    client = bus.connect(uid=7, gid=8, pid=9)
    client.send(b"SUB a", b"SUB a", b"SUB !/cred////x")
    state = client.protocol.describe()
    slots = {name for part in BusProtocol.__mro__ for name in getattr(part, "__slots__", ())}
    assert set(state) == slots - NOT_STATE
    assert state == {
        "number": 1,
        "peer": (9, 7, 8),
        "signature": b"CMSG sender\x001 !/cred/8/7/9",
        "listener": "main",
        "patterns": {b"a": 2, b"!/cred////x": 1},
        "lost": 0,
        "untold": 0,
        "connected_at": client.protocol.connected_at,
        "settings": ClientSettings().describe(),
        "is_write_closed": False,
        "reason": None,
    }


@pytest.mark.parametrize("order", [b"order/queue", b"order/stack"])
def test_the_state_of_a_queue(order):
    """The description of a queue has the packets that wait, in the order of arrival, and says which are replies."""
    bus = Bus()
    client = bus.connect()
    client.stall()
    client.send(b"SUB k", b"CMSG " + order, b"MSG k\x001", b"CMSG !/cred/whoami", b"MSG k\x002")
    queue = client.protocol.queue
    assert isinstance(queue, SendQueue)
    reply = b"CMSG !/cred/whoami\0!/cred/100/1000/%d" % client.protocol.peer.pid
    assert queue.describe() == {
        "packets": [(False, b"MSG k\x001"), (True, reply), (False, b"MSG k\x002")],
        "receipts": [],
        "lost": 0,
        "conflated": 0,
    }


def test_clients_that_chose_nothing_share_their_settings():
    """An idle client has no settings of its own, so it costs no memory for them."""
    bus = Bus()
    one, two = bus.connect(), bus.connect()
    assert one.protocol.settings is two.protocol.settings is one.protocol.queue.settings
