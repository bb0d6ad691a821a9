"""Explain in words why a pattern does not match a key.

`hint` is about the pattern alone, as the libraries and the commands give it to those who subscribe. `explain` reports a
mismatch exactly where `sbus.protocol.keys.matches` finds no match, and how far the two agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from sbus.protocol.keys import CURRENT, Dialect, SecretKey

__all__ = ["Mismatch", "explain", "hint", "hints", "never_matches"]


_BELOW = {
    b"#": "'#' is an ordinary byte, and no wildcard",
    b">": "'>' is an ordinary byte, and no wildcard",
    b"**": "'**' is the same as '*', and matches to the end of one segment",
}
"""The meaning here of the wildcards for a whole subtree, of MQTT, NATS and shells."""
_SEGMENT = {
    b"#": "'#' is an ordinary byte, and no wildcard; '*' matches to the next {!r} or the end",
    b">": "'>' is an ordinary byte, and no wildcard; '*' matches to the next {!r} or the end",
    b"+": "'+' is an ordinary byte, and no wildcard; '*' matches to the next {!r} or the end",
    b"**": "'**' is the same as '*', and matches to the next {!r} or the end; no wildcard matches several segments",
}
"""The same in the middle of a pattern, and MQTT's wildcard for one segment."""
_SEPARATORS = "./:"
"""What separates segments at one bus or another: NATS, MQTT, Redis by custom."""


class Mismatch(NamedTuple):
    """The place where a pattern stops matching a key.

    :ivar pattern_at: bytes of the pattern in front of the mismatch.
    :ivar key_at: bytes of the key that these match.
    :ivar reason: the cause, as a sentence.
    """

    pattern_at: int
    key_at: int
    reason: str


def explain(pattern: bytes, key: bytes, dialect: Dialect = CURRENT) -> Mismatch | None:
    """Return where and why a pattern stops matching a key, or None if it matches.

    A secret pattern counts as matching if some subscriber could use it to read the key: where the pattern leaves an
    ID out, the subscriber whose ID the key has there.

    :raises sbus.errors.Violation: if the protocol forbids the pattern or the key.
    """
    wanted = dialect.check(pattern)
    secret = dialect.check(key)
    if not wanted and not secret:
        return _explain_open(pattern, key, dialect.separator)
    if not wanted:
        return Mismatch(
            0,
            0,
            "the key is secret, and no wildcard reaches secret keys: begin the pattern with !/cred/<gid>/<uid>/<pid>/",
        )
    if not secret:
        return Mismatch(0, 0, "the pattern is for secret keys, which begin with !/cred/, and this key is open")
    return _explain_secret(wanted, secret)


def never_matches(pattern: bytes, dialect: Dialect = CURRENT) -> str | None:
    """Explain why no key at all can match a pattern; None if some key can.

    Matching does not backtrack: ``*`` takes a segment to its end, so nothing but ``*`` can follow it there.
    """
    for part in pattern.split(dialect.separator):
        left = part.partition(b"*")[2].lstrip(b"*").decode(errors="replace")
        if left:
            separator = dialect.separator.decode()
            foreign = f"write {separator!r} for {left[0]!r}, or " if left[0] in _SEPARATORS else ""
            return (
                f"it can never match: '*' takes everything up to the next {separator!r} or the end, "
                f"so nothing is left for {left!r}; {foreign}end the segment with '*'"
            )
    return None


def hint(pattern: bytes, dialect: Dialect = CURRENT) -> str | None:
    """Explain the meaning here of a pattern with wildcards of MQTT, NATS or a shell; None if it has none of them.

    Such a pattern is allowed, and most likely a mistake: ``#``, ``>`` and ``+`` are ordinary bytes, and ``**`` is no
    more than ``*``.
    """
    if why := never_matches(pattern, dialect):
        return why
    separator = dialect.separator
    shown = separator.decode()
    *before, last = parts = pattern.split(separator)
    above = b"".join(part + separator for part in before).decode(errors="backslashreplace")
    everything = f"the pattern {above!r} matches everything below" if above else "the empty pattern matches every key"
    if last in _BELOW:
        return f"{_BELOW[last]}; {everything}"
    if last[-2:] in (b".>", b".#") and separator != b".":
        other = f"{above}{last[:-2].decode(errors='backslashreplace')}{shown}".replace(".", shown)
        return f"{_BELOW[last[-1:]]}, and '.' separates nothing; the pattern {other!r} matches everything below"
    for part in parts:
        if part in _SEGMENT:
            return _SEGMENT[part].format(shown)
    return None


def hints(patterns: Iterable[bytes], dialect: Dialect = CURRENT) -> Iterator[str]:
    """Yield a line for each pattern that has a `hint`."""
    for pattern in patterns:
        if why := hint(pattern, dialect):
            yield f"the pattern {dialect.shown(pattern)}: {why}"


def _explain_secret(wanted: SecretKey, secret: SecretKey) -> Mismatch | None:
    pattern_at = key_at = len(b"!/cred/")
    for name, want, have in zip(("GID", "UID", "PID"), wanted[:3], secret[:3], strict=True):
        if want and want != have:
            found = f"{have.decode()} in the key" if have else "none in the key"
            return Mismatch(pattern_at, key_at, f"the {name} is {want.decode()} in the pattern, but {found}")
        pattern_at += len(want) + 1
        key_at += len(have) + 1
    found_in_rest = _explain_open(wanted.rest, secret.rest, b"/")
    if found_in_rest is None:
        return None
    return Mismatch(pattern_at + found_in_rest.pattern_at, key_at + found_in_rest.key_at, found_in_rest.reason)


def _explain_open(pattern: bytes, key: bytes, separator: bytes) -> Mismatch | None:
    """Apply rules 1 to 4, segment by segment from the left."""
    if not pattern:
        return None
    parts = pattern.split(separator)
    segments = key.split(separator)
    below = not parts[-1]
    if below:
        parts.pop()
    shown = separator.decode()
    pattern_at = key_at = 0
    for number, part in enumerate(parts):
        if number == len(segments):
            return Mismatch(pattern_at - 1, len(key), f"the key ends here, but the pattern continues with {shown!r}")
        found = _explain_segment(part, segments[number], shown)
        if found is not None:
            return Mismatch(pattern_at + found.pattern_at, key_at + found.key_at, found.reason)
        pattern_at += len(part) + 1
        key_at += len(segments[number]) + 1
    if below and len(segments) == len(parts):
        return Mismatch(len(pattern) - 1, len(key), f"the key ends here, but the pattern needs {shown!r} next")
    if not below and len(segments) > len(parts):
        return Mismatch(
            len(pattern),
            key_at - 1,
            f"the pattern ends here, but the key continues: end the pattern with {shown!r} to match keys below it",
        )
    return None


def _explain_segment(part: bytes, segment: bytes, separator: str) -> Mismatch | None:
    """Compare one segment of a pattern with one of a key."""
    literal, star, rest = part.partition(b"*")
    at = 0
    while at < len(literal) and at < len(segment) and literal[at] == segment[at]:
        at += 1
    if at < len(literal):
        if at == len(segment):
            return Mismatch(at, at, "the key's segment ends here, but the pattern's continues")
        return Mismatch(at, at, "pattern and key differ here")
    if not star:
        if at < len(segment):
            return Mismatch(at, at, "the pattern's segment ends here, but the key's continues")
        return None
    behind = len(rest) - len(rest.lstrip(b"*"))
    if behind < len(rest):
        return Mismatch(
            at + 1 + behind,
            len(segment),
            f"'*' takes everything up to the next {separator!r} or the end, so nothing is left for what follows it",
        )
    return None
