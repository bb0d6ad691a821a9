"""Negative numbers as arguments."""

from __future__ import annotations

from typing import Any

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from sbus.cli.numbers import CommandWithNumbers


@click.command(cls=CommandWithNumbers)
@click.argument("words", nargs=-1)
@click.option("--limit", "-n", type=float)
@click.option("--flag", "-f", is_flag=True)
def command(**given: Any) -> None:
    click.echo(repr(given))


def parsed(*words: str) -> Any:
    result = CliRunner().invoke(command, list(words))
    return eval(result.output) if result.exit_code == 0 else result.output


@pytest.mark.parametrize(
    ("words", "arguments", "options"),
    [
        (["-1", "a"], ("-1", "a"), {}),
        (["a", "-.5", "-f"], ("a", "-.5"), {"flag": True}),
        (["-n", "-5", "x", "-2"], ("x", "-2"), {"limit": -5.0}),
        (["-n-5", "-2"], ("-2",), {"limit": -5.0}),
        (["-fn", "-5", "-2"], ("-2",), {"limit": -5.0, "flag": True}),
        (["--limit=3", "-2", "--flag"], ("-2",), {"limit": 3.0, "flag": True}),
        (["--limit", "-1e6", "-", "-2"], ("-", "-2"), {"limit": -1e6}),
        (["-2", "--", "--flag", "-n"], ("-2", "--flag", "-n"), {}),
        (["--", "-2"], ("-2",), {}),
        (["-f", "--", "x"], ("x",), {"flag": True}),
    ],
)
def test_numbers_are_arguments(words: list[str], arguments: tuple[str, ...], options: dict[str, Any]) -> None:
    """A negative number is an argument wherever it stands, unless it is the value of an option."""
    assert parsed(*words) == {"words": arguments, "limit": None, "flag": False, **options}


@pytest.mark.parametrize("words", [["-x"], ["-2x"], ["-2", "-x"], ["-"], ["-2", "--limit"]])
def test_other_words_are_not(words: list[str]) -> None:
    """Other words that begin with a dash remain options, and unknown ones errors; a lone dash is an argument."""
    result = parsed(*words)
    assert result == {"words": ("-",), "limit": None, "flag": False} if words == ["-"] else "Error: " in result


@given(st.lists(st.one_of(st.floats(-1e9, -1e-9).map(str), st.sampled_from(["-7", "a", "-", "-f"]))))
def test_the_order_of_arguments_stays(words: list[str]) -> None:
    """The arguments keep their order, whatever stands between them."""
    assert parsed(*words)["words"] == tuple(word for word in words if word != "-f")
