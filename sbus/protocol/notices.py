"""Notices: control messages that the server sends unasked, to clients that have asked for their kind.

A *receipt* (``CMSG lost``) stands where messages were dropped, a *sender* (``CMSG sender``) names the publisher of the
messages that follow, a *denial* (``CMSG denied``) reports a refusal to the client, and a *bye* (``CMSG bye``) is the
last packet of a connection that the server ends. Protocol: "Receipts", "Sender", "Denied" and "Bye".
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass

from sbus.protocol.packets import CMSG, build

__all__ = [
    "BYE",
    "DENIED",
    "LONGEST_DENIED",
    "LONGEST_SENDER",
    "LOST",
    "NOBODY",
    "SENDER",
    "SEVERAL",
    "Denial",
    "LossReason",
    "bye",
    "denied",
    "lost",
    "parse_denied",
    "parse_sender",
    "sender",
    "split_credentials",
]

LOST = b"lost"
"""The key of a receipt."""

BYE = b"bye"
"""The key of a bye."""

SENDER = b"sender"
"""The key of a sender."""
NOBODY = b"-"
"""The credentials of the program around the bus, whose number is 0."""
LONGEST_SENDER = 512
"""Bytes in the longest number and credentials, enough for a chain of a dozen buses."""

DENIED = b"denied"
"""The key of a denial."""
SEVERAL = b"several"
"""The verb of a denial that sums up others."""
LONGEST_DENIED = 1024
"""Bytes of a key in a denial; a longer key is cut."""

_SENDER = re.compile(rb"0 -|[0-9]{1,19} !/cred/[0-9]+/[0-9]+/[0-9]+(?:/!/cred/[0-9]+/[0-9]+/[0-9]+)*")


class LossReason(enum.Enum):
    """The cause of a loss for one receiver. The value is the word in a receipt."""

    DISCARD = "discard"
    QUEUE_FULL = "queue-full"
    SHARE = "share"
    TOO_LARGE = "too-large"
    DISCONNECT = "disconnect"
    RESTART = "restart"
    SEVERAL = "several"

    __hash__ = object.__hash__  # `enum.Enum` hashes the name, with a call in Python


def lost(
    messages: int, size: int, total: int, why: LossReason, keys: Mapping[bytes, tuple[int, int]] | None = None
) -> bytes:
    """Return the packet of a receipt.

    :param messages: messages that were dropped here.
    :param size: bytes of their packets.
    :param total: messages that were dropped since the connection began, these included.
    :param keys: for a link, keys of these messages, each with its number of messages and their bytes.
    """
    text = f"{messages} {size} {total} {why.value}".encode()
    return build(CMSG, LOST, b"\0".join([text, *(b"%d %d %b" % (*count, key) for key, count in (keys or {}).items())]))


def sender(number: int, credentials: bytes) -> bytes:
    """Return the packet that names the publisher of the messages after it.

    :param number: the publisher's connection; 0 for the program around the bus.
    :param credentials: its name (``whoami``), chained for a client of another bus; `NOBODY` for that program.
    """
    return build(CMSG, SENDER, b"%d %b" % (number, credentials))


def parse_sender(payload: bytes) -> tuple[int, bytes] | None:
    """Return the number and the credentials in a sender, or None if it is malformed."""
    if len(payload) > LONGEST_SENDER or not _SENDER.fullmatch(payload):
        return None
    number, _, credentials = payload.partition(b" ")
    return int(number), credentials


def split_credentials(credentials: bytes) -> tuple[int | None, int | None, int | None, str | None]:
    """Return the GID, the UID, the PID and the chain in the credentials of a sender (`parse_sender`).

    The chain is the name of the link that carries the publisher's bus in a tree of buses, or None without one. The
    program around the bus has None for all four.
    """
    if credentials == NOBODY:
        return None, None, None, None
    *chain, _, _, gid, uid, pid = credentials.decode().split("/")
    return int(gid), int(uid), int(pid), "/".join(chain) or None


@dataclass(frozen=True, slots=True)
class Denial:
    """A refusal of something that a client has sent.

    :ivar verb: ``MSG`` or ``SUB``; `SEVERAL` for denials that are summed up.
    :ivar key: the key or pattern, cut to `LONGEST_DENIED` bytes; empty for several.
    :ivar rule: the name of the rule that denies it; empty for several.
    :ivar count: the number of packets that were denied.
    """

    verb: bytes
    key: bytes
    rule: str
    count: int = 1


def denied(verb: bytes, key: bytes, rule: str) -> bytes:
    """Return the payload of a denial.

    :param verb: ``MSG`` or ``SUB``.
    :param rule: the name of the rule, without spaces.
    """
    return b"%b %b %b" % (verb, key[:LONGEST_DENIED], rule.encode())


def parse_denied(payload: bytes) -> Denial | None:
    """Return the content of a denial, or None if it is malformed."""
    verb, _, rest = payload.partition(b" ")
    if verb == SEVERAL:
        return Denial(verb, b"", "", int(rest)) if rest.isdigit() and len(rest) < 20 else None
    key, space, rule = rest.rpartition(b" ")
    return Denial(verb, key, rule.decode("ascii", "replace")) if verb and space else None


def bye(reason: str, text: str, longest: int) -> bytes:
    """Return the packet of a bye.

    :param reason: the name of a `sbus.errors.CloseReason`.
    :param text: one line for people; it is cut if the packet is too long.
    :param longest: bytes in the longest packet.
    """
    return build(CMSG, BYE, f"{reason.lower().replace('_', '-')} {text}".encode())[:longest]
