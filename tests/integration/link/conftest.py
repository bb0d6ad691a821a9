"""Buses with links between them, as processes."""

from __future__ import annotations

import contextlib
import re
import select
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import WHOAMI, Bus, Client

StartBus = Callable[..., Bus]


@pytest.fixture
def tree(spawn: Callable[..., Any], directory: Path) -> StartBus:
    """Start a bus below another one, with everything listed: ``tree('leaf', master)``; wait until the link is up."""

    def start(
        name: str,
        master: Bus | Path | None = None,
        *options: str,
        lists: tuple[str, ...] = ("--upstream-out=", "--upstream-in="),
        wait: bool = True,
        **kwargs: Any,
    ) -> Bus:
        address = master.address if isinstance(master, Bus) else master
        upstream = [] if address is None else [f"--upstream={address}", *lists]
        bus: Bus = spawn(
            Bus, directory, f"--name={name}", *upstream, *options, address=directory / name, **kwargs
        ).wait_started()
        if upstream and wait:
            with contextlib.suppress(AssertionError):  # two processes start one after the other: twice the time
                bus.wait_log("link: linked to")
            bus.wait_log("link: linked to")
        return bus

    return start


def name_of(client: Client) -> bytes:
    """The client's name, as its bus says it."""
    client.send(WHOAMI)
    return client.recv().partition(b"\0")[2]


def link_pid(bus: Bus) -> int:
    """The PID of a bus's newest link."""
    return int(re.findall(r"link (\d+) was started", bus.log)[-1])


def wait_crossing(publisher: Client, key: bytes, receiver: Client) -> None:
    """Wait until messages arrive from one bus at a subscriber of another: links learn of it after it has subscribed."""
    poll = select.poll()
    poll.register(receiver.sock, select.POLLIN)
    while not poll.poll(50):
        publisher.msg(key, b"probe")
    last = publisher.msg(key, b"crossing")
    while receiver.recv() != last:
        pass
    publisher.sync()
