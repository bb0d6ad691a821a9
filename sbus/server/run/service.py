"""The bus as a Twisted service: listens on an endpoint, and owns the registry."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, cast

from twisted.internet import defer
from twisted.internet.interfaces import IListeningPort, IReactorFDSet, IReactorTime, IStreamServerEndpoint
from twisted.internet.protocol import Factory
from twisted.logger import Logger
from zope.interface import implementer

from sbus.daemon.log_budget import LogBudget
from sbus.daemon.service import MultiService
from sbus.protocol.keys import CURRENT, Dialect, PeerCredentials
from sbus.seqpacket.endpoints import SeqpacketServerEndpoint
from sbus.seqpacket.interfaces import IPeerGate, Reactor
from sbus.seqpacket.multiplexer import Multiplexer
from sbus.server.asks.last_values import LastValueRule
from sbus.server.bus.protocol import BusProtocol
from sbus.server.bus.registry import SubscriptionRegistry
from sbus.server.core.components import FloodControls
from sbus.server.core.credentials import AccessSettings, KernelPolicy
from sbus.server.core.interfaces import ICredentials
from sbus.server.core.limits import Limits
from sbus.server.core.listeners import MAIN, Listener, check_names
from sbus.server.core.users import is_exempt
from sbus.server.ops.audit import AuditLog
from sbus.server.ops.log_observer import LogObserver
from sbus.server.run.arguments import (
    check_credentials,
    check_dialect,
    check_endpoint,
    check_limits,
    check_observer,
    check_policy,
)
from sbus.server.run.sockets import Sockets
from sbus.syscalls.batch import COMPILED
from sbus.syscalls.descriptors import descriptor_limit
from sbus.syscalls.sockets import LONGEST_PACKET, OVERHEAD, grow_send_buffer
from sbus.syscalls.users import has_own_user

if TYPE_CHECKING:
    from sbus.policy import Policy

__all__ = ["BusFactory", "BusService"]


class _LoggedLimits(dict[str, Any]):
    """Limits in a log event: attributes for its format, and a dictionary for a log in JSON."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


@implementer(IPeerGate)
class BusFactory(Factory):
    """Makes a `BusProtocol` for each connection.

    :param registry: the registry that all connections share.
    :param listener: the socket that the factory is for.
    """

    noisy = False

    def __init__(self, registry: SubscriptionRegistry, listener: Listener = MAIN) -> None:
        self.registry = registry
        self.listener = listener

    def admits(self, peer: PeerCredentials) -> bool:
        """See `sbus.seqpacket.interfaces.IPeerGate`."""
        return self.registry.admits(peer, self.listener)

    def buildProtocol(self, addr: Any) -> Any:
        return BusProtocol(self.registry, self.listener)


class BusService(MultiService):
    """A bus as a service for any Twisted application.

    ``BusService(endpoint).setServiceParent(application)`` adds it.

    :param endpoint: where to listen, usually a `SeqpacketServerEndpoint`; the service sets its ``max_packet`` to that
        of the limits.
    :param credentials: the permissions of clients; by default `KernelCredentials`.
    :param limits: the limits of the bus.
    :param policy: the rules about publishing and subscribing (`sbus.policy.load`), besides `credentials`.
    :param dialect: the revision of the protocol to speak.
    :param ignore_violations: drop packets that break the protocol, instead of disconnecting.
    :param observers: observers of the bus, besides the log.
    :param controls: the strategies and orders that clients may choose; by default all installed ones.
    :param public_interest: whether all users may ask about interest; else only root and the server's user.
    :param public_senders: whether all users may ask for senders; else only root and the server's user.
    :param last_values: the patterns whose last values are kept.
    :param name: the name of the bus for people, in the paths of links; by default its address.
    :param secrets_go_up: whether secret messages that are not for clients of this bus are for its link.
    :param clock: an `IReactorTime`; by default the reactor.
    :param owner_of: returns the UID that a UID counts as, for the limits of one user
        (`sbus.server.run.subuid.SubordinateIds.owner`); by default each is its own.
    :param log_budget: the bytes that clients can make the log grow by; by default 10,000 a second.
    :param main: the label and the rules of `endpoint`, by default ``main``, which is for root and the server's user if
        the address is abstract and no `credentials` are given.
    :param listeners: more endpoints, each with its label and rules.
    :raises UsageError: if two endpoints have one name, or an argument is not what it should be.
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
        policy: Policy | None = None,
        dialect: Dialect = CURRENT,
        ignore_violations: bool = False,
        observers: Iterable[Any] = (),
        controls: FloodControls | None = None,
        public_interest: bool = True,
        public_senders: bool = True,
        last_values: tuple[LastValueRule, ...] = (),
        name: str = "",
        secrets_go_up: bool = False,
        clock: IReactorTime | None = None,
        owner_of: Callable[[int], int] | None = None,
        log_budget: LogBudget | None = None,
        main: Listener | None = None,
        listeners: Iterable[tuple[Listener, IStreamServerEndpoint]] = (),
    ) -> None:
        super().__init__()
        if clock is None:
            from twisted.internet import reactor

            clock = IReactorTime(reactor)
        limits = Limits() if limits is None else limits
        has_policy = credentials is not None
        credentials = KernelPolicy().make(AccessSettings()) if credentials is None else credentials
        observers = tuple(observers)
        check_limits(limits)
        check_dialect(dialect)
        check_policy(policy, dialect)
        check_credentials(credentials)
        for observer in observers:
            check_observer(observer)
        if main is None:
            # The other sockets have their own rules.
            is_abstract = isinstance(endpoint, SeqpacketServerEndpoint) and endpoint.resolve().is_abstract
            main = Listener(MAIN.name, is_abstract=is_abstract and not has_policy)
        endpoints = ((main, endpoint), *listeners)
        check_names(listener.name for listener, _ in endpoints)
        for _, each in endpoints:
            check_endpoint(each)
            if isinstance(each, SeqpacketServerEndpoint):
                each.max_packet = limits.max_packet
        self.endpoint = endpoint
        self._log_observer = LogObserver(
            clock, dialect, log_budget, owner_of=owner_of, share_of=lambda uid: self.registry.users.shares.of(uid)
        )
        self._owner_of = owner_of
        audit_log = AuditLog(
            self._log_observer.limiter, dialect, owner_of, generation=lambda: self.registry.guard.generation
        )
        self.registry = SubscriptionRegistry(
            credentials,
            clock,
            limits=limits,
            policy=policy,
            dialect=dialect,
            ignore_violations=ignore_violations,
            controls=controls,
            public_interest=public_interest,
            public_senders=public_senders,
            last_values=last_values,
            name=name or _name_of(endpoint),
            secrets_go_up=secrets_go_up,
            observers=(self._log_observer, audit_log, *observers),
            owner_of=owner_of,
        )
        self.registry.setServiceParent(self)
        self._multiplexer = Multiplexer.of(cast(Reactor, clock)) if IReactorFDSet.providedBy(clock) else None
        self._sockets = Sockets(endpoints, lambda listener: BusFactory(self.registry, listener), self._is_listening)

    def privilegedStartService(self) -> None:
        """Listen while the process may still be root.

        :raises sbus.errors.ListenError: if the address cannot be listened on.
        """
        super().privilegedStartService()
        self._sockets.open()

    def startService(self) -> None:
        """Listen and admit clients.

        :raises sbus.errors.ListenError: if the address cannot be listened on.
        """
        super().startService()
        if not has_own_user():
            self.log.warn(
                "nobody but root counts as the server's user, as UID {uid} also stands for all users without a mapping "
                "in this user namespace: run the server as another user, or map all users (user_namespaces(7))",
                uid=os.geteuid(),
            )
        if self._multiplexer is not None:
            self._multiplexer.ask_after_pass(self.registry.scheduler.may_pass)
            self.registry.scheduler.look = self._multiplexer.look
        if not self._sockets.is_open:
            try:
                self._sockets.open()
            except BaseException:
                super().stopService()
                raise

    def _is_listening(self, listener: Listener, endpoint: IStreamServerEndpoint, port: IListeningPort) -> None:
        address = str(getattr(getattr(endpoint, "address", None), "text", None) or port.getHost())
        if endpoint is not self.endpoint:
            self.log.info(
                "sbus also listens on {address} as {listener}, for {users} and {clients}",
                address=address,
                listener=listener.name,
                users=_users_in_words(listener),
                clients="all clients" if listener.max_clients is None else f"{listener.max_clients} clients",
            )
            return
        limits = _LoggedLimits(asdict(self.registry.limits))
        self.log.info(
            "sbus listens on {address} ({dialect} dialect, {io}); limits: packet {limits.max_packet} B, "
            "{limits.max_clients} clients, {limits.max_patterns} patterns or {limits.max_pattern_bytes} B of them a "
            "client; a user {limits.user_clients} clients{of_some}, {limits.user_accepts} connections a second, "
            "{limits.user_patterns} patterns, {limits.max_match_steps} match steps, {limits.user_payloads} payloads, "
            "memory {user_memory} B; queue {limits.queue_messages} messages or {limits.queue_bytes} B, all queues "
            "{limits.total_queue_bytes} B, memory {memory} B, block time-out {limits.block_timeout} s, payload "
            "{limits.max_payload} B",
            address=address,
            dialect=self.registry.dialect.name,
            io="compiled batches" if COMPILED else "plain Python",
            limits=limits,
            of_some="".join(f" (UID {uid} {most})" for uid, most in sorted(limits.user_clients_of.items())),
            memory=self.registry.users.budget.memory.limit,
            user_memory=self.registry.users.budget.memory.user_limit,
        )
        policy = self.registry.guard.permissions.policy
        if policy is not None:
            from sbus.server.run.policy import log_in_force  # only a bus with a policy needs it

            log_in_force(self.log, policy)
        if not COMPILED:
            self.log.warn(
                "the compiled helper is not in use: each packet costs one system call, so throughput is low; install "
                "sbus with a C compiler, and run it without SBUS_PURE"
            )
        self.warn_of_limits()

    def warn_of_limits(self) -> None:
        """Warn of limits of one user that protect nobody, and of a `max_clients` that the descriptors do not allow."""
        limits = self.registry.limits
        descriptors = descriptor_limit()
        self.warn_of_shares()
        if descriptors <= limits.max_clients:
            self.log.warn(
                "fewer than {max_clients} clients can connect: the process may have {descriptors} descriptors; raise "
                "LimitNOFILE (ulimit -n) or lower --max-clients",
                max_clients=limits.max_clients,
                descriptors=descriptors,
            )
        largest = _largest_packet(limits.max_packet)
        if largest < limits.max_packet:
            self.log.warn(
                "packets of more than {largest} B cannot be passed on, although {wanted} B are allowed: {remedy}",
                largest=largest,
                wanted=limits.max_packet,
                remedy=_explain_largest(largest, limits.max_packet),
            )

    def warn_of_shares(self) -> None:
        """Warn of limits of single users that protect nobody, or have no effect: at the start, and for a new policy."""
        shares, max_clients = self.registry.users.shares, self.registry.limits.max_clients
        memory, all_shares = self.registry.users.budget.memory, (shares.of_most, *shares.of_some.values())
        largest = max(all_shares, key=lambda share: share.memory.most)
        if largest.memory.most > memory.limit:
            self.log.warn(
                "one user may hold all memory, as all clients together may hold {limit} B: lower {setting}, or raise "
                "--max-memory",
                setting=largest.setting("memory"),
                limit=memory.limit,
            )
        largest = max(all_shares, key=lambda share: share.clients.most)
        if largest.clients.most >= max_clients:
            self.log.warn(
                "one user may take the places of all clients, as --max-clients is {max_clients}: lower {setting}, or "
                "raise --max-clients",
                setting=largest.setting("clients"),
                max_clients=max_clients,
            )
        for uid, share in sorted(shares.of_some.items()):
            own = next((name for name in share._fields if getattr(share, name) != getattr(shares.of_most, name)), None)
            owner = uid if self._owner_of is None else self._owner_of(uid)
            if own is None or (owner == uid and not is_exempt(uid)):
                continue
            self.log.warn(
                "{setting} has no effect, as UID {uid} counts as {owner} (--subuid-as-owner): name UID {owner}"
                if owner != uid
                else "{setting} has no effect, as root and the server's user (UID {uid}) have no limits: leave it out",
                setting=share.setting(own),
                uid=uid,
                owner=owner,
            )

    async def stopListening(self) -> None:
        """Admit no more clients; those that are connected stay."""
        await self._sockets.close()

    async def _stop(self) -> None:
        await self.stopListening()
        await super().stopService()
        if self._multiplexer is not None:
            self._multiplexer.ask_no_more(self.registry.scheduler.may_pass)
            self.registry.scheduler.look = None
        self._log_observer.stop()

    def stopService(self) -> defer.Deferred[None]:
        """Stop listening and disconnect all clients.

        The Deferred fires when the sockets are removed.
        """
        self._sockets.cancel()
        return defer.Deferred.fromCoroutine(self._stop())


def _name_of(endpoint: IStreamServerEndpoint) -> str:
    """Return the address of an endpoint, as the name of its bus."""
    return endpoint.address.text if isinstance(endpoint, SeqpacketServerEndpoint) else "bus"


def _users_in_words(listener: Listener) -> str:
    if listener.users is None:
        return "root and the server's user" if listener.is_abstract else "all users"
    return "UID " + ", ".join(map(str, sorted(listener.users)))


def _explain_largest(largest: int, wanted: int) -> str:
    """Return why packets of more than `largest` bytes cannot be sent, and what to do."""
    lower = f"set --max-packet={largest}"
    if largest >= LONGEST_PACKET:
        return f"a send buffer has 1 MiB at most; {lower}"
    wmem_max = (min(wanted, LONGEST_PACKET) + OVERHEAD + 1) // 2  # the kernel doubles it (socket(7))
    most = f" and --max-packet={LONGEST_PACKET}" if wanted > LONGEST_PACKET else ""
    return f"the kernel grants no larger send buffer; set net.core.wmem_max={wmem_max}{most}, or {lower}"


def _largest_packet(max_packet: int) -> int:
    """Return the bytes of the longest packet that a client's socket really takes."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        return grow_send_buffer(ours, max_packet)
