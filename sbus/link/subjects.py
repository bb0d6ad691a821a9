"""NATS subjects for keys and patterns: the mapping that routes a message between hosts.

.. rubric:: Theory of operation

A NATS subject consists of tokens with ``.`` between them, and a subscription may have the wildcards ``*`` (one token)
and ``>`` (one token or more, at the end). The subject only routes a message; its key is in the packet. So the mapping
need not be reversible, and two keys may have the same subject.

A subject is the realm and one token for each segment of the key. In a token, bytes outside ``[A-Za-z0-9_-]`` are
written ``=XX`` (hexadecimal, upper case).

==================================================  ====================================================================
part of a key                                       token
==================================================  ====================================================================
an empty segment                                    ``=``
a segment whose token would exceed 64 bytes         ``=~`` and the first 32 hexadecimal digits of its SHA-256 (lower
                                                    case)
all segments after the 14th                         one ``=+``
==================================================  ====================================================================

Invariants:

* What `sbus.protocol.keys.matches` finds, the mapped subscription finds: if a pattern matches a key, the subject of the
  pattern matches the subject of the key. The reverse does not hold (``ab*`` becomes ``*``, and what follows the 14th
  segment is cut off), so the receiver matches keys again.
* A subject has at most 16 tokens and `MAX_SUBJECT` bytes, far below the 4,096 bytes of a line that nats-server takes by
  default. No byte of a key appears in it raw unless it is in ``[A-Za-z0-9_-]``: no wildcard, space, or end of line.
* The mapping is a function. A message whose subject is not that of its key comes from another realm, from a program
  that does not know the mapping, or is forged; the receiver drops it.
"""

from __future__ import annotations

import hashlib
import re

from sbus.errors import UsageError
from sbus.protocol.patterns import shape

__all__ = ["MAX_SUBJECT", "check_realm", "pattern_subject", "subject"]

MAX_SEGMENTS = 14
"""Segments of a key that have tokens of their own."""
MAX_TOKEN = 64
"""Bytes of the longest token."""
MAX_REALM = 64
"""Bytes of the longest realm."""
MAX_SUBJECT = MAX_REALM + MAX_SEGMENTS * (1 + MAX_TOKEN) + len(".=+")
"""Bytes of the longest subject."""

_REST = "=+"
_SPECIAL = re.compile(rb"[^A-Za-z0-9_-]")
_REALM = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*")


def check_realm(realm: str) -> str:
    """Return the realm.

    :raises UsageError: if it cannot be the beginning of a subject.
    """
    if len(realm) > MAX_REALM or not _REALM.fullmatch(realm):
        raise UsageError(
            f"{realm!r} is no realm: use letters, digits, '_' and '-', with single dots between them, {MAX_REALM} "
            "characters at most"
        )
    return realm


def subject(realm: str, key: bytes) -> str:
    """Return the subject that a message with this key is published under."""
    segments = key.split(b"/", MAX_SEGMENTS)
    tokens = [realm, *map(_token, segments[:MAX_SEGMENTS])]
    if len(segments) > MAX_SEGMENTS:
        tokens.append(_REST)
    return ".".join(tokens)


def pattern_subject(realm: str, pattern: bytes) -> str | None:
    """Return the subject to subscribe to for an open pattern; None for a pattern that matches no key."""
    wanted = shape(pattern)
    if wanted is None:
        return None
    tokens = [realm]
    tokens += ("*" if part.endswith(b"*") else _token(part) for part in wanted.parts[:MAX_SEGMENTS])
    if len(wanted.parts) > MAX_SEGMENTS:
        tokens.append(_REST)
    elif wanted.is_below:
        tokens.append(">")
    return ".".join(tokens)


def _token(segment: bytes) -> str:
    if segment.isalnum() and len(segment) <= MAX_TOKEN:  # the usual case; bytes.isalnum knows only ASCII
        return segment.decode("ascii")
    escaped = segment[: MAX_TOKEN + 1]  # to escape a long segment would take its publisher's time times a hundred
    escaped = _SPECIAL.sub(lambda found: b"=%02X" % found[0][0], escaped)
    if len(escaped) > MAX_TOKEN:
        return "=~" + hashlib.sha256(segment).hexdigest()[:32]
    return escaped.decode("ascii") or "="
