"""``python -m sbus.cli``: the command ``sbus`` without its script."""

from sbus.cli import run

run()
