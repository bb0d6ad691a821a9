"""A session on a backend without sockets or time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator
from typing import Any

from sbus.client.connecting import Backoff
from sbus.client.core import Message
from sbus.client.options import ConnectOptions
from sbus.client.session import Session
from sbus.client.subscription import QueuedSubscription
from tests.unit.client.fakes import WithoutCalls

WHOAMI = b"CMSG !/cred/whoami"
NAME = b"!/cred/1/2/3"
ASKED = b"CMSG bye/on", b"CMSG denied/on"


class Waiter:
    """A waiter whose coroutines resume at once when it completes, as with Twisted."""

    def __init__(self) -> None:
        self.outcome: Any = None
        self.waiting: list[Running] = []

    def set_result(self, value: bytes) -> None:
        self._end(value)

    def set_exception(self, error: Exception) -> None:
        self._end(error)

    def _end(self, outcome: Any) -> None:
        if self.outcome is None:
            self.outcome = outcome
            for running in self.waiting:
                running.resume()

    def __await__(self) -> Generator[Waiter, None, bytes]:
        if self.outcome is None:
            yield self
        if isinstance(self.outcome, Exception):
            raise self.outcome
        outcome: bytes = self.outcome
        return outcome


class Running:
    """A coroutine that runs as far as it can."""

    def __init__(self, call: Coroutine[Any, None, Any]) -> None:
        self._call = call
        self.is_done = False
        self.result: Any = None
        self.resume()

    def resume(self) -> None:
        try:
            waiter: Waiter = self._call.send(None)
        except StopIteration as end:
            self.is_done, self.result = True, end.value
        except Exception as error:
            self.is_done, self.result = True, error
        else:
            waiter.waiting.append(self)


class Sub(QueuedSubscription):
    def get(self) -> Running:
        return Running(self._get())


class FakeSession(WithoutCalls[Sub], Session[Sub]):
    """A session whose server is controlled by the test.

    :ivar sent: packets that the server has received on this connection, but for the questions that begin it.
    :ivar room: packets that the socket still takes; None for any number.
    :ivar answers: outcomes of attempts to connect: an error to raise, or a function to call once connected.
    :ivar naps: the pauses; each ends when its waiter completes.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__("/fake", ConnectOptions(**{"max_packet": 1000, "bundles": False, **settings}))
        self.soon: list[Callable[[], None]] = []
        self.connected = True
        self.reading = True
        self.sent: list[bytes] = []
        self.room: int | None = None
        self.answers: deque[Any] = deque()
        self.naps: list[tuple[float, Waiter]] = []
        self.failures: list[BaseException] = []
        self.ends: list[Exception] = []
        self.attempts: list[Running] = []
        self.core.connected(1 << 20)
        self._flush()

    # the server

    def arrive(self, *packets: bytes) -> None:
        self._receive_packets(list(packets))

    def turn(self) -> None:
        """End the turn of the loop."""
        soon, self.soon = self.soon, []
        for call in soon:
            call()

    def reply(self) -> None:
        """Answer every ``whoami`` of this connection that has no reply yet."""
        questions, self.sent = self.sent.count(WHOAMI), [p for p in self.sent if p != WHOAMI]
        self.arrive(*[WHOAMI + b"\0" + NAME] * questions)

    def wake(self) -> None:
        """End the newest pause."""
        self.naps[-1][1].set_result(b"")

    # what a backend does

    def waiter(self) -> Waiter:
        return Waiter()

    def callback_failed(self, error: BaseException) -> None:
        self.failures.append(error)

    def run_handler(self, handler: Coroutine[Any, Any, None], ended: Callable[[], None]) -> bool:
        async def run() -> None:
            await handler
            self.soon.append(ended)

        Running(run())
        return True

    def _make_subscription(self, callback: Callable[[Message], Any] | None) -> Sub:
        return Sub(self, callback)

    def _flush(self) -> None:
        while self.connected and self.room != 0 and (taken := self.outbox.take(1)):
            if taken[0] not in ASKED:
                self.sent += taken
                if self.room is not None:
                    self.room -= 1
            self.outbox.ack(taken, 1)

    def _try_send(self, packets: list[bytes]) -> int:
        count = 0 if not self.connected else len(packets) if self.room is None else min(self.room, len(packets))
        self.sent += packets[:count]
        if self.room is not None:
            self.room -= count
        return count

    def _call_soon(self, call: Callable[[], None]) -> None:
        self.soon.append(call)

    def _set_reading(self, reading: bool) -> None:
        assert reading is not self.reading
        self.reading = reading

    async def _open(self) -> None:
        answer = self.answers.popleft() if self.answers else None
        if isinstance(answer, Exception):
            raise answer
        self.connected = True
        self.core.connected(1 << 20)
        self.sent = []
        if answer is not None:
            answer()
        self._flush()

    def is_connected(self) -> bool:
        return self.connected

    def _detach(self) -> None:
        self.connected = False

    def _sleep(self, seconds: float) -> Waiter:
        self.naps.append((seconds, Waiter()))
        return self.naps[-1][1]

    def wait_drained(self) -> Waiter:
        self._flush()
        waiter = Waiter()
        self.outbox.wait(waiter)
        return waiter

    def _start_reconnecting(self) -> None:
        self.attempts.append(Running(self._reconnect_loop()))

    def _on_end(self, error: Exception) -> None:
        self.ends.append(error)


def lose(session: FakeSession) -> None:
    session._disconnected("the server fell over")


class Exact(Backoff):
    """Pauses of 0, 1, 2, … seconds."""

    def delays(self) -> Iterator[float]:
        yield from range(1000)
