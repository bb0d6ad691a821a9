"""One face for the three client libraries, so that one test says how all of them behave.

A test is a coroutine in asyncio. The asyncio client runs in it as it is; the Twisted client on a
reactor over the same event loop, its Deferreds awaited as futures; a blocking client in a thread of
its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

from twisted.internet.asyncioreactor import AsyncioSelectorReactor
from twisted.internet.defer import Deferred
from twisted.logger import globalLogPublisher

from sbus.client import aio, blocking, tx
from sbus.client.core import Message
from sbus.client.session import Session
from sbus.errors import Disconnected
from tests.support.harness import TIMEOUT

__all__ = [
    "ASKED",
    "BACKENDS",
    "AsyncioBackend",
    "Backend",
    "BlockingBackend",
    "Client",
    "Gaps",
    "Sub",
    "TwistedBackend",
    "in_thread",
    "turn",
    "unread",
    "wait_quiet",
    "wait_stuck",
]

ASKED = [b"CMSG bundle/on", b"CMSG bye/on", b"CMSG denied/on"]
"""The questions that every connection begins with."""
_END = object()


class Sub:
    """A subscription of one of the libraries."""

    def __init__(self, client: Client, raw: Any) -> None:
        self._client = client
        self.raw = raw
        self._iterator: Any = None

    async def get(self) -> Message:
        """The next message."""
        message: Message = await self._client.backend.get(self._client, self.raw)
        return message

    async def take(self, count: int) -> list[bytes]:
        """Return the payloads of the next `count` messages."""
        return [message.payload for message in await self._client.backend.get_each(self._client, self.raw, count)]

    async def get_many(self) -> list[Message]:
        """Wait for a message, then return all that are here."""
        async with asyncio.timeout(TIMEOUT):
            messages: list[Message] = await self._client.do(self.raw.get_many)
            return messages

    async def get_ready(self) -> list[Message]:
        return await self._client.do(self.raw.get_ready)

    async def close(self) -> None:
        await self._client.do(self.raw.close)

    def __aiter__(self) -> Sub:
        return self

    async def __anext__(self) -> Message:
        if self._iterator is None:
            self._iterator = await self._client.do(self._client.backend.iterate, self.raw)
        message = await self._client.do(self._client.backend.advance, self._iterator)
        if message is _END:
            raise StopAsyncIteration
        return message


class Watch:
    """A watch of one of the libraries."""

    def __init__(self, client: Client, raw: Any) -> None:
        self._client = client
        self.raw = raw

    async def get(self) -> bool:
        """The next state."""
        state: bool = await self._client.backend.get(self._client, self.raw)
        return state

    async def close(self) -> None:
        await self._client.do(self.raw.close)


class Client:
    """A `Bus` of one of the libraries."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.raw: Any = None

    async def do(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the library in its own thread or loop, and wait for the result."""
        return await self.backend.do(self, function, *args, **kwargs)

    async def publish(self, key: bytes | str, payload: bytes = b"", **kwargs: Any) -> None:
        await self.do(self.raw.publish, key, payload, **kwargs)

    async def publish_batch(self, fill: Callable[[Any], None]) -> None:
        """Fill and send a batch of large messages."""
        await self.do(self.backend.publish_batch, self.raw, fill)

    async def publish_many(self, messages: Iterable[tuple[bytes | str, bytes]]) -> None:
        await self.do(self.raw.publish_many, messages)

    async def subscribe(
        self, pattern: bytes | str, callback: Callable[[Message], Any] | None = None, **kwargs: Any
    ) -> Sub:
        return Sub(self, await self.do(self.backend.subscribe, self.raw, pattern, callback, **kwargs))

    async def has_subscribers(self, key: bytes | str, **kwargs: Any) -> bool:
        answer: bool = await self.do(self.raw.has_subscribers, key, **kwargs)
        return answer

    async def watch_subscribers(self, key: bytes | str) -> Watch:
        return Watch(self, await self.do(self.raw.watch_subscribers, key))

    async def whoami(self, **kwargs: Any) -> bytes:
        me: bytes = await self.do(self.raw.whoami, **kwargs)
        return me

    async def fence(self, **kwargs: Any) -> None:
        await self.do(self.raw.fence, **kwargs)

    async def inbox(self, name: bytes | str) -> tuple[bytes, Sub]:
        inbox = await self.do(self.raw.inbox, name)
        return inbox.key, Sub(self, inbox.subscription)

    async def request(self, *args: Any, **kwargs: Any) -> bytes:
        answer: bytes = await self.do(self.raw.request, *args, **kwargs)
        return answer

    async def respond(self, pattern: bytes | str, handler: Callable[[Any], Any]) -> Sub:
        return Sub(self, await self.do(self.raw.respond, pattern, handler))

    async def answer(self, request: Message, payload: bytes) -> None:
        await self.do(self.raw.answer, request, payload)

    async def fail(self, request: Message, error: str) -> None:
        await self.do(self.raw.fail, request, error)

    async def answer_proofs(self) -> Sub:
        return Sub(self, await self.do(self.raw.answer_proofs))

    async def verify(self, *args: Any, **kwargs: Any) -> bool:
        proved: bool = await self.do(self.raw.verify, *args, **kwargs)
        return proved

    async def control(self, *args: Any) -> None:
        await self.do(self.raw.control, *args)

    async def flood_control(self, **choices: str) -> None:
        await self.do(self.raw.flood_control, **choices)

    async def echo(self, on: bool) -> None:
        await self.do(self.raw.echo, on)

    async def close(self) -> None:
        await self.do(self.raw.close)

    async def settle(self) -> None:
        """Repeat `fence` until it returns, over lost connections, if the client reconnects."""
        while True:
            try:
                return await self.fence()
            except Disconnected:
                if self.raw._error is not None:
                    raise

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Make the client read and reply continuously; a library with an event loop does so anyway."""
        async with self.backend.serving(self):
            yield

    @property
    def socket(self) -> Any:
        raw = self.raw
        return raw.transport.getHandle() if isinstance(raw, tx.Bus) else raw.socket


class Gaps:
    """Records the calls of ``on_gap``, from any thread."""

    def __init__(self) -> None:
        self.reported: list[Exception] = []
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()

    def __call__(self, error: Exception) -> None:
        self.reported.append(error)
        self._loop.call_soon_threadsafe(self._changed.set)

    async def wait(self, count: int) -> None:
        """Wait for `count` calls."""
        async with asyncio.timeout(TIMEOUT):
            while len(self.reported) < count:
                self._changed.clear()
                await self._changed.wait()


class Backend(ABC):
    """A library.

    :ivar failures: what an application's log would tell that it did not handle.
    :ivar settings: for all connections, unless a test says otherwise.
    """

    name: str

    def __init__(self) -> None:
        self.clients: list[Client] = []
        self.failures: list[BaseException] = []
        self.settings: dict[str, Any] = {}

    async def connect(self, address: str | Path | None = None, **settings: Any) -> Client:
        """Return a connected client, which is closed at the end of the test."""
        client = await self._connect(None if address is None else str(address), **{**self.settings, **settings})
        self.clients.append(client)
        return client

    def run(self, test: Coroutine[Any, Any, None]) -> None:
        """Run a test; an error that it leaves unhandled fails it."""
        gc.freeze()  # leave older objects alone, from now on
        try:
            asyncio.run(self._run(test))
        finally:
            gc.collect()  # unretrieved errors are reported when their futures are collected
            self.end()
        assert self.failures == []

    async def _run(self, test: Coroutine[Any, Any, None]) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: self.failures.append(context["exception"]))
        self.begin()
        try:
            async with asyncio.timeout(3 * TIMEOUT):
                await test
                for client in self.clients:
                    await client.close()
            await self.check()
        finally:
            await loop.shutdown_asyncgens()

    def take_failures(self) -> list[BaseException]:
        """Return and forget the errors reported so far, which the test has expected."""
        failures, self.failures = self.failures, []
        return failures

    def begin(self) -> None:  # noqa: B027
        """Prepare; called when the event loop runs."""

    async def check(self) -> None:  # noqa: B027
        """Check that nothing is left; called after the test, when everything is closed."""

    def end(self) -> None:  # noqa: B027
        """Clean up; called when the event loop is gone."""

    @abstractmethod
    async def _connect(self, address: str | None, **settings: Any) -> Client:
        """Connect."""

    @abstractmethod
    async def do(self, client: Client, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See `Client.do`."""

    def subscribe(self, raw: Any, *args: Any, **kwargs: Any) -> Any:
        return raw.subscribe(*args, **kwargs)

    async def publish_batch(self, raw: Any, fill: Callable[[Any], None]) -> None:
        async with raw.payloads() as batch:
            fill(batch)

    async def get(self, client: Client, subscription: Any) -> Any:
        """Return what ``get`` of a subscription or a watch returns."""
        async with asyncio.timeout(TIMEOUT):
            return await self.do(client, subscription.get)

    async def get_each(self, client: Client, subscription: Any, count: int) -> list[Message]:
        """Return the next `count` messages of a subscription."""
        async with asyncio.timeout(TIMEOUT):
            return [await self.do(client, subscription.get) for _ in range(count)]

    def iterate(self, subscription: Any) -> Any:
        return aiter(subscription)

    async def advance(self, iterator: Any) -> Any:
        return await anext(iterator, _END)

    @contextlib.asynccontextmanager
    async def serving(self, client: Client) -> AsyncIterator[None]:
        yield


class AsyncioBackend(Backend):
    name = "asyncio"

    async def _connect(self, address: str | None, **settings: Any) -> Client:
        client = Client(self)
        client.raw = await aio.connect(address, **settings)
        return client

    async def do(self, client: Client, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        return await result if asyncio.iscoroutine(result) else result

    async def check(self) -> None:
        assert asyncio.all_tasks() == {asyncio.current_task()}


class TwistedBackend(Backend):
    name = "twisted"
    reactor: Any

    def begin(self) -> None:
        self.reactor = AsyncioSelectorReactor(asyncio.get_running_loop())
        self._internal = set(self.reactor.getReaders())
        globalLogPublisher.addObserver(self._observe)  # type: ignore[arg-type]

    def end(self) -> None:
        globalLogPublisher.removeObserver(self._observe)  # type: ignore[arg-type]

    def _observe(self, event: dict[str, Any]) -> None:
        if (failure := event.get("log_failure")) is not None:
            self.failures.append(failure.value)

    async def check(self) -> None:
        assert set(self.reactor.getReaders()) == self._internal
        assert self.reactor.getWriters() == []
        assert self.reactor.getDelayedCalls() == []
        for reader in self._internal:
            self.reactor._internalReaders.discard(reader)
            self.reactor.removeReader(reader)
            reader.connectionLost(None)

    async def _connect(self, address: str | None, **settings: Any) -> Client:
        client = Client(self)
        client.raw = await self.do(client, tx.connect, self.reactor, address, **settings)
        return client

    async def do(self, client: Client, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if asyncio.iscoroutine(result):
            result = Deferred.fromCoroutine(result)
        if isinstance(result, Deferred):
            return await result.asFuture(asyncio.get_running_loop())
        return result


class _Thread:
    """A daemon thread that makes one call after the other; a test may abandon it."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def stop(self) -> None:
        self._calls.put(None)

    async def do(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def settle(method: Callable[[Any], None], value: Any) -> None:
            if not future.done():
                method(value)

        def call() -> None:
            try:
                result = function(*args, **kwargs)
            except BaseException as e:
                end, value = future.set_exception, e
            else:
                end, value = future.set_result, result
            with contextlib.suppress(RuntimeError):  # the loop may be gone
                loop.call_soon_threadsafe(settle, end, value)

        self._calls.put(call)
        return await future


class _BlockingClient(Client):
    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.thread = _Thread()


class BlockingBackend(Backend):
    name = "blocking"

    async def _connect(self, address: str | None, **settings: Any) -> Client:
        client = _BlockingClient(self)
        try:
            client.raw = await self.do(client, blocking.connect, address, **settings)
        except BaseException:
            client.thread.stop()
            raise
        return client

    async def do(self, client: Client, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        assert isinstance(client, _BlockingClient)
        return await client.thread.do(function, *args, **kwargs)

    def publish_batch(self, raw: Any, fill: Callable[[Any], None]) -> Any:
        with raw.payloads() as batch:
            fill(batch)

    def subscribe(self, raw: Any, pattern: Any, callback: Any = None, **kwargs: Any) -> Any:
        subscription = raw.subscribe(pattern, callback, **kwargs)
        if callback is None:
            subscription._claim()  # a queue of its own; `get_ready` would take last values that are here already
        return subscription

    async def get(self, client: Client, subscription: Any) -> Any:
        return await self.do(client, subscription.get, TIMEOUT)

    async def get_each(self, client: Client, subscription: Any, count: int) -> list[Message]:
        # A thread switch for each message would cost more than everything else.
        return await self.do(client, lambda: [subscription.get(TIMEOUT) for _ in range(count)])

    def iterate(self, subscription: Any) -> Any:
        return iter(subscription)

    def advance(self, iterator: Any) -> Any:
        return next(iterator, _END)

    @contextlib.asynccontextmanager
    async def serving(self, client: Client) -> AsyncIterator[None]:
        stop = await self.connect(client.raw.address)  # publishes the message that ends the reading
        key = await client.whoami() + b"/serving"
        ended = await client.subscribe(key)
        await client.fence()
        reading = asyncio.ensure_future(client.do(ended.raw.get))
        try:
            yield
        finally:
            await stop.publish(key)
            await reading
            await ended.close()

    async def check(self) -> None:
        for client in self.clients:
            assert isinstance(client, _BlockingClient)
            client.thread.stop()


BACKENDS: tuple[type[Backend], ...] = (BlockingBackend, AsyncioBackend, TwistedBackend)


async def in_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wait for a blocking call in a thread; abandon it after the timeout."""
    thread = _Thread()
    try:
        return await asyncio.wait_for(thread.do(function, *args, **kwargs), TIMEOUT)
    finally:
        thread.stop()


async def turn() -> None:
    """Run the event loop for a few turns."""
    for _ in range(5):
        await asyncio.sleep(0)


async def wait_quiet(progress: Callable[[], int]) -> None:
    """Wait until something has made progress and then stops, while the server is paused."""
    last, turns = -1, 0
    while turns < 60 or not last:
        await asyncio.sleep(0.002)  # there is no event for the absence of progress
        last, turns = (last, turns + 1) if progress() == last else (progress(), 0)


async def wait_stuck(progress: Callable[[], int], bystander: Client) -> None:
    """Wait until something makes no more progress, although the server and the loop run."""
    last, turns = -1, 0
    while turns < 30:
        await bystander.fence()
        last, turns = (last, turns + 1) if progress() == last else (progress(), 0)


def unread(client: Client) -> int:
    """Return the number of unread messages that a library with an event loop keeps."""
    assert isinstance(client.raw, Session)
    subscriptions: list[Any] = list(client.raw.core.sinks())
    return sum(len(subscription._messages) for subscription in subscriptions)
