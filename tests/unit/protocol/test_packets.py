"""Packets: which ones are well-formed, and that parsing and building lose nothing."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sbus.errors import Violation, ViolationReason
from sbus.protocol.packets import (
    CMSG,
    DEFAULT_MAX_PACKET,
    DRIPPING,
    FMSG,
    MSG,
    SUB,
    UNSUB,
    Packet,
    build,
    build_range,
    parse,
    parse_range,
)
from tests.support.strategies import payloads, texts

VERBS = (MSG, SUB, UNSUB, CMSG)


@pytest.mark.parametrize(
    ("packet", "parsed"),
    [
        (b"SUB a/b", Packet(SUB, b"a/b")),
        (b"SUB ", Packet(SUB, b"")),
        (b"SUB  ", Packet(SUB, b" ")),
        (b"SUB a\0ignored\0too", Packet(SUB, b"a", b"ignored\0too")),
        (b"UNSUB a*", Packet(UNSUB, b"a*")),
        (b"UNSUB ", Packet(UNSUB, b"")),
        (b"UNSUB \0", Packet(UNSUB, b"")),
        (b"MSG \0", Packet(MSG, b"")),
        (b"MSG a b\0c\0d", Packet(MSG, b"a b", b"c\0d")),
        (b"MSG a\nb\0\n", Packet(MSG, b"a\nb", b"\n")),
        (b"MSG \xff\xfe\0\x80", Packet(MSG, b"\xff\xfe", b"\x80")),
        (b"CMSG echo/off", Packet(CMSG, b"echo/off")),
        (b"CMSG echo/off\0", Packet(CMSG, b"echo/off")),
        (b"CMSG echo/off\0x", Packet(CMSG, b"echo/off", b"x")),
    ],
)
def test_parse(packet, parsed):
    """A packet is a verb, one space, a key up to the first NUL, and a payload."""
    assert parse(packet) == parsed


@pytest.mark.parametrize(
    "packet",
    [
        b"SUB",
        b"MSG",
        b"UNSUB",
        b"CMSG",
        b"SUB\0a",
        b"MSG\0a\0",
        b" ",
        b" MSG a\0",
        b"\0",
        b"msg a\0b",
        b"MSGS a\0b",
        b"UNSUBS a",
        b"UN SUB a",
        b"PUB a\0b",
        b"\xff\xff",
    ],
)
def test_unknown_verb(packet):
    """A packet that does not begin with one of the four verbs and a space is a violation."""
    with pytest.raises(Violation) as caught:
        parse(packet)
    assert caught.value.reason is ViolationReason.UNKNOWN_VERB


@pytest.mark.parametrize("packet", [b"BNDL\x05\0\0\0SUB a", b"BNDL", b"BNDL "])
def test_bundle(packet):
    """Parsing a bundle is a violation of its own kind (``BAD_BUNDLE``)."""
    with pytest.raises(Violation) as caught:
        parse(packet)
    assert caught.value.reason is ViolationReason.BAD_BUNDLE


@pytest.mark.parametrize("packet", [b"MSG ", b"MSG a", b"MSG a/b payload"])
def test_message_needs_its_nul(packet):
    """A message without a NUL is a violation; no other packet needs one."""
    with pytest.raises(Violation) as caught:
        parse(packet)
    assert caught.value.reason is ViolationReason.KEY_NOT_ENDED


def test_empty_packet_is_one_too_long():
    """The empty packet stands for a truncated one, and the violation says so."""
    with pytest.raises(Violation) as caught:
        parse(b"")
    assert caught.value.reason is ViolationReason.PACKET_TOO_LONG


def test_a_stream_that_drips():
    """What stands for a stream of tiny pieces is a violation of its own kind."""
    with pytest.raises(Violation) as caught:
        parse(DRIPPING)
    assert caught.value.reason is ViolationReason.DRIPPING


def test_build():
    """Without a payload there is no NUL, with an empty one there is."""
    assert build(SUB, b"a/") == b"SUB a/"
    assert build(CMSG, b"echo/off") == b"CMSG echo/off"
    assert build(MSG, b"", b"") == b"MSG \0"
    assert build(MSG, b"k", b"p\0q") == b"MSG k\0p\0q"


@given(st.sampled_from(VERBS), texts, payloads)
def test_round_trip(verb, key, payload):
    """Parsing restores what was built, byte for byte."""
    packet = build(verb, key, payload)
    assert parse(packet) == Packet(verb, key, payload)
    if verb != MSG:
        assert parse(build(verb, key)) == Packet(verb, key, b"")


@given(
    st.builds(
        lambda verb, rest: verb + rest, st.sampled_from((b"", b"SUB ", b"UNSUB ", b"MSG ", b"CMSG ", b"MSG")), payloads
    )
)
@example(b"MSG \0")
def test_parse_takes_or_refuses_all(packet):
    """Any bytes either parse to parts that make up the packet, or are a violation; nothing else is raised."""
    try:
        verb, key, payload = parse(packet)
    except Violation:
        return
    assert b"\0" not in key
    assert packet in (build(verb, key, payload), build(verb, key))


def test_longest_packet():
    """The default limit is the buffer size of clients of the original server."""
    assert DEFAULT_MAX_PACKET == 409_600


@pytest.mark.parametrize(
    "module", ["protocol.packets", "protocol.keys", "routing.trie", "routing.cache", "flood", "errors"]
)
def test_core_does_no_io(module):
    """The core imports neither Twisted nor anything that reaches the outside world."""
    code = (
        f"import sys, sbus.{module}\n"
        "found = {name.partition('.')[0] for name in sys.modules}\n"
        "print(*sorted(found & {'twisted', 'socket', '_socket', 'select', 'selectors', 'asyncio', 'ssl', 'signal'}))"
    )
    # Where coverage is measured it would start in this process too, and bring modules of its own.
    env = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    result = subprocess.run(
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=60, check=True, env=env
    )
    assert result.stdout.split() == []


def test_violations_travel():
    """Violations survive copying and pickling, for example on their way out of a worker process."""
    violation = Violation(ViolationReason.BAD_ID)
    for other in (copy.copy(violation), pickle.loads(pickle.dumps(violation))):
        assert (type(other), other.reason, str(other)) == (Violation, ViolationReason.BAD_ID, str(violation))


@given(key=texts, offset=st.integers(0, 10**18 - 1), length=st.integers(1, 10**18 - 1))
def test_a_range_is_parsed_as_it_was_built(key, offset, length):
    """An ``FMSG`` has the key, the offset and the length that were given."""
    packet = build_range(key.replace(b"\0", b""), offset, length)
    verb, _, rest = packet.partition(b" ")
    found, _, numbers = rest.partition(b"\0")
    assert verb == FMSG
    assert found == key.replace(b"\0", b"")
    assert parse_range(numbers) == (offset, length)


@pytest.mark.parametrize(
    "numbers",
    [
        b"",
        b"1",
        b"1 ",
        b" 1",
        b"1 0",
        b"-1 1",
        b"01 1",
        b"1 01",
        b"1  1",
        b"1 1 ",
        b"1 1\n",
        b"+1 1",
        b"1" * 19 + b" 1",
    ],
)
def test_a_wrong_range_is_a_violation(numbers):
    """A range is two plain decimal numbers with one space between them, and its length is not 0."""
    with pytest.raises(Violation) as caught:
        parse_range(numbers)
    assert caught.value.reason is ViolationReason.BAD_RANGE
