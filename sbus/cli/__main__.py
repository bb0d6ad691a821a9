"""``python -m sbus.cli``: the command ``sbus`` where its script is not on the path."""

from sbus.cli import run

run()
