"""A Unix stream socket that accepts connections, on a reactor that is turned by hand."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from twisted.internet.task import Clock
from twisted.logger import Logger

from sbus.daemon.stream_port import StreamPort
from sbus.syscalls.addresses import parse
from sbus.syscalls.listening import ListeningSocket, listen


class Reactor(Clock):
    """Keeps the readers; the tests read."""

    def __init__(self) -> None:
        super().__init__()
        self.readers: list[Any] = []

    def addReader(self, reader: Any) -> None:
        self.readers.append(reader)

    def removeReader(self, reader: Any) -> None:
        if reader in self.readers:
            self.readers.remove(reader)


class Fixture:
    """A port, and what it has accepted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reactor = Reactor()
        self.accepted: list[bytes] = []
        self.bound: ListeningSocket = listen(parse(str(path)), mode=0o600, stream=True)
        self.port = StreamPort(self.reactor, self.bound, "the socket", Logger(namespace="sbus.tests"), self._take)
        self.port.open()

    def _take(self, sock: socket.socket) -> None:
        self.accepted.append(sock.recv(16))

    def connect(self, data: bytes) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(str(self.path))
            client.send(data)


@pytest.fixture
def fixture(tmp_path: Path) -> Iterator[Fixture]:
    made = Fixture(tmp_path / "socket")
    yield made
    made.bound.sock.close()


def test_accepts_a_few_in_a_turn(fixture: Fixture) -> None:
    """One turn accepts four connections at most, so others are served in between."""
    for number in range(6):
        fixture.connect(b"%d" % number)
    [reader] = fixture.reactor.readers
    reader.doRead()
    assert fixture.accepted == [b"0", b"1", b"2", b"3"]
    reader.doRead()
    assert fixture.accepted[4:] == [b"4", b"5"]


def test_the_path_keeps_its_mode_and_goes(fixture: Fixture) -> None:
    """The path has the mode that it was made with; closing the port removes it."""
    assert stat.S_IMODE(os.stat(fixture.path).st_mode) == 0o600
    fixture.port.close()
    assert not fixture.path.exists()
    assert fixture.reactor.readers == []


def test_a_connection_that_cannot_be_taken_ends_no_port(fixture: Fixture) -> None:
    """Without a descriptor for a connection that was accepted, that one is closed, and the port rests for a second."""

    def refuse(sock: socket.socket) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    [reader] = fixture.reactor.readers
    take, fixture.port._accepted = fixture.port._accepted, refuse
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(str(fixture.path))
        reader.doRead()
        assert fixture.reactor.readers == []
        assert client.recv(1) == b""
    fixture.port._accepted = take
    fixture.reactor.advance(1)
    fixture.connect(b"next")
    fixture.reactor.readers[0].doRead()
    assert fixture.accepted == [b"next"]


def test_rests_without_descriptors(fixture: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without descriptors the port rests for a second; closed meanwhile, it does not come back."""

    def refuse(self: socket.socket) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    reader = fixture.reactor.readers[0]
    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "accept", refuse)
        reader.doRead()
        assert fixture.reactor.readers == []
        fixture.reactor.advance(1)
        assert fixture.reactor.readers == [reader]
        reader.doRead()
    fixture.port.close()
    assert fixture.reactor.getDelayedCalls() == []
