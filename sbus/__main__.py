"""``python -m sbus``: the command ``sbus``."""

from sbus.cli import run

run()
