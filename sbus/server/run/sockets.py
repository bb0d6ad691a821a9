"""The sockets at which a bus listens: they are opened together, and closed together."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from twisted.internet import defer
from twisted.internet.interfaces import IListeningPort, IProtocolFactory, IStreamServerEndpoint
from twisted.python.failure import Failure

from sbus.server.core.listeners import Listener

__all__ = ["Sockets"]


class _Socket:
    """One endpoint, and its port while it listens."""

    def __init__(self, listener: Listener, endpoint: IStreamServerEndpoint) -> None:
        self.listener = listener
        self.endpoint = endpoint
        self.port: IListeningPort | None = None
        self.pending: defer.Deferred[None] | None = None


class Sockets:
    """The endpoints of a bus, each with its label.

    :param endpoints: labels and endpoints; the first is that of ``main``.
    :param factory: makes the protocol factory of a socket from its label.
    :param on_listening: called with the label, the endpoint and the port of each socket that listens.
    """

    def __init__(
        self,
        endpoints: Iterable[tuple[Listener, IStreamServerEndpoint]],
        factory: Callable[[Listener], IProtocolFactory],
        on_listening: Callable[[Listener, IStreamServerEndpoint, IListeningPort], object],
    ) -> None:
        self._sockets = [_Socket(listener, endpoint) for listener, endpoint in endpoints]
        self._factory = factory
        self._on_listening = on_listening
        self.is_open = False

    def open(self) -> None:
        """Listen on all endpoints, or on none.

        :raises sbus.errors.ListenError: if an address cannot be listened on.
        """
        self.is_open = True
        for socket in self._sockets:
            failures: list[Failure] = []
            listening = socket.endpoint.listen(self._factory(socket.listener))
            socket.pending = listening.addCallback(self._listens, socket).addErrback(failures.append)
            if failures:
                socket.pending = None
                self.cancel()
                for other in self._sockets:
                    defer.Deferred.fromCoroutine(_stop(other))
                self.is_open = False
                failures[0].raiseException()

    def _listens(self, port: IListeningPort, socket: _Socket) -> None:
        socket.port = port
        self._on_listening(socket.listener, socket.endpoint, port)

    def cancel(self) -> None:
        """Give up the sockets that do not listen yet."""
        for socket in self._sockets:
            if socket.pending is not None and socket.port is None:
                socket.pending.cancel()
            socket.pending = None

    async def close(self) -> None:
        """Stop listening; paths that were made are removed."""
        self.is_open = False
        for closing in [defer.Deferred.fromCoroutine(_stop(socket)) for socket in self._sockets]:
            await closing


async def _stop(socket: _Socket) -> None:
    port, socket.port = socket.port, None
    if port is not None:
        await defer.maybeDeferred(port.stopListening)
