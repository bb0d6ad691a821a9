"""What ``sbus sub`` prints: safe to look at, and to be turned back into what was published."""

from __future__ import annotations

import base64
import json
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sbus.cli.options import pluralize
from sbus.cli.output import ReceivedMessage, as_json, as_text, custom, raw, shown
from sbus.client.core import Message

PAYLOAD = st.binary(max_size=20) | st.text(max_size=10).map(str.encode)
NAMED = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"\\": b"\\"}


def unescaped(text: bytes) -> bytes:
    """What printf(1) makes of it with ``%b``."""
    return re.sub(
        rb"\\(x([0-9a-f]{2})|[ntr\\])", lambda m: bytes([int(m[2], 16)]) if m[2] else NAMED[m[1]], text, flags=re.DOTALL
    )


def arrival(key: bytes, payload: bytes, number: int = 1) -> ReceivedMessage:
    return ReceivedMessage(number, 0.0, Message(key, payload))


@given(PAYLOAD, st.booleans())
@example(b"\\x1b", False)
@example("\x1b[31m\x9b\u202e\u2028\ue000\x7f".encode(), False)
def test_shown_is_safe(data, ascii_only):
    """Every character can be printed, and the bytes can be had back."""
    text = shown(data, ascii_only=ascii_only)
    assert text.isprintable()
    assert not ascii_only or text.isascii()
    assert unescaped(text.encode()) == data


def test_shown_keeps_text():
    """Printable UTF-8 stands as it is, unless only ASCII may be written."""
    assert shown("Grüße, 世界 ☃".encode()) == "Grüße, 世界 ☃"
    assert shown("ü".encode(), ascii_only=True) == r"\xc3\xbc"


@given(PAYLOAD, PAYLOAD)
def test_text_is_two_fields(key, payload):
    """The first space ends the key, and the newline the message, whatever they hold."""
    line = as_text(with_time=False, colored=False)(arrival(key, payload))
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert tuple(map(unescaped, line[:-1].split(b" ", 1))) == (key, payload)


@given(PAYLOAD, PAYLOAD)
def test_json_is_reversible(key, payload):
    """An object is one line of ASCII, from which key and payload can be made again."""
    line = as_json(arrival(key, payload))
    assert line.isascii()
    assert line.count(b"\n") == 1
    found = json.loads(line)

    def made_again(value: str, encoding: str) -> bytes:
        return value.encode() if encoding == "text" else base64.b64decode(value, validate=True)

    assert made_again(found["payload"], found["encoding"]) == payload
    assert made_again(found["key"], found.get("key_encoding", "text")) == key


@given(PAYLOAD)
def test_raw(payload):
    """Raw output is the payload and nothing else."""
    assert raw(arrival(b"k", payload)) == payload
    assert custom(r"%P\c")(arrival(b"k", payload)) == payload


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", b"\n"),
        (r"\c", b""),
        (r"\\c", b"\\c\n"),
        ("%%k", b"%k\n"),
        ("%k%K", b"a\\n a\n \n"),
        ("%n é %s", "7 é 2\n".encode()),
        (r"%x\0%b\t\n", b"ff41\0/0E=\t\n\n"),
        ("%T", b"0.000000\n"),
        ("%j", b'{"time": 0.0, "key": "a\\n ", "payload": "/0E=", "encoding": "base64"}\n'),
        ("\udcff", b"\xff\n"),
    ],
)
def test_format(text, expected):
    """A format says what is printed, to the byte."""
    assert custom(text)(arrival(b"a\n ", b"\xffA", 7)) == expected


@pytest.mark.parametrize("text", ["%", "100% sure", "%q", "\\", r"\x41", r"a\cb"])
def test_unknown_format(text):
    """What means nothing is refused, rather than printed."""
    with pytest.raises(ValueError, match="means nothing"):
        custom(text)


@pytest.mark.parametrize(
    ("count", "what", "told"),
    [
        (0, "row", "0 rows"),
        (1, "row", "1 row"),
        (2_000, "unusual silence", "2,000 unusual silences"),
        (1, "batch", "1 batch"),
        (3, "batch", "3 batches"),
    ],
)
def test_numbers_in_words(count: int, what: str, told: str) -> None:
    """One is told as one."""
    assert pluralize(count, what) == told
