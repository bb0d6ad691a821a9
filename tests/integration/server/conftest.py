"""The options of the server, as its help explains them."""

from __future__ import annotations

import re

import pytest

from tests.integration.server.outputs import output_of


@pytest.fixture(scope="module")
def options():
    """Each option's explanation, as one line, by its long name."""
    text = output_of("sbus", "--help")
    found = {}
    for block in re.split(r"\n(?=  (?:-\w, |    )--)", text.partition("\n\n")[0]):
        match = re.match(r"\s*(?:-\w, )?--([a-z-]+)=?\s+(.*)", block, re.DOTALL)
        if match:
            found[match[1]] = " ".join(match[2].split())
    return found
