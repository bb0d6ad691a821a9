"""How messages are printed: text, JSON, raw or the user's format; and the options."""

from __future__ import annotations

import base64
import functools
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

import click

from sbus.cli.combined import combined
from sbus.cli.output import escape, explained_writing, has_colors, pluralize, speaks_utf8
from sbus.client.core import Message
from sbus.client.losses import Lost
from sbus.interchange.jsonl import encoded, sender_fields
from sbus.journal import clock

__all__ = [
    "FORMAT_HELP",
    "MessageFormat",
    "Printer",
    "ReceivedMessage",
    "as_json",
    "as_text",
    "copied",
    "custom",
    "json_fields",
    "lost_fields",
    "lost_text",
    "message_options",
    "raw",
    "saved",
]

F = TypeVar("F", bound=Callable[..., Any])

FORMAT_HELP = """
  %k  key, escaped             %K  key, byte for byte
  %p  payload, escaped         %P  payload, byte for byte
  %x  payload in hexadecimal   %b  payload in base64
  %s  payload size in bytes    %n  number of the message
  %f  sender, - if unknown     %u  UID of the sender, likewise
  %t  time, as with --time     %T  time in seconds since 1970
  %j  what --json prints       %%  a percent sign
  \\n \\t \\0 \\\\  newline, tab, NUL, backslash
  \\c  at the end: print no newline"""


class ReceivedMessage(NamedTuple):
    """A message to print.

    :ivar number: its number, from 1; of a recorded message, the sequence number of its row.
    :ivar time: when it was received, in µs since the epoch.
    :ivar message: its key and payload.
    """

    number: int
    time: int
    message: Message


Printer = Callable[[ReceivedMessage], bytes]
"""Return the bytes for standard output that show a message."""


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """The values of the options of `message_options`.

    :ivar json: print JSON objects.
    :ivar raw: print payloads alone.
    :ivar template: the user's format, or None.
    :ivar time: print the time before each message.
    """

    json: bool = False
    raw: bool = False
    template: str | None = None
    time: bool = False

    def printer(self) -> Printer:
        """Return the printer that the options describe.

        :raises click.UsageError: if they contradict each other.
        """
        if self.json + self.raw + (self.template is not None) > 1:
            raise click.UsageError("--json, --raw and --format exclude each other.")
        if self.time and (self.json or self.raw or self.template is not None):
            raise click.UsageError("--time is for text output: --json includes the time, and a --format can use %t.")
        if self.json:
            return as_json
        if self.raw:
            return raw
        if self.template is None:
            return as_text(with_time=self.time, colored=has_colors())
        try:
            return custom(self.template)
        except ValueError as e:
            raise click.BadParameter(f"{e} (see --help)", param_hint="--format") from None

    def wants_sender(self, is_asked: bool) -> bool:
        """Return whether the output needs the sender of each message: the option or the format asks for it.

        :raises click.UsageError: if the option asks for it, and the output has no place for it.
        """
        if is_asked and self.raw:
            raise click.UsageError("--sender is not for --raw, which prints payloads alone.")
        return is_asked or bool(re.search("%[fu]", (self.template or "").replace("%%", "")))

    def show_lost(self, lost: Lost) -> None:
        """Print a loss among the messages: as JSON, or as text after ``#``; with other formats, on standard error."""
        now = clock.now()
        output = sys.stdout.buffer
        if self.json:
            output.write(json.dumps(lost_fields(lost, now)).encode() + b"\n")
        elif self.raw or self.template is not None:
            output.flush()
            click.echo(f"sbus: {lost_text(lost)}", err=True)
        else:
            time = f"{clock.format_local(now)} " if self.time else ""
            output.write(f"# {time}{lost_text(lost)}\n".encode())


def message_options(*, noun: str, moment: str) -> Callable[[F], F]:
    """Return a decorator that adds the options for printing messages.

    The command gets a `MessageFormat`, as ``message_format``.

    :param noun: what a line stands for, such as ``message``.
    :param moment: the time that ``--time`` prints, such as ``arrival time``.
    """
    with_options = combined(
        click.option("--json", "output_json", is_flag=True, help=f"Print one JSON object per {noun}."),
        click.option("--raw", "output_raw", is_flag=True, help="Print payloads only, byte for byte."),
        click.option("--format", "template", metavar="FORMAT", help="Print each message in this format; see below."),
        click.option("--time", "with_time", is_flag=True, help=f"Print the {moment} before each message."),
    )

    def decorate(command: F) -> F:
        @functools.wraps(command)
        def wrapper(
            *args: Any, output_json: bool, output_raw: bool, template: str | None, with_time: bool, **kwargs: Any
        ) -> Any:
            message_format = MessageFormat(output_json, output_raw, template, with_time)
            return command(*args, message_format=message_format, **kwargs)

        return with_options(cast(F, wrapper))

    return decorate


def _output_escape() -> Callable[[bytes], str]:
    """Return `escape` for standard output."""
    return functools.partial(escape, ascii_only=not speaks_utf8())


def as_text(*, with_time: bool, colored: bool) -> Printer:
    """Return a printer of lines: the sender and a space if it is known, the key, a space, the payload.

    A space in the key becomes ``\\x20``.
    """
    safe = _output_escape()

    def show(received: ReceivedMessage) -> bytes:
        key = safe(received.message.key).replace(" ", "\\x20")
        parts = [click.style(key, fg="cyan") if colored else key, safe(received.message.payload)]
        if received.message.sender is not None:
            parts.insert(0, str(received.message.sender))
        if with_time:
            time = clock.format_local(received.time)
            parts.insert(0, click.style(time, dim=True) if colored else time)
        return " ".join(parts).encode() + b"\n"

    return show


def as_json(received: ReceivedMessage) -> bytes:
    """Return one line of ASCII: the JSON object with the `json_fields`."""
    return json.dumps(json_fields(received)).encode() + b"\n"


def lost_text(lost: Lost) -> str:
    """Return a loss in words: ``lost 3 messages, 300 bytes (5 in all): queue-full``."""
    number = "messages" if lost.messages is None else pluralize(lost.messages, "message")
    size = "" if lost.bytes is None else f", {pluralize(lost.bytes, 'byte')}"
    total = "" if lost.total is None else f" ({lost.total:,} in all)"
    return f"lost {number}{size}{total}: {escape(lost.why.encode())}"


def lost_fields(lost: Lost, time: int) -> dict[str, object]:
    """Return ``time``, ``lost``, ``bytes``, ``total`` and ``why``; an unknown number is None.

    :param time: when it was reported, in µs since the epoch.
    """
    return {
        "time": clock.to_seconds(time),
        "lost": lost.messages,
        "bytes": lost.bytes,
        "total": lost.total,
        "why": lost.why,
    }


def json_fields(received: ReceivedMessage) -> dict[str, object]:
    """Return ``time``, ``key``, ``payload``, ``encoding`` (``text`` or ``base64``), and ``last`` for a last value.

    A key that is not UTF-8 is in base64 too, and ``key_encoding`` says so. ``sender`` is there if it is known.
    """
    key, payload = received.message
    fields: dict[str, object] = {"time": clock.to_seconds(received.time)}
    fields["key"], encoding = encoded(key)
    if encoding != "text":
        fields["key_encoding"] = encoding
    fields["payload"], fields["encoding"] = encoded(payload)
    if received.message.is_last_value:
        fields["last"] = True
    if received.message.sender is not None:
        fields["sender"] = sender_fields(received.message.sender)
    return fields


def raw(received: ReceivedMessage) -> bytes:
    """Return the payload, byte for byte, with nothing before or after it."""
    return received.message.payload


def copied(show: Printer) -> Printer:
    """Return a printer that also takes large messages, whose payloads are views."""

    def show_copy(received: ReceivedMessage) -> bytes:
        message = received.message
        if type(message.payload) is not bytes:
            received = received._replace(message=message._replace(payload=bytes(message.payload)))
        return show(received)

    return show_copy


_UNSAFE = re.compile(rb"[^A-Za-z0-9._-]")
_LONGEST_NAME = 200
"""Bytes of an escaped key in the name of a file, which has 255 at most (NAME_MAX)."""


def saved(show: Printer, directory: str) -> Printer:
    """Return a printer that writes each payload to a new file, and prints the name of the file in its place.

    :raises OSError: if the directory cannot be made; from the printer, if the file cannot be opened or exists.
    :raises StorageError: from the printer, if the payload cannot be written.
    """
    os.makedirs(directory, exist_ok=True)

    def save(received: ReceivedMessage) -> bytes:
        message = received.message
        key = _UNSAFE.sub(lambda found: b"%%%02X" % found[0][0], message.key).decode()
        path = os.path.join(directory, f"{received.number:06}-{key[:_LONGEST_NAME]}")
        try:
            file = open(path, "xb")  # noqa: SIM115
        except FileExistsError as e:
            raise FileExistsError(e.errno, "File exists: name an empty directory", path) from None
        try:
            with explained_writing("a payload", path, "name another directory"), file:
                file.write(message.payload)
        except BaseException:
            os.unlink(path)  # a partial file would look like a whole payload
            raise
        return show(received._replace(message=message._replace(payload=os.fsencode(path))))

    return save


def _directives() -> dict[str, Printer]:
    safe = _output_escape()
    return {
        "k": lambda m: safe(m.message.key).encode(),
        "p": lambda m: safe(m.message.payload).encode(),
        "K": lambda m: m.message.key,
        "P": lambda m: m.message.payload,
        "x": lambda m: m.message.payload.hex().encode(),
        "b": lambda m: base64.b64encode(m.message.payload),
        "s": lambda m: b"%d" % len(m.message.payload),
        "t": lambda m: clock.format_local(m.time).encode(),
        "T": lambda m: b"%d.%06d" % divmod(m.time, clock.SECOND),
        "n": lambda m: b"%d" % m.number,
        "f": lambda m: str(m.message.sender or "-").encode(),
        "u": lambda m: (
            b"-" if m.message.sender is None or m.message.sender.uid is None else b"%d" % m.message.sender.uid
        ),
        "j": lambda m: as_json(m).rstrip(),
        "%": lambda _: b"%",
    }


_ESCAPES = {"n": b"\n", "t": b"\t", "0": b"\0", "\\": b"\\"}


def custom(template: str) -> Printer:
    """Return a printer for the user's format (see `FORMAT_HELP`).

    :raises ValueError: if it has an unknown directive or escape.
    """
    directives = _directives()
    parts: list[bytes | Printer] = []
    end = b"\n"
    at = 0
    while at < len(template):
        mark, following = template[at], template[at + 1 : at + 2]
        at += 2 if mark in "%\\" else 1
        if mark not in "%\\":
            parts.append(os.fsencode(mark))
        elif mark == "%" and following in directives:
            parts.append(directives[following])
        elif mark == "\\" and following in _ESCAPES:
            parts.append(_ESCAPES[following])
        elif mark == "\\" and following == "c" and at == len(template):
            end = b""
        else:
            raise ValueError(f"{mark}{following} is not a directive")
    parts.append(end)

    def show(received: ReceivedMessage) -> bytes:
        return b"".join(part if isinstance(part, bytes) else part(received) for part in parts)

    return show
