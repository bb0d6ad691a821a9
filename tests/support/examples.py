"""How many examples a property test tries."""

from __future__ import annotations

from hypothesis import settings

__all__ = ["examples"]


def examples(thorough: int) -> int:
    """Return the number of examples in the profile in use, from that in the profile ``thorough``.

    ``tests/conftest.py`` has the profiles; one has as many examples as a test without settings of its own tries.
    """
    return max(1, round(thorough * settings().max_examples / 100))
