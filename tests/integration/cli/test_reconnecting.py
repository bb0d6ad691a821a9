"""``sbus sub --reconnect`` against servers that accept and close at once."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.cli.commands import Sbus
from tests.support.harness import TIMEOUT, WHOAMI


@contextlib.contextmanager
def closing_server(path: Path, closes: int | None) -> Iterator[None]:
    """Run a server that closes connections as it accepts them, and then answers ``whoami``.

    :param closes: how many connections it closes; None for all.
    """

    def serve() -> None:
        accepted = 0
        with contextlib.suppress(OSError), contextlib.ExitStack() as open_connections:
            while True:
                connection = listening.accept()[0]
                accepted += 1
                if closes is None or accepted <= closes:
                    connection.close()
                    continue
                open_connections.enter_context(connection)
                while packet := connection.recv(1 << 16):
                    if WHOAMI in packet:
                        connection.send(WHOAMI + b"\0!/cred/0/0/1")

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(path))
        listening.listen(8)
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join(TIMEOUT)


@pytest.mark.parametrize("options", [[], ["--verbose"], ["--soft=discard", "--verbose"]])
def test_timeout_holds_while_no_connection_lasts(directory: Path, options: list[str]) -> None:
    """If every connection is closed at once, ``--timeout`` still ends the command, with status 124."""
    with closing_server(directory / "bus", None):
        start = time.monotonic()
        with Sbus(
            None, "sub", f"--socket={directory / 'bus'}", "--reconnect", "--timeout=1", *options, "t/", "u/"
        ) as running:
            status, output, errors = running.end()
        assert (status, output) == (124, b""), errors
        assert time.monotonic() - start < TIMEOUT / 2
        assert "timed out" in errors


def test_verbose_tries_again(directory: Path) -> None:
    """With ``--reconnect``, ``--verbose`` waits for a connection that lasts before it reports the subscriptions."""
    with (
        closing_server(directory / "bus", 3),
        Sbus(None, "sub", f"--socket={directory / 'bus'}", "--reconnect", "--verbose", "t/") as running,
    ):
        assert running.process.stderr is not None
        lines: list[bytes] = []
        while not lines or not lines[-1].startswith(b"sbus: subscribed to t/"):
            lines.append(running.process.stderr.readline())
            assert lines[-1], lines
        assert running.process.poll() is None


def test_what_comes_with_a_new_connection_is_printed(directory: Path) -> None:
    """The loss, and a message that is read while the client reconnects, are printed at once: nothing follows them."""
    path = directory / "bus"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(path))
        listening.listen(8)
        listening.settimeout(TIMEOUT)
        with Sbus(None, "sub", f"--socket={path}", "--reconnect", "--receipts", "t/") as running:
            with listening.accept()[0] as first:
                first.send(b"MSG t/first\0")
                assert running.line() == "t/first \n"
            with listening.accept()[0] as connection:
                connection.settimeout(TIMEOUT)
                while WHOAMI not in connection.recv(1 << 16):
                    pass
                connection.send(b"MSG t/a\0b")
                connection.send(WHOAMI + b"\0!/cred/0/0/1")
                lines = []

                def read() -> None:
                    lines.extend([running.line(), running.line()])

                reader = threading.Thread(target=read, daemon=True)
                reader.start()
                reader.join(TIMEOUT)
                assert len(lines) == 2
                assert "reconnect" in lines[0]
                assert lines[1] == "t/a b\n"
