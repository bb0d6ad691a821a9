"""Asking the admin socket over a real one, on real reactors: whatever the bus does, the page gets a text in time."""

from __future__ import annotations

import socket
import time
from typing import Any

from twisted.internet import defer
from twisted.internet.task import deferLater

from sbus.web.admin import Admin, AdminError
from sbus.web.overview import Overview, View
from tests.support.reactors import PacketReactorBuilder, hurried, in_reactor

LATE = "the admin socket has not answered within 5 seconds: the bus is stopped or overloaded"
STATUS = b'{"time": 1.0, "queue_bytes": 5, "counters": {}}'


def answer(status: bytes, body: bytes) -> bytes:
    return b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)


class AskingTests(PacketReactorBuilder):
    """The other end of each socket is this test, so a bus that does not go on needs no process."""

    _reactors = [PacketReactorBuilder._reactors[0], PacketReactorBuilder._reactors[-1]]  # epoll's and asyncio's

    def setUp(self) -> None:
        super().setUp()
        self.address = f"{self.path}/admin"

    def listen(self, backlog: int = 50) -> socket.socket:
        """Listen as the bus does; nothing is accepted yet. From now on, 5 s of the reactor take 0.2 s."""
        self.enterContext(hurried(self.reactor, 25))
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sockets.append(listening)
        listening.bind(self.address)
        listening.listen(backlog)
        listening.setblocking(False)
        return listening

    def fill(self) -> list[socket.socket]:
        """Connect until the backlog is full."""
        waiting: list[socket.socket] = []
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            self._sockets.append(sock)
            try:
                sock.connect(self.address)
            except BlockingIOError:
                return waiting
            waiting.append(sock)

    async def accept(self, listening: socket.socket) -> socket.socket:
        """Accept a connection, and take its request."""
        await self.readable(listening)
        sock, _ = listening.accept()
        self._sockets.append(sock)
        sock.setblocking(False)
        await self.readable(sock)
        sock.recv(65536)
        return sock

    async def tidyUp(self) -> None:
        """Let the ends of connections come about."""
        await self.turns(5)
        await super().tidyUp()

    async def problem(self, asking: Any) -> str:
        """The text of the error that asking fails with."""
        try:
            found = await asking
        except AdminError as error:
            return error.detail
        raise AssertionError(found)

    def ask(self) -> defer.Deferred[Any]:
        return defer.Deferred.fromCoroutine(Admin(self.reactor, self.address).ask("/v1/status"))

    def follow(self) -> defer.Deferred[None]:
        following = Admin(self.reactor, self.address).follow("/v1/events", {}, lambda *_: None)
        return defer.Deferred.fromCoroutine(following)

    @in_reactor
    async def test_no_bus(self) -> None:
        """Without a socket, with one that nobody listens on, and with an impossible path, the text says so at once."""
        missing = f"there is no admin socket at {self.address}: start the bus with --admin={self.address}"
        assert await self.problem(self.ask()) == missing
        self.listen().close()
        assert await self.problem(self.ask()) == missing
        self.address = f"{self.path}/{'x' * 200}"
        assert "a socket's has at most" in await self.problem(self.ask())

    @in_reactor
    async def test_a_bus_that_is_stopped(self) -> None:
        """If connections are not accepted, or requests not answered, the answer is late, and not refused."""
        listening = self.listen()
        assert await self.problem(self.ask()) == LATE
        assert await self.problem(self.follow()) == LATE
        listening.accept()[0].close()
        listening.accept()[0].close()
        asking = self.ask()
        await self.accept(listening)
        assert await self.problem(asking) == LATE

    @in_reactor
    async def test_a_bus_that_answers_slowly(self) -> None:
        """An answer that stays incomplete is late; so is a refusal to send events."""
        listening = self.listen()
        for asking, status in ((self.ask, b"200 OK"), (self.ask, b"403 Forbidden"), (self.follow, b"403 Forbidden")):
            waiting = asking()
            sock = await self.accept(listening)
            sock.send(answer(status, b"x" * 100)[:-50])
            assert await self.problem(waiting) == LATE

    @in_reactor
    async def test_a_full_backlog(self) -> None:
        """While the backlog is full, asking waits without using the processor; as soon as there is room, it goes on."""
        listening = self.listen(0)
        self.fill()
        used = time.process_time()
        assert await self.problem(self.ask()) == LATE
        assert time.process_time() - used < 0.1
        asking = self.ask()
        await deferLater(self.reactor, 0.05)
        listening.accept()[0].close()
        sock = await self.accept(listening)
        sock.send(answer(b"200 OK", STATUS))
        assert (await asking)["queue_bytes"] == 5

    @in_reactor
    async def test_the_page_goes_on(self) -> None:
        """The page shows that the bus is late, and what it says when it goes on; after the end nothing is asked."""
        listening = self.listen(0)
        self.fill()
        looking = Overview(self.reactor, Admin(self.reactor, self.address))
        view = View(depth=1)
        looking.attach(view)
        looking.start()
        events: dict[str, Any] = {}
        while "admin" not in events:
            await deferLater(self.reactor, 0.05)
            events = dict(looking.changes(view))
        assert events == {"admin": {"status": 0, "detail": LATE}}
        listening.accept()[0].close()
        answered = 0
        while "status" not in events:
            try:
                sock, _ = listening.accept()
            except BlockingIOError:
                await deferLater(self.reactor, 0.01)
            else:
                self._sockets.append(sock)
                sock.send(answer(b"200 OK", STATUS))
                answered += 1
            events |= dict(looking.changes(view))
        assert events["admin"]["status"] == 200
        assert answered <= 4
        looking.stop()
        await deferLater(self.reactor, 0.01)
        assert [call for call in self.reactor.getDelayedCalls() if "Overview" in str(call)] == []


globals().update(AskingTests.makeTestCaseClasses())
del AskingTests
