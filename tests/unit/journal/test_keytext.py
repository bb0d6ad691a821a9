"""Keys as text are unambiguous, and fast where they are plain."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbus.errors import UsageError
from sbus.journal.keytext import as_text, from_text, texts

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
    """From the text of a key comes the key, so that no two keys have the same."""
    text = as_text(key)
    text.encode()
    assert from_text(text) == key


def test_from_text():
    """Escapes are read in either case; what is no escape is refused with the remedy."""
    assert from_text(r"\xFf\x41") == b"\xffA"
    for wrong in ("\\", r"a\b", r"\x", r"\x4", r"\xgg", "\ud800"):
        with pytest.raises(UsageError, match=r"\\xNN"):
            from_text(wrong)


@given(st.lists(st.one_of(st.none(), KEYS), max_size=6), st.integers(0, 3))
def test_texts(keys, start):
    """An array of keys becomes what each of them becomes by itself, also when it is a part of another."""
    found = texts(pa.array(keys, pa.binary())[start:])
    assert found.type == pa.utf8()
    assert found.to_pylist() == [None if key is None else as_text(key) for key in keys[start:]]
