"""The limits of a bus: their defaults, what is no limit, and what a pattern costs."""

from __future__ import annotations

import pwd
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbus.errors import UsageError
from sbus.flood import QueueLimits
from sbus.protocol.patterns import pattern_cost
from sbus.server.core.limits import MAX_REPLIES, Limits, parse_user_clients
from sbus.server.core.shares import Shares


def test_defaults():
    """Without options a bus has the limits that the protocol's page promises."""
    assert Limits() == Limits(
        max_packet=409_600,
        max_payload=67_108_864,
        max_clients=16_384,
        user_clients=256,
        user_clients_of={},
        user_accepts=200,
        user_patterns=32_768,
        user_payloads=64,
        max_patterns=16_384,
        max_pattern_bytes=1_048_576,
        max_match_steps=1024,
        queue_messages=65_536,
        queue_bytes=67_108_864,
        total_queue_bytes=268_435_456,
        block_timeout=30.0,
    )
    assert MAX_REPLIES == 64


def test_queue_limits():
    """The limits of one client's queue are those of the options, and by default the core's own."""
    assert Limits(queue_messages=3, queue_bytes=5).queue == QueueLimits(3, 5)
    assert Limits().queue == QueueLimits()


NUMBERS = [field.name for field in fields(Limits) if field.name != "user_clients_of"]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_a_limit_is_more_than_nothing(name, value):
    """A limit of zero or less is refused by its name."""
    with pytest.raises(UsageError, match=rf"^{name} is {value}\b"):
        Limits(**{name: value})


@pytest.mark.parametrize("name", [name for name in NUMBERS if name != "max_packet"])
def test_the_smallest_limit(name):
    """Any other limit may be 1."""
    limit: dict[str, Any] = {name: 1}
    assert getattr(Limits(**limit), name) == 1


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (5, "user_clients_of is 5: it must be a dict"),
        ({7: 0}, r"user_clients_of\[7\] is 0: it must be more than 0"),
        ({7: "5"}, r"user_clients_of\[7\] is '5': it must be a whole number"),
    ],
)
def test_limits_of_single_users(value, complaint):
    """A limit of one user is checked as any other."""
    with pytest.raises(UsageError, match=complaint):
        Limits(user_clients_of=value)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [("256", (None, 256)), ("1", (None, 1)), ("1001=4096", (1001, 4096)), ("daemon=5", (pwd.getpwnam("daemon")[2], 5))],
)
def test_parse_user_clients(text, parsed):
    """The value is a number for all users, or one for a name or a UID."""
    assert parse_user_clients(text) == parsed


@pytest.mark.parametrize("number", ["", "0", "-1", "1.5", "many", "²", "1_000", "+5", "9" * 5000])
@pytest.mark.parametrize("user", ["", "1001=", "daemon="])
def test_no_number_of_clients(user, number):
    """A value without a number says what to give."""
    with pytest.raises(UsageError, match=r"^--user-clients=.*: give a number of clients above 0, or that of one user"):
        parse_user_clients(user + number)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("no-such-user=5", "there is no such user 'no-such-user': give a UID, or a name from `getent passwd`"),
        ("=5", "there is no such user '': give a UID"),
        ("-1=5", "there is no such user '-1': give a UID"),
        ("4294967295=5", "a UID is less than"),
        ("root=5", "root may have any number of clients: leave the option out"),
        ("0=5", "root may have any number of clients: leave the option out"),
    ],
)
def test_no_user_with_a_limit(text, remedy):
    """A value that names no user, or one without limits, is quoted with the remedy."""
    with pytest.raises(UsageError) as caught:
        parse_user_clients(text)
    assert str(caught.value).startswith(f"--user-clients={text}: ")
    assert remedy in str(caught.value)


@given(st.dictionaries(st.integers(1, 9), st.integers(1, 99)), st.integers(1, 99), st.integers(1, 12))
def test_the_limit_of_each_user(of_some, others, uid):
    """Each user has the limit that names it, or that of all others, and the option to change is that one."""
    share = Shares(Limits(user_clients=others, user_clients_of=of_some)).of(uid)
    assert share.clients.most == of_some.get(uid, others)
    named, most = parse_user_clients(share.setting("clients").removeprefix("--user-clients="))
    assert (named, most) == (uid if uid in of_some else None, share.clients.most)


def test_replies_fit_a_packet():
    """A packet must have room for the longest reply of the server, so 64 bytes are the least."""
    assert len(b"CMSG !/cred/whoami\0!/cred/4294967295/4294967295/4294967295") <= 64
    assert Limits(max_packet=64).max_packet == 64
    with pytest.raises(UsageError, match="max_packet is 63"):
        Limits(max_packet=63)
    assert Limits(max_packet=1 << 30).max_packet == 1 << 30
    with pytest.raises(UsageError, match="no socket sends more than 1073741824 bytes"):
        Limits(max_packet=(1 << 30) + 1)


@pytest.mark.parametrize(
    ("pattern", "cost"),
    [
        (b"", 0),
        (b"a", 1),
        (b"/" * 15, 15),
        (b"/" * 16, 16 + 256),
        (b"a/" * 15 + b"a", 31),
        (b"a/" * 16 + b"a", 33 + 256),
        (b"a/" * 17, 34 + 512),
        (b"." * 100, 100),
    ],
)
def test_pattern_cost(pattern, cost):
    """A pattern costs its bytes, and 256 more for each segment past the sixteenth."""
    assert pattern_cost(pattern, b"/") == cost
    assert pattern_cost(pattern.translate(bytes.maketrans(b"./", b"/.")), b".") == cost


@given(st.text("ab*/", max_size=40).map(str.encode))
def test_pattern_cost_goes_by_segments(pattern):
    """What a pattern costs beyond its bytes depends on nothing but the number of its segments."""
    extra = pattern_cost(pattern, b"/") - len(pattern)
    assert extra == 256 * max(0, len(pattern.split(b"/")) - 16)


@pytest.mark.parametrize(
    ("max_packet", "said"),
    [(1000, b"1000"), (409_600, b""), (409_601, b"409601"), (1 << 20, b"1048544"), (1 << 30, b"1048544")],
)
def test_announced_limit(max_packet, said):
    """A limit that is not what clients expect is announced, as far as a socket can deliver it."""
    assert Limits(max_packet=max_packet).announced == said
