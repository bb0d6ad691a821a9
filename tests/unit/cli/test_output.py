"""Text for people: escaping that can be undone, plurals, progress."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sbus.cli.main import _Failure
from sbus.cli.output import Progress, escape, pluralize

PAYLOADS = st.binary(max_size=20) | st.text(max_size=10).map(str.encode)
NAMED = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"\\": b"\\"}


def unescape(text: bytes) -> bytes:
    """Undo `escape`, as printf(1) does with ``%b``."""
    return re.sub(
        rb"\\(x([0-9a-f]{2})|[ntr\\])", lambda m: bytes([int(m[2], 16)]) if m[2] else NAMED[m[1]], text, flags=re.DOTALL
    )


@given(PAYLOADS, st.booleans())
@example(b"\\x1b", False)
@example("\x1b[31m\x9b\u202e\u2028\ue000\x7f".encode(), False)
def test_escape_is_safe(data: bytes, ascii_only: bool) -> None:
    """Every character is printable, and the bytes can be restored."""
    text = escape(data, ascii_only=ascii_only)
    assert text.isprintable()
    assert not ascii_only or text.isascii()
    assert unescape(text.encode()) == data


def test_escape_keeps_text() -> None:
    """Printable UTF-8 is kept, unless only ASCII may be written."""
    assert escape("Grüße, 世界 ☃".encode()) == "Grüße, 世界 ☃"
    assert escape("ü".encode(), ascii_only=True) == r"\xc3\xbc"


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (0, "row", "0 rows"),
        (1, "row", "1 row"),
        (2_000, "unusual silence", "2,000 unusual silences"),
        (1, "batch", "1 batch"),
        (3, "batch", "3 batches"),
    ],
)
def test_pluralize(count: int, noun: str, text: str) -> None:
    """A noun is in the plural unless its count is one."""
    assert pluralize(count, noun) == text


def test_progress_needs_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Where standard error is not a terminal, no progress is written to it."""
    progress = Progress()
    progress.show("1 of 2")
    progress.clear()
    assert capsys.readouterr() == ("", "")


def test_progress_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal each text replaces the one before, and clearing it twice clears it once."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    progress = Progress()
    progress.clear()
    progress.show("1 of 2")
    progress.show("2 of 2")
    progress.clear()
    progress.clear()
    assert re.sub(r"\r\x1b\[K", "<", capsys.readouterr().err) == "<1 of 2<2 of 2<"


def test_a_failure_with_the_end_of_a_log(capfd: pytest.CaptureFixture[str]) -> None:
    """The lines of a log stay lines; what could harm a terminal is text."""
    _Failure("it has ended; its log:\none\x1b[2J\ntwo", 1).show()
    assert capfd.readouterr().err == "sbus: it has ended; its log:\none\\x1b[2J\ntwo\n"
