"""Keys as text: one to one, reversible, and also for whole arrays."""

from __future__ import annotations

import subprocess
import sys

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbus.errors import UsageError
from sbus.journal.keytext import as_text, as_text_array, from_text, printable

KEYS = st.one_of(
    st.binary(max_size=8),
    st.text(max_size=8).map(str.encode),
    st.sampled_from([b"\\", rb"\x41", b"\xc3", b"\xed\xa0\x80"]),
)


@pytest.mark.parametrize(
    ("key", "text"),
    [(b"a/b", "a/b"), ("grün".encode(), "grün"), (b"\xff\n", "\\xff\n"), (rb"a\b", r"a\x5cb"), (b"\xc3/", r"\xc3/")],
)
def test_as_text(key, text):
    """UTF-8 stands as it is; other bytes and backslashes are escaped."""
    assert as_text(key) == text


@given(KEYS)
def test_there_and_back(key):
    """`from_text` restores every key, so no two keys have the same text."""
    text = as_text(key)
    text.encode()
    assert from_text(text) == key


def test_from_text():
    """Hexadecimal digits may be of either case; a backslash that begins no escape is refused with the remedy."""
    assert from_text(r"\xFf\x41") == b"\xffA"
    for wrong in ("\\", r"a\b", r"\x", r"\x4", r"\xgg", "\ud800"):
        with pytest.raises(UsageError, match=r"\\xNN"):
            from_text(wrong)


@given(st.lists(st.one_of(st.none(), KEYS), max_size=6), st.integers(0, 3))
def test_as_text_array(keys, start):
    """An array gives the same texts as its keys do one by one, also if it is a slice of another array."""
    found = as_text_array(pa.array(keys, pa.binary())[start:])
    assert found.type == pa.utf8()
    assert found.to_pylist() == [None if key is None else as_text(key) for key in keys[start:]]


@pytest.mark.parametrize(
    ("text", "shown", "ascii_only"),
    [
        ("räume/küche", "räume/küche", r"r\xc3\xa4ume/k\xc3\xbcche"),
        ("a\udcff\ud800", r"a\xff\xed\xa0\x80", r"a\xff\xed\xa0\x80"),
        ("a\nb\x1b[0m", r"a\x0ab\x1b[0m", r"a\x0ab\x1b[0m"),
        ("\u202egnp", r"\xe2\x80\xaegnp", r"\xe2\x80\xaegnp"),
        ("\ud800", r"\xed\xa0\x80", r"\xed\xa0\x80"),
        (r"a\x5cb", r"a\x5cb", r"a\x5cb"),
    ],
)
def test_printable(text, shown, ascii_only):
    """Control characters, marks of direction and lone surrogates become ``\\xNN``; printable text stands as it is."""
    assert printable(text) == shown
    assert printable(text, ascii_only=True) == ascii_only


def test_no_pyarrow():
    """Importing the module of keys or of times loads neither PyArrow nor NumPy."""
    code = "import sys, sbus.journal.keytext, sbus.journal.clock; print({'pyarrow', 'numpy'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout == "set()\n"
