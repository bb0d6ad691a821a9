r"""Keys as text that is unambiguous: UTF-8 stands as it is; every other byte, and the backslash, is ``\xNN``."""

from __future__ import annotations

import re

import pyarrow as pa
import pyarrow.compute as pc

from sbus.errors import UsageError

__all__ = ["as_text", "from_text", "texts"]

_ESCAPE = re.compile(rb"\\(?:x([0-9a-fA-F]{2}))?")


def as_text(key: bytes) -> str:
    """The text that stands for these bytes; no other bytes have the same."""
    return key.replace(b"\\", rb"\x5c").decode("utf-8", "backslashreplace")


def from_text(text: str) -> bytes:
    r"""The bytes that a text stands for.

    :raises UsageError: if it has a backslash that does not begin ``\xNN``, or is no text at all (lone surrogates).
    """

    def byte(match: re.Match[bytes]) -> bytes:
        if not match[1]:
            raise UsageError(rf"{text!r}: a backslash in a key is written \x5c, and another byte \xNN")
        return bytes((int(match[1], 16),))

    try:
        data = text.encode()
    except UnicodeEncodeError:
        raise UsageError(rf"{text!r} is not text: write the bytes that are not UTF-8 as \xNN") from None
    return _ESCAPE.sub(byte, data)


def texts(keys: pa.Array) -> pa.Array:
    """`as_text` of a whole array: binary in, string out; where all is plain UTF-8, nothing is copied."""
    try:
        plain = keys.cast(pa.utf8())
    except pa.ArrowInvalid:
        pass
    else:
        if not pc.any(pc.match_substring(plain, "\\")).as_py():
            return plain
    distinct = keys.dictionary_encode()
    shown = pa.array([None if key is None else as_text(key) for key in distinct.dictionary.to_pylist()], pa.utf8())
    return shown.take(distinct.indices)
