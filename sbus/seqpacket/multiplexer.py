"""One place in the reactor for all SEQPACKET sockets: an epoll set that the reactor watches as one descriptor.

Reactors differ: some turn a hang-up into a lost connection although packets still wait to be read,
some do not see the death of a peer whose socket is neither read nor written, select(2) ends at
1024 descriptors, and each event costs a turn through logging contexts. Behind a multiplexer all of them
behave alike: the multiplexer asks its own epoll(7), and one wake-up serves every socket that is ready.
"""

from __future__ import annotations

import select
from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

from twisted.internet.interfaces import IReactorFDSet, IReadDescriptor
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from sbus.syscalls.batch import PacketReader

__all__ = ["HANGUP", "READ", "WRITE", "Handler", "Multiplexer"]

READ: int = select.EPOLLIN
WRITE: int = select.EPOLLOUT
HANGUP: int = select.EPOLLHUP | select.EPOLLERR

_EVENTS = 64
"""Sockets served in one turn of the reactor at most, so that its other work gets its turn."""
_ROUNDS = range(8)
"""How often in one turn we look who is ready, while there is something to read."""
_SOON_ROUNDS = range(4)
"""How often in one turn the calls put off are run, as these may put off others."""


class Handler(Protocol):
    """Somebody with a socket in the multiplexer."""

    def ready(self, events: int, exclusive: bool) -> None:
        """The socket is ready (`READ`, `WRITE`, `HANGUP`); `exclusive`: nobody else is in this turn."""

    def failed(self, failure: Failure) -> None:
        """`ready` raised an exception (which was logged): clean up."""

    def lost(self, reason: Failure) -> None:
        """The reactor gives everything up, as it is stopping: close at once."""


@implementer(IReadDescriptor)
class Multiplexer:
    """The sockets of one reactor; get it with `Multiplexer.of`. It is in the reactor only while it has sockets.

    :ivar has_read: set by a socket that has read something: more may have come since, for it or for others.
    :ivar contended: more than one of those that are ready now has something to be read.
    :ivar round: how often we have looked before who is ready, in this turn of the reactor.
    """

    _multiplexers: WeakKeyDictionary[Any, Multiplexer] = WeakKeyDictionary()
    _log = Logger(namespace="sbus.seqpacket")

    @classmethod
    def of(cls, reactor: Any) -> Multiplexer:
        """The multiplexer of this reactor, made on first use."""
        multiplexer = cls._multiplexers.get(reactor)
        if multiplexer is None:
            multiplexer = cls._multiplexers[reactor] = cls(reactor)
        return multiplexer

    def __init__(self, reactor: Any) -> None:
        self._reactor = ref(reactor)  # else the table of multiplexers would keep it for ever
        self._epoll: select.epoll | None = None
        self._handlers: dict[int, Handler] = {}
        self._soon: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self._dispatching = False
        self.has_read = False
        self.contended = False
        self.pass_number = 0
        self._readers: dict[int, PacketReader] = {}

    @property
    def reactor(self) -> Any:
        """The reactor whose sockets these are."""
        return self._reactor()

    def reader(self, max_packet: int) -> PacketReader:
        """The buffers for packets of this size, which all sockets of the multiplexer share."""
        reader = self._readers.get(max_packet)
        if reader is None:
            # Large packets come in smaller batches, so that the buffers stay within 32 MiB or so.
            batch = max(1, min(64, (32 << 20) // max_packet))
            reader = self._readers[max_packet] = PacketReader(max_packet, batch)
        return reader

    def add(self, fd: int, handler: Handler, events: int) -> None:
        """Watch a descriptor; a hang-up is always told.

        :raises OSError: as epoll_ctl(2).
        """
        if self._epoll is None:
            self._epoll = select.epoll()
        try:
            if not self._handlers:
                IReactorFDSet(self.reactor).addReader(self)
            self._epoll.register(fd, events)
        except BaseException:
            self._rest()
            raise
        self._handlers[fd] = handler

    def modify(self, fd: int, events: int) -> None:
        """Watch for other events from now on."""
        assert self._epoll is not None
        self._epoll.modify(fd, events)

    def remove(self, fd: int) -> None:
        """Watch a descriptor no more; to be called before it is closed."""
        if self._handlers.pop(fd, None) is None or self._epoll is None:
            return
        self._epoll.unregister(fd)
        self._rest()

    def _rest(self) -> None:
        """Leave the reactor if there is nothing to watch."""
        if self._epoll is not None and not self._handlers:
            self.reactor.removeReader(self)
            self._epoll.close()
            self._epoll = None
            self._readers.clear()

    def call_soon(self, call: Callable[..., object], *args: Any) -> None:
        """Call when the events in hand are dealt with: for what must not happen in the middle of a batch."""
        if not self._soon and not self._dispatching:
            self.reactor.callLater(0, self._run_soon)
        self._soon.append((call, args))

    def _run_soon(self) -> None:
        calls, self._soon = self._soon, []
        for call, args in calls:
            try:
                call(*args)
            except Exception:
                self._log.failure("A call put off by the multiplexer failed")

    def doRead(self) -> None:
        """The reactor's word that some socket is ready (`IReadDescriptor`).

        As long as something is read, look again who is ready: that costs less than a turn of the
        reactor, and whoever has become ready is served before anybody's next share.
        """
        for self.pass_number in _ROUNDS:
            self.has_read = False
            self._dispatch()
            if not self.has_read:
                return

    def _dispatch(self) -> None:
        """Serve the sockets that are ready now."""
        if self._epoll is None:
            return
        ready = self._epoll.poll(0, _EVENTS)
        if not ready:
            return
        exclusive = len(ready) == 1
        self.contended = not exclusive and len([events for _, events in ready if events & READ]) > 1
        self._dispatching = True
        try:
            for fd, events in ready:
                handler = self._handlers.get(fd)
                if handler is None:
                    continue
                try:
                    handler.ready(events, exclusive)
                except Exception:
                    failure = Failure()
                    self._log.failure("Error in {handler}", failure=failure, handler=handler)
                    self._tell(handler, handler.failed, failure)
            for _ in _SOON_ROUNDS:
                if not self._soon:
                    break
                self._run_soon()
        finally:
            self._dispatching = False
            if self._soon:
                self.reactor.callLater(0, self._run_soon)

    def fileno(self) -> int:
        return -1 if self._epoll is None else self._epoll.fileno()

    def logPrefix(self) -> str:
        return "sbus"

    def connectionLost(self, reason: Failure) -> None:
        """The reactor gives us up, as it does with everything when it stops: so all our sockets are lost."""
        for handler in tuple(self._handlers.values()):
            self._tell(handler, handler.lost, reason)
        self._handlers.clear()
        self._rest()

    def _tell(self, handler: Handler, method: Callable[[Failure], None], failure: Failure) -> None:
        try:
            method(failure)
        except Exception:
            self._log.failure("Error in {handler}", handler=handler)
