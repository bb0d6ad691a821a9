"""Keys and payloads as JSON."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbus.web.payloads import decode, shown


@given(st.binary(max_size=80))
def test_nothing_is_lost(data: bytes) -> None:
    """Bytes that are shown whole can be sent back as they were."""
    text, encoding = shown(data)
    assert decode(text, encoding) == data


@given(st.text(max_size=40), st.integers(0, 60))
def test_a_cut_text_stays_text(text: str, most: int) -> None:
    """A text that is cut inside a character stays text, without the rest of that character."""
    data = text.encode()
    found, encoding = shown(data, most)
    assert encoding == "text"
    assert data.startswith(found.encode())
    assert len(found.encode()) > min(most, len(data)) - 4


@pytest.mark.parametrize(
    ("text", "encoding", "data"),
    [("ä", "text", b"\xc3\xa4"), ("00 ff", "hex", b"\0\xff"), (base64.b64encode(b"\0").decode(), "base64", b"\0")],
)
def test_encodings(text: str, encoding: str, data: bytes) -> None:
    """A payload is sent as text, in hexadecimal or in base64."""
    assert decode(text, encoding) == data


@pytest.mark.parametrize(("text", "encoding"), [("0", "hex"), ("zz", "hex"), ("?", "base64"), ("a", "rot13")])
def test_what_is_not_encoded_so_is_an_error(text: str, encoding: str) -> None:
    """A payload that does not fit its encoding is an error."""
    with pytest.raises(ValueError, match=r"."):
        decode(text, encoding)
