"""How messages are printed: as text that cannot harm a terminal, as JSON, raw, or in a format of the user's."""

from __future__ import annotations

import base64
import functools
import json
import os
import sys
from collections.abc import Callable
from datetime import datetime
from typing import NamedTuple

import click

from sbus.client.core import Message

__all__ = ["FORMAT_HELP", "Printer", "ReceivedMessage", "as_json", "as_text", "custom", "has_colors", "raw", "shown"]

FORMAT_HELP = """\
%k key and %p payload, made safe to print; %K and %P the same as they are;
%x payload in hexadecimal; %b in base64; %s its size in bytes;
%t time, as with --time; %T in seconds since 1970; %n number of the message;
%j what --json prints; %% a percent sign;
\\n, \\t, \\0, \\\\ as in printf(1); \\c at the end: no newline there."""

_NAMED = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}


class ReceivedMessage(NamedTuple):
    """A message that has come: the how manieth, when (seconds since 1970), and what it is."""

    number: int
    time: float
    message: Message


Printer = Callable[[ReceivedMessage], bytes]
"""Makes of a message what is written to standard output."""


def has_colors() -> bool:
    """Whether standard output is a terminal on which colours are wanted (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def shown(data: bytes, *, ascii_only: bool = False) -> str:
    """Bytes as text that is safe to print and can be turned back into them.

    Printable UTF-8 stands as it is. A backslash is doubled; newline, tab and return are written
    ``\\n``, ``\\t``, ``\\r``; of all else each byte is ``\\xNN``. printf(1)'s ``%b`` undoes it.

    :param ascii_only: for terminals that do not speak UTF-8.
    """
    text = data.replace(b"\\", b"\\\\").decode("utf-8", "backslashreplace")
    if not text.isprintable() or (ascii_only and not text.isascii()):
        text = "".join(
            c if c.isprintable() and (c.isascii() or not ascii_only) else _NAMED.get(c) or _escaped(c) for c in text
        )
    return text


def _escaped(character: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in character.encode())


def _shower() -> Callable[[bytes], str]:
    """`shown` for standard output."""
    encoding = (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "")
    return functools.partial(shown, ascii_only=encoding != "utf8")


def _local_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="milliseconds")


def as_text(*, with_time: bool, colored: bool) -> Printer:
    """A line for each message: the key, a space, the payload; in the key a space is ``\\x20``."""
    safe = _shower()

    def show(arrival: ReceivedMessage) -> bytes:
        key = safe(arrival.message.key).replace(" ", "\\x20")
        parts = [click.style(key, fg="cyan") if colored else key, safe(arrival.message.payload)]
        if with_time:
            when = _local_time(arrival.time)
            parts.insert(0, click.style(when, dim=True) if colored else when)
        return " ".join(parts).encode() + b"\n"

    return show


def as_json(arrival: ReceivedMessage) -> bytes:
    """An object on a line, in ASCII: ``time``, ``key``, ``payload`` and ``encoding``, text or base64, of the payload.

    A key that is not UTF-8 comes in base64 too, and ``key_encoding`` tells so.
    """
    key, payload = arrival.message
    fields: dict[str, object] = {"time": round(arrival.time, 6)}
    fields["key"], encoding = _for_json(key)
    if encoding != "text":
        fields["key_encoding"] = encoding
    fields["payload"], fields["encoding"] = _for_json(payload)
    return json.dumps(fields).encode() + b"\n"


def _for_json(data: bytes) -> tuple[str, str]:
    try:
        return data.decode(), "text"
    except UnicodeDecodeError:
        return base64.b64encode(data).decode(), "base64"


def raw(arrival: ReceivedMessage) -> bytes:
    """The payload, byte for byte, with nothing before or behind it."""
    return arrival.message.payload


def _directives() -> dict[str, Printer]:
    safe = _shower()
    return {
        "k": lambda a: safe(a.message.key).encode(),
        "p": lambda a: safe(a.message.payload).encode(),
        "K": lambda a: a.message.key,
        "P": lambda a: a.message.payload,
        "x": lambda a: a.message.payload.hex().encode(),
        "b": lambda a: base64.b64encode(a.message.payload),
        "s": lambda a: b"%d" % len(a.message.payload),
        "t": lambda a: _local_time(a.time).encode(),
        "T": lambda a: b"%.6f" % a.time,
        "n": lambda a: b"%d" % a.number,
        "j": lambda a: as_json(a).rstrip(),
        "%": lambda _: b"%",
    }


_ESCAPES = {"n": b"\n", "t": b"\t", "0": b"\0", "\\": b"\\"}


def custom(text: str) -> Printer:
    """What a format of the user's says (see `FORMAT_HELP`).

    :raises ValueError: if it says something unknown.
    """
    directives = _directives()
    parts: list[bytes | Printer] = []
    end = b"\n"
    at = 0
    while at < len(text):
        mark, following = text[at], text[at + 1 : at + 2]
        at += 2 if mark in "%\\" else 1
        if mark not in "%\\":
            parts.append(os.fsencode(mark))
        elif mark == "%" and following in directives:
            parts.append(directives[following])
        elif mark == "\\" and following in _ESCAPES:
            parts.append(_ESCAPES[following])
        elif mark == "\\" and following == "c" and at == len(text):
            end = b""
        else:
            raise ValueError(f"{mark}{following} means nothing there")
    parts.append(end)

    def show(arrival: ReceivedMessage) -> bytes:
        return b"".join(part if isinstance(part, bytes) else part(arrival) for part in parts)

    return show
