"""Patterns that select recorded messages, as the recorder and the readers of its rows check them."""

from __future__ import annotations

from sbus.errors import InvalidKey, UsageError, Violation
from sbus.protocol.keys import CURRENT, Dialect

__all__ = ["check_recorded"]


def check_recorded(pattern: bytes, dialect: Dialect = CURRENT) -> None:
    """Check a pattern that selects recorded messages.

    :raises sbus.errors.InvalidKey: if the protocol forbids the pattern, so that it matches no key.
    :raises sbus.errors.UsageError: if it matches secret messages; the text does not quote the secret part.
    """
    if b"\0" in pattern:
        raise InvalidKey(f"the pattern {pattern!r} contains a NUL byte, which ends a key")
    if dialect.is_secret(pattern):
        raise UsageError(
            f"the pattern {dialect.shown(pattern)} is secret, and secret messages are never recorded: use another"
        )
    try:
        dialect.check(pattern)
    except Violation as violation:
        raise InvalidKey(
            f"the pattern {dialect.shown(pattern)} is not allowed: {violation}", violation.reason
        ) from None
