"""Theories of operation: a module opens with what a maintainer needs, and no more."""

from __future__ import annotations

import re

import pytest

from tests.support import ROOT

MOST_WORDS = 250
_DOCSTRING = re.compile(r'(?:#[^\n]*\n)*r?"""(.*?)"""', re.DOTALL)
_TABLE = re.compile(r"=+(?: +=+)+\n.*\n=+(?: +=+)+", re.DOTALL)


def count_words(docstring: str) -> int:
    """Count the words of a docstring outside its tables, which have no empty lines."""
    paragraphs = re.split(r"\n\s*\n", docstring.strip())
    return sum(len(each.split()) for each in paragraphs if not _TABLE.fullmatch(each))


@pytest.mark.parametrize(
    ("docstring", "words"),
    [
        ("One.\n\nTwo words.\n", 3),
        ("One.\n\n===  ===\nno   no\n===  ===\nno   no\n===  ===\n\nTwo words.\n\n===  ===\nno   no\n===  ===\n", 3),
        ("One::\n\n    a --> b\n", 4),
    ],
    ids=["text", "tables", "diagram"],
)
def test_words_of_tables_do_not_count(docstring: str, words: int) -> None:
    """Words count in text and in diagrams, and not in simple tables."""
    assert count_words(docstring) == words


def test_modules_open_with_a_short_theory() -> None:
    """A module has a docstring, of at most 250 words outside its tables."""
    long = {}
    for path in sorted(each for suffix in ("py", "pyx") for each in (ROOT / "sbus").rglob(f"*.{suffix}")):
        if text := path.read_text():
            docstring = _DOCSTRING.match(text)
            assert docstring, f"{path.relative_to(ROOT)}: begin it with a docstring that says why the module exists"
            if (words := count_words(docstring[1])) > MOST_WORDS:
                long[str(path.relative_to(ROOT))] = words
    assert not long, (
        f"docstrings of more than {MOST_WORDS} words outside tables: {long}: cut what the code says, move what "
        f"concerns one class or function to its docstring, and turn enumerations into a simple table"
    )
