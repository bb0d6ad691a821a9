"""Lists that backlogs share are short here, so that few messages make one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sbus.flood import orders

LONG = 3


@pytest.fixture(scope="module")
def short_lists() -> Iterator[None]:
    """Have lists of `LONG` messages count as long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(orders, "_LONG", LONG)
        yield
