"""How messages are printed: safe to look at, and from which the message can be restored."""

from __future__ import annotations

import base64
import json

import click
import pytest
from click.testing import CliRunner
from hypothesis import given

from sbus.cli.messages import MessageFormat, ReceivedMessage, as_json, as_text, custom, message_options, raw
from sbus.client.core import Message
from tests.unit.cli.test_output import PAYLOADS, unescape


def received(key: bytes, payload: bytes, number: int = 1) -> ReceivedMessage:
    return ReceivedMessage(number, 1_500_000, Message(key, payload))


@given(PAYLOADS, PAYLOADS)
def test_text_is_two_fields(key: bytes, payload: bytes) -> None:
    """The first space ends the key, and the newline ends the message, whatever bytes they have."""
    line = as_text(with_time=False, colored=False)(received(key, payload))
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert tuple(map(unescape, line[:-1].split(b" ", 1))) == (key, payload)


@given(PAYLOADS, PAYLOADS)
def test_json_is_reversible(key: bytes, payload: bytes) -> None:
    """An object is one line of ASCII, from which key and payload can be restored."""
    line = as_json(received(key, payload))
    assert line.isascii()
    assert line.count(b"\n") == 1
    fields = json.loads(line)

    def restored(value: str, encoding: str) -> bytes:
        return value.encode() if encoding == "text" else base64.b64decode(value, validate=True)

    assert restored(fields["payload"], fields["encoding"]) == payload
    assert restored(fields["key"], fields.get("key_encoding", "text")) == key


@given(PAYLOADS)
def test_raw(payload: bytes) -> None:
    """Raw output is the payload and nothing else."""
    assert raw(received(b"k", payload)) == payload
    assert custom(r"%P\c")(received(b"k", payload)) == payload


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("", b"\n"),
        (r"\c", b""),
        (r"\\c", b"\\c\n"),
        ("%%k", b"%k\n"),
        ("%k%K", b"a\\n a\n \n"),
        ("%n é %s", "7 é 2\n".encode()),
        (r"%x\0%b\t\n", b"ff41\0/0E=\t\n\n"),
        ("%T", b"1.500000\n"),
        ("%j", b'{"time": 1.5, "key": "a\\n ", "payload": "/0E=", "encoding": "base64"}\n'),
        ("\udcff", b"\xff\n"),
    ],
)
def test_format(template: str, expected: bytes) -> None:
    """A format says what is printed, to the byte."""
    assert custom(template)(received(b"a\n ", b"\xffA", 7)) == expected


@pytest.mark.parametrize("template", ["%", "100% sure", "%q", "\\", r"\x41", r"a\cb"])
def test_unknown_directive(template: str) -> None:
    """An unknown directive or escape is refused rather than printed."""
    with pytest.raises(ValueError, match="is not a directive"):
        custom(template)


def test_options_become_one_argument() -> None:
    """The four options reach the command as one `MessageFormat`, beside its other options."""
    seen: list[tuple[int, MessageFormat]] = []

    @click.command()
    @message_options(noun="message", moment="arrival time")
    @click.option("--count", type=int)
    def command(count: int, message_format: MessageFormat) -> None:
        seen.append((count, message_format))

    run = CliRunner().invoke
    assert run(command, ["--count=2", "--format=%k"]).exit_code == 0
    assert run(command, ["--json", "--count=3"]).exit_code == 0
    assert seen == [(2, MessageFormat(template="%k")), (3, MessageFormat(json=True))]
    text = run(command, ["--help"]).output
    assert text.index("--json") < text.index("--time") < text.index("--count")


@pytest.mark.parametrize(
    "message_format",
    [
        MessageFormat(json=True, raw=True),
        MessageFormat(raw=True, template=""),
        MessageFormat(json=True, time=True),
        MessageFormat(template="%k", time=True),
    ],
)
def test_options_that_exclude_each_other(message_format: MessageFormat) -> None:
    """Only one format can be chosen, and --time belongs to text."""
    with pytest.raises(click.UsageError):
        message_format.printer()
