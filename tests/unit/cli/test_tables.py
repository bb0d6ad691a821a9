"""Columns of a table, and values in them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sbus.cli.tables import format_table


def test_columns() -> None:
    """Each column has a side; the last side given holds for the columns after it."""
    rows = [["test", "size", "seconds", "lost"], ["fanout", "64", "2.003", "0"]]
    assert format_table(rows, "<>") == [
        "test    size  seconds  lost",
        "fanout    64    2.003     0",
    ]


def test_least_widths() -> None:
    """Rows that are printed one by one share least widths; a longer cell is never cut."""
    assert format_table([["a", "1", "x"]], "<><", [3, 4]) == ["a       1  x"]
    assert format_table([["abcdef", "1", "x"]], "<><", [3, 4]) == ["abcdef     1  x"]


def test_no_rows() -> None:
    """Without rows there is nothing to print."""
    assert format_table([], "<>") == []


@given(st.lists(st.lists(st.text("ab", max_size=5), min_size=3, max_size=3), min_size=1), st.text("<>", min_size=1))
def test_columns_begin_together(rows: list[list[str]], alignment: str) -> None:
    """Padded to one length, the lines have each cell within the same limits, on its side."""
    lines = format_table(rows, alignment)
    assert len(lines) == len(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for line, row in zip(lines, rows, strict=True):
        at = 0
        for number, (cell, width) in enumerate(zip(row, widths, strict=True)):
            field = line.ljust(sum(widths) + 4)[at : at + width]
            assert field.strip() == cell
            side = alignment[min(number, len(alignment) - 1)]
            assert field.startswith(cell) if side == "<" else field.endswith(cell)
            at += width + 2
