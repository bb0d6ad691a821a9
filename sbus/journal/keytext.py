r"""Keys as unambiguous text.

UTF-8 stands as it is; every other byte, and the backslash, is written ``\xNN``.

A key is bytes; the summaries of segments, Spark and the reports need text. The mapping is one to one: `as_text` never
gives two keys the same text, and `from_text` restores every byte. Its result may hold control characters, because UTF-8
stands as it is; `printable` makes text safe to show, and is not reversible.

Importing the module does not import PyArrow.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from sbus.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["as_text", "as_text_array", "from_text", "printable"]

_ESCAPE = re.compile(rb"\\(?:x([0-9a-fA-F]{2}))?")


def as_text(key: bytes) -> str:
    """Return the text that stands for a key; no other key has the same text."""
    return key.replace(b"\\", rb"\x5c").decode("utf-8", "backslashreplace")


def from_text(text: str) -> bytes:
    r"""Return the key that a text stands for.

    :raises UsageError: if a backslash in the text does not begin ``\xNN``, or the text has lone surrogates.
    """

    def byte(match: re.Match[bytes]) -> bytes:
        if not match[1]:
            raise UsageError(rf"{text!r}: write a backslash in a key as \x5c, and a byte that is not UTF-8 as \xNN")
        return bytes((int(match[1], 16),))

    try:
        data = text.encode()
    except UnicodeEncodeError:
        raise UsageError(rf"{text!r} is not valid text: write each byte that is not UTF-8 as \xNN") from None
    return _ESCAPE.sub(byte, data)


def as_text_array(keys: pa.Array) -> pa.Array:
    """Apply `as_text` to an array: binary in, string out, nulls kept.

    If no key has a byte to escape, nothing is copied.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        plain = keys.cast(pa.utf8())
    except pa.ArrowInvalid:
        pass
    else:
        if not pc.any(pc.match_substring(plain, "\\")).as_py():
            return plain
    distinct = keys.dictionary_encode()
    escaped = [None if key is None else as_text(key) for key in distinct.dictionary.to_pylist()]
    return pa.array(escaped, pa.utf8()).take(distinct.indices)


def printable(text: str, *, ascii_only: bool = False) -> str:
    r"""Replace each character that is not printable by its bytes in UTF-8, as ``\xNN``.

    A byte of a name that is not UTF-8 (:pep:`383`) is written so, too. The result cannot harm a terminal, and does not
    turn the direction of a line around.

    :param ascii_only: replace the characters outside of ASCII as well.
    """
    if text.isprintable() and (text.isascii() or not ascii_only):
        return text
    return "".join(c if c.isprintable() and (c.isascii() or not ascii_only) else _hex(_bytes_of(c)) for c in text)


def _bytes_of(c: str) -> bytes:
    return c.encode("utf-8", "surrogateescape" if "\udc80" <= c <= "\udcff" else "surrogatepass")


def _hex(data: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in data)
