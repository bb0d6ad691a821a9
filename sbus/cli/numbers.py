"""Commands whose arguments may be negative numbers.

``sbus pub sensors/t -3.5`` publishes a temperature. To click, and to getopt(3), such a word is an option, and users
would have to write ``--`` before it. No option of ``sbus`` begins with a digit, so this is unambiguous.
"""

from __future__ import annotations

import re

import click

__all__ = ["CommandWithNumbers"]

_NEGATIVE = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


class CommandWithNumbers(click.Command):
    """A command that takes a word such as ``-3.5`` for an argument."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self._arguments_last(args))

    def _arguments_last(self, words: list[str]) -> list[str]:
        """Move the arguments after the options and ``--``, if one of them is a negative number."""
        if not any(map(_NEGATIVE.fullmatch, words)):
            return words
        options: list[str] = []
        arguments: list[str] = []
        rest = iter(words)
        for word in rest:
            if word == "--":
                arguments += rest
            elif len(word) < 2 or word[0] != "-" or _NEGATIVE.fullmatch(word):
                arguments.append(word)
            else:
                options.append(word)
                if self._takes_next(word):
                    options += [value for value in [next(rest, None)] if value is not None]
        return [*options, "--", *arguments]

    def _takes_next(self, word: str) -> bool:
        """Return whether the word after an option is its value."""
        takes_value = {
            name: not param.is_flag for param in self.params if isinstance(param, click.Option) for name in param.opts
        }
        if word.startswith("--"):
            return takes_value.get(word, False)
        for at, letter in enumerate(word[1:], 1):
            if takes_value.get(f"-{letter}", False):
                return at == len(word) - 1  # else the value follows in the same word
        return False
