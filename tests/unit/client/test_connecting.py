"""Finding a bus, the errors when there is none, and the pauses between attempts."""

from __future__ import annotations

import errno
import os
import random
import socket
from itertools import islice
from pathlib import Path
from typing import Any, cast

import pytest
from twisted.internet import error

from sbus.client.connecting import (
    SERVER_CLOSED,
    Backoff,
    backlog_full,
    connect_blocking,
    connect_once,
    describe_connect_error,
    describe_loss,
    find_address,
)
from sbus.errors import AddressError, ConnectError
from sbus.syscalls.sockets import max_sendable
from tests.support.descriptors import descriptors


def test_address_is_looked_for_in_this_order(tmp_path: Path) -> None:
    """The given address comes first, then ``$SBUS_SOCKET``, the runtime directory if it has a bus, the system's."""
    everything = {"SBUS_SOCKET": "/from/variable", "XDG_RUNTIME_DIR": str(tmp_path)}
    assert find_address("/given", everything) == "/given"
    for nothing in (None, ""):
        assert find_address(nothing, everything) == "/from/variable"
        assert find_address(nothing, {**everything, "SBUS_SOCKET": ""}) == "/run/sbus.sock"
    (tmp_path / "sbus.sock").touch()
    assert find_address(None, {"XDG_RUNTIME_DIR": str(tmp_path)}) == str(tmp_path / "sbus.sock")
    assert find_address(None, {}) == "/run/sbus.sock"


def test_address_may_be_a_path(tmp_path: Path) -> None:
    """An address is text or a path; anything else is refused with what it should be."""
    assert find_address(tmp_path / "bus", {}) == str(tmp_path / "bus")
    with pytest.raises(AddressError, match="an address is str or a path, not int"):
        find_address(cast(Any, 7))


def test_both_default_sockets_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an address, the first default socket that exists is the bus; if none does, the error names all."""
    paths = [str(tmp_path / name) for name in ("user.sock", "sbus.sock", "sbus.socket")]
    monkeypatch.setattr("sbus.client.lookup.default_addresses", lambda *environ: list(paths))
    missing = describe_connect_error(paths[1], OSError(errno.ENOENT, ""))
    assert missing.startswith(f"no bus at {paths[1]}, nor at {paths[0]} or {paths[2]}: No such file")
    assert " nor at " not in describe_connect_error(str(tmp_path / "other"), OSError(errno.ENOENT, ""))
    assert " nor at " not in describe_connect_error(paths[1], OSError(errno.EACCES, ""))
    Path(paths[2]).touch()
    assert find_address(None, {}) == paths[2]
    assert " nor at " not in describe_connect_error(paths[1], OSError(errno.ENOENT, ""))
    Path(paths[1]).touch()
    assert find_address(None, {}) == paths[1]


def test_pauses_grow_to_a_limit_and_differ() -> None:
    """The first attempt is immediate; the pauses grow to a limit, and each is shortened at random."""
    exact = Backoff(first=1.0, factor=2.0, longest=5.0, spread=0.0)
    assert list(islice(exact.delays(), 6)) == [0.0, 1.0, 2.0, 4.0, 5.0, 5.0]
    assert list(islice(Backoff(first=20.0, longest=15.0, spread=0.0).delays(), 3)) == [0.0, 15.0, 15.0]
    spread = Backoff(first=1.0, factor=1.0, longest=1.0, spread=0.5)
    delays = list(islice(spread.delays(), 1, 200))
    assert all(0.5 <= delay <= 1.0 for delay in delays)
    assert len(set(delays)) > 100


def test_pauses_go_on_after_an_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exception of a signal handler that interrupts the computation of a pause does not end the attempts."""

    def interrupted() -> float:
        raise KeyboardInterrupt

    delays = Backoff().delays()
    assert next(delays) == 0.0
    with monkeypatch.context() as patch:
        patch.setattr(random, "random", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(delays)
    assert 0.0 < next(delays) <= 0.08


@pytest.fixture
def listening(tmp_path: Path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(str(tmp_path / "bus"))
        server.listen(0)
        yield server


def test_connected_socket_takes_long_packets(listening: socket.socket) -> None:
    """A connected socket does not block, is not inherited, and can send the longest packet."""
    with connect_blocking(listening.getsockname(), 300_000, 1.0) as sock:
        assert sock.getblocking() is False
        assert not os.get_inheritable(sock.fileno())
        assert max_sendable(sock) >= 300_000


def test_full_backlog_is_waited_for(listening: socket.socket) -> None:
    """A full backlog is retried until the timeout."""
    address = listening.getsockname()
    with connect_blocking(address, 1000, None):
        assert connect_once(address, 1000) is None
        with pytest.raises(ConnectError, match="accepts no connections: it is overloaded or stopped"):
            connect_blocking(address, 1000, 0.02)
        assert backlog_full(address).startswith(f"the bus at {address} accepts no connections")
        listening.accept()[0].close()
        connect_blocking(address, 1000, 0.0).close()


def test_failed_connections_leave_no_descriptors(tmp_path: Path) -> None:
    """A failed attempt leaves no descriptor open."""
    before = descriptors()
    for _ in range(3):
        with pytest.raises(ConnectError):
            connect_once(str(tmp_path / "none"), 1000)
    assert not descriptors().items() - before.items()


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    """Each way of failing to connect has its own reason and remedy."""
    (tmp_path / "file").touch()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(tmp_path / "dead"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        stream.bind(str(tmp_path / "stream"))
        stream.listen()
        for name, why, what in (
            ("none", "No such file or directory", "start one (sbus serve --socket="),
            ("dead", "Connection refused", "the server is gone; start it again (it left its socket behind"),
            ("stream", "Protocol wrong type for socket", "that is a socket of another kind"),
            ("file", "Socket operation on non-socket", "that is not a socket; say where the bus is"),
        ):
            with pytest.raises(ConnectError) as raised:
                connect_blocking(str(tmp_path / name), 1000, 1.0)
            assert str(raised.value).startswith(f"no bus at {tmp_path / name}: {why}: {what}")
    with pytest.raises(ConnectError) as raised:
        connect_blocking("@sbus-test-nobody", 1000, 1.0)
    assert "Connection refused: start one (sbus serve --socket=@sbus-test-nobody), or say" in str(raised.value)
    with pytest.raises(AddressError):
        connect_blocking("/dev/fd/3", 1000, 1.0)


def test_remedies_know_the_errors_of_both_worlds() -> None:
    """An OSError, Twisted's error with an errno, and an error without a text are all described."""
    refused = "cannot connect to @x: Permission denied: you lack the permission; ask the operator of the bus"
    assert describe_connect_error("@x", PermissionError(errno.EACCES, "")).startswith(refused)
    assert describe_connect_error("@x", error.ConnectError(osError=errno.EACCES)).startswith(refused)
    assert "say where the bus is" in describe_connect_error("@x", error.UserError())
    assert describe_connect_error("/x", OSError()).startswith("no bus at /x: OSError: say where")


def test_losses_are_described() -> None:
    """EPIPE and ECONNRESET mean that the server closed; other errors are named."""
    assert describe_loss(BrokenPipeError(errno.EPIPE, "")) == SERVER_CLOSED
    assert describe_loss(ConnectionResetError(errno.ECONNRESET, "")) == SERVER_CLOSED
    assert describe_loss(OSError(errno.EIO, "Input/output error")) == "the connection broke: Input/output error"
