"""The bus as a Twisted service: listens on an endpoint, and owns the registry."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from typing import Any

from twisted.internet import defer
from twisted.internet.interfaces import IListeningPort, IReactorTime, IStreamServerEndpoint
from twisted.internet.protocol import Factory
from twisted.logger import Logger
from twisted.python.failure import Failure

from sbus.daemon.service import MultiService
from sbus.protocol.keys import CURRENT, Dialect
from sbus.seqpacket.endpoints import SeqpacketServerEndpoint
from sbus.server.components import FloodControls
from sbus.server.credentials import AccessSettings, KernelPolicy
from sbus.server.interfaces import ICredentials
from sbus.server.last_values import LastValueRule
from sbus.server.limits import Limits
from sbus.server.log_observer import LogObserver
from sbus.server.protocol import BusProtocol
from sbus.server.registry import SubscriptionRegistry
from sbus.syscalls.batch import COMPILED
from sbus.syscalls.sockets import grow_send_buffer

__all__ = ["BusFactory", "BusService"]


class BusFactory(Factory):
    """Makes a `BusProtocol` for each connection.

    :param registry: the registry that all connections share.
    """

    noisy = False

    def __init__(self, registry: SubscriptionRegistry) -> None:
        self.registry = registry

    def buildProtocol(self, addr: Any) -> Any:
        return BusProtocol(self.registry)


class BusService(MultiService):
    """A bus as a service for any Twisted application.

    ``BusService(endpoint).setServiceParent(application)`` adds it.

    :param endpoint: where to listen, usually a `SeqpacketServerEndpoint`; the service sets its ``max_packet`` to that
        of the limits.
    :param credentials: the permissions of clients; by default `KernelCredentials`.
    :param limits: the limits of the bus.
    :param dialect: the revision of the protocol to speak.
    :param ignore_violations: drop packets that break the protocol, instead of disconnecting.
    :param observers: observers of the bus, besides the log.
    :param controls: the strategies and orders that clients may choose; by default all installed ones.
    :param public_interest: whether all users may ask about interest; else only root and the server's user.
    :param last_values: the patterns whose last values are kept.
    :param clock: an `IReactorTime`; by default the reactor.
    :ivar registry: the registry: ``registry.publish(key, payload)`` publishes from within the program,
        ``registry.counters`` and ``registry.clients`` show the state of the bus.

    The service can be started and stopped any number of times.
    """

    log = Logger(namespace="sbus.server")

    def __init__(
        self,
        endpoint: IStreamServerEndpoint,
        credentials: ICredentials | None = None,
        limits: Limits | None = None,
        *,
        dialect: Dialect = CURRENT,
        ignore_violations: bool = False,
        observers: Iterable[Any] = (),
        controls: FloodControls | None = None,
        public_interest: bool = True,
        last_values: tuple[LastValueRule, ...] = (),
        clock: IReactorTime | None = None,
    ) -> None:
        super().__init__()
        if clock is None:
            from twisted.internet import reactor

            clock = IReactorTime(reactor)
        limits = limits or Limits()
        if isinstance(endpoint, SeqpacketServerEndpoint):
            endpoint.max_packet = limits.max_packet
            if credentials is None:
                credentials = KernelPolicy().make(AccessSettings(is_abstract=endpoint.resolve().is_abstract))
        self.endpoint = endpoint
        self._log_observer = LogObserver(clock, dialect)
        self.registry = SubscriptionRegistry(
            credentials or KernelPolicy().make(AccessSettings()),
            clock,
            limits=limits,
            dialect=dialect,
            ignore_violations=ignore_violations,
            controls=controls,
            public_interest=public_interest,
            last_values=last_values,
            observers=(self._log_observer, *observers),
        )
        self.registry.setServiceParent(self)
        self._port: IListeningPort | None = None
        self._listening: defer.Deferred[None] | None = None

    def privilegedStartService(self) -> None:
        """Listen while the process may still be root.

        :raises sbus.errors.ListenError: if the address cannot be listened on.
        """
        super().privilegedStartService()
        self._listen()

    def startService(self) -> None:
        """Listen and admit clients.

        :raises sbus.errors.ListenError: if the address cannot be listened on.
        """
        super().startService()
        if self._listening is None:
            try:
                self._listen()
            except BaseException:
                super().stopService()
                raise

    def _listen(self) -> None:
        failures: list[Failure] = []
        self._listening = self.endpoint.listen(BusFactory(self.registry)).addCallbacks(
            self._is_listening, failures.append
        )
        if failures:
            self._listening = None
            failures[0].raiseException()

    def _is_listening(self, port: IListeningPort) -> None:
        self._port = port
        limits = self.registry.limits
        self.log.info(
            "sbus listens on {address} ({dialect} dialect, {io}); limits: packet {limits.max_packet} B, "
            "{limits.max_clients} clients, {limits.max_patterns} patterns or {limits.max_pattern_bytes} B of them a "
            "client, {limits.max_match_steps} match steps a user, queue {limits.queue_messages} messages or "
            "{limits.queue_bytes} B, all queues {limits.total_queue_bytes} B, block time-out {limits.block_timeout} s",
            address=str(getattr(getattr(self.endpoint, "address", None), "text", None) or port.getHost()),
            dialect=self.registry.dialect.name,
            io="compiled batches" if COMPILED else "plain Python",
            limits=limits,
        )
        if not COMPILED:
            self.log.warn(
                "the compiled helper is not in use: each packet costs one system call, so throughput is low; install "
                "sbus with a C compiler, and run it without SBUS_PURE"
            )
        largest = _largest_packet(limits.max_packet)
        if largest < limits.max_packet:
            self.log.warn(
                "packets of more than {largest} B cannot be passed on, although {wanted} B are allowed: the kernel "
                "grants no larger send buffer; raise net.core.wmem_max or lower --max-packet",
                largest=largest,
                wanted=limits.max_packet,
            )

    async def stopListening(self) -> None:
        """Admit no more clients; those that are connected stay."""
        port, self._port, self._listening = self._port, None, None
        if port is not None:
            await defer.maybeDeferred(port.stopListening)

    async def _stop(self) -> None:
        await self.stopListening()
        await super().stopService()
        self._log_observer.stop()

    def stopService(self) -> defer.Deferred[None]:
        """Stop listening and disconnect all clients.

        The Deferred fires when the socket is removed.
        """
        if self._listening is not None and self._port is None:
            self._listening.cancel()
        return defer.Deferred.fromCoroutine(self._stop())


def _largest_packet(max_packet: int) -> int:
    """Return the bytes of the longest packet that a client's socket really takes."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        return grow_send_buffer(ours, max_packet)
