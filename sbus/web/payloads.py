"""Keys and payloads as JSON: text where they are UTF-8, else base64."""

from __future__ import annotations

import base64

__all__ = ["Shown", "decode", "shown"]

Shown = tuple[str, str]
"""The text, and ``text`` or ``base64``."""


def shown(data: bytes, most: int | None = None) -> Shown:
    """Return bytes for JSON.

    :param most: the bytes that are shown at most; a character cut in two is left out.
    """
    cut = data if most is None else data[:most]
    for end in range(len(cut), max(-1, len(cut) - 4 if len(cut) < len(data) else len(cut) - 1), -1):
        try:
            return cut[:end].decode(), "text"
        except UnicodeDecodeError:
            continue
    return base64.b64encode(cut).decode(), "base64"


def decode(text: str, encoding: str) -> bytes:
    """Return the bytes of what a page has sent.

    :param encoding: ``text``, ``base64`` or ``hex`` (with or without spaces).
    :raises ValueError: if the text does not fit the encoding, or there is no such encoding.
    """
    if encoding == "text":
        return text.encode()
    if encoding == "base64":
        return base64.b64decode(text, validate=True)
    if encoding == "hex":
        return bytes.fromhex(text)
    raise ValueError(f"encoding {encoding[:20]!r}: use text, base64 or hex")
