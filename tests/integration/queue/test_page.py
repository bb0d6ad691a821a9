"""The snippets of the pages on queues and on clients, run as they stand."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import pytest

import sbus
from sbus.client import aio
from tests.support import ROOT
from tests.support.queues import QueueProcess, ask
from tests.support.waiting import wait_until

PAYLOADS = [b"a picture", b"no picture", b"another picture"]


def snippet(page: str) -> str:
    """Return the block of a page in which a worker makes thumbnails."""
    text = (ROOT / "docs" / page).read_text()
    blocks = re.findall(r"\.\. code-block:: python\n\n((?:   .*\n|\n)+)", text)
    (found,) = (dedent(block) for block in blocks if "make_thumbnail" in block)
    return found


def run_snippet(code: str, address: str, names: dict[str, Any]) -> None:
    """Run a block at this bus; one with ``async for`` has a connection ``bus``."""
    if "async for" not in code:
        exec(code.replace("sbus.connect(", f"sbus.connect({address!r}, "), names)
        return
    exec(f"async def work(bus):\n{indent(code, '    ')}", names)

    async def main() -> None:
        async with await aio.connect(address) as bus:
            await names["work"](bus)

    asyncio.run(main())


@pytest.mark.parametrize("page", ["queues.rst", "clients/index.rst"])
def test_worker(page: str, shared: Any, spawn: Callable[..., Any], directory: Path, caplog: Any) -> None:
    """A worker goes on after a job that fails, which the queue tries again, and the log says which one it was."""
    spawn(QueueProcess, directory, shared.address, "--queue=thumbnails").wait_started()
    with sbus.connect(str(shared.address)) as publisher:
        numbers = [publisher.enqueue("thumbnails", "k", payload) for payload in PAYLOADS]
    made = []

    def make_thumbnail(payload: bytes) -> None:
        if payload == PAYLOADS[1]:
            raise ValueError(payload)
        made.append(payload)
        if payload == PAYLOADS[2]:
            raise KeyboardInterrupt

    names = {"make_thumbnail": make_thumbnail, "sbus": sbus, "logging": logging}
    with pytest.raises(KeyboardInterrupt):
        run_snippet(snippet(page), str(shared.address), names)
    assert made == [PAYLOADS[0], PAYLOADS[2]]
    assert f"job {numbers[1]}" in caplog.messages
    counts = {"waiting": 0, "ready": 1, "delayed": 1, "out": 0, "dead": 0}  # the last one was released
    wait_until(lambda: ask(shared.address, "ls", "thumbnails")["jobs"] == counts)
