"""One epoll set for all SEQPACKET sockets; the reactor watches one descriptor.

Theory of operation
-------------------

The reactor calls `doRead` when any socket is ready. The multiplexer asks its own epoll(7) set, serves up to 64 ready
sockets, then makes the calls that were deferred meanwhile; this is one *pass*. As long as a pass has read something and
nobody objects (`ask_after_pass`), passes follow each other in one turn of the reactor: up to 8 within about 5 ms, and
up to 32 within 0.5 ms.

=====================================  ================================================================================
the reactor watches each socket        the multiplexer
=====================================  ================================================================================
some reactors turn a hang-up into a    epoll, poll, select and asyncio behave alike
lost connection while packets wait,
or do not see the death of an idle
peer
select(2) ends at 1,024 descriptors    it has one
each event costs a turn                one wake-up serves every ready socket
=====================================  ================================================================================

Invariants:

* *No deferred call runs while events are handled* (`call_soon`), so no protocol loses a connection while it iterates
  over receivers.
* *Closing and new attempts have slices* (`close_soon`, `try_again`): a connection that ends costs 60 µs, and thousands
  can end together, or wait for memory.
* *Hang-ups come first.* Packets that a peer sent before it closed are read before sockets that became ready later;
  their owner may take them out of the epoll set (`suspend`), else the kernel reports them forever.
* *An error in one socket reaches no other.* It is logged, and the handler's `failed` cleans up.
* *Nothing is left over.* Without sockets there is no epoll set and no place in the reactor; the table of multiplexers
  holds reactors weakly.

Rejected: a second read of the same socket (a second pass finds other clients' packets, too); one epoll set within
another, either way (it saves 1 µs of 17, and needs private parts of Twisted).
"""

from __future__ import annotations

import math
import select
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol
from weakref import WeakKeyDictionary, ref

from twisted.internet.interfaces import IDelayedCall, IReactorFDSet, IReadDescriptor
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from sbus.seqpacket.interfaces import Reactor
from sbus.seqpacket.pacing import WITH_DESCRIPTORS, AcceptPacer, batch_size
from sbus.syscalls.batch import BATCH, PacketReader

__all__ = ["GONE", "HANGUP", "READ", "RETRY", "WRITE", "Handler", "Multiplexer"]

READ: Final[int] = select.EPOLLIN
WRITE: Final[int] = select.EPOLLOUT
GONE: Final[int] = select.EPOLLHUP
HANGUP: Final[int] = GONE | select.EPOLLERR

_SOCKETS_PER_PASS = 64
"""Ready sockets served in one pass at most."""
_PASSES: Final = range(32)
"""Passes in one turn of the reactor at most. With 8, a round trip on one CPU needs 6 % more CPU time."""
_LONG_PASSES = 8
"""Passes in one turn that have `_PASSES_TIME` together."""
_PASSES_TIME = 0.005
"""Seconds after the first pass, or the second of one socket alone, in which another one begins."""
_SHORT_PASSES_TIME = 0.0005
"""The same once `_LONG_PASSES` passes have been made: the turn then continues only if they were short."""
_DEFERRED_ROUNDS: Final = range(4)
"""Rounds of deferred calls in one pass at most; a deferred call can defer another one."""
_SLICE = 0.001
"""Seconds, about, for closing connections in one turn of the reactor, and for new attempts in `RETRY` seconds."""
_WARN_INTERVAL = 60.0
"""Seconds between two warnings: there may be a cause for one in each pass."""
RETRY: Final = 0.05
"""Seconds until the next attempt to send or to read, after the kernel had no memory."""

_ONLY_READ: Final = frozenset((READ,))
"""The events of nearly all sockets."""


def _stays(found: tuple[int, int]) -> bool:
    return not found[1] & GONE


_Calls = list[tuple[Callable[..., object], tuple[object, ...]]]


class Handler(Protocol):
    """The owner of a socket in the multiplexer."""

    def ready(self, events: int, exclusive: bool) -> None:
        """Handle these events (`READ`, `WRITE`, `HANGUP`) of the socket.

        :param exclusive: no other socket is ready in this pass.
        """

    def failed(self, failure: Failure) -> None:
        """Clean up after `ready` raised an exception, which was logged."""

    def lost(self, reason: Failure) -> None:
        """Close at once: the reactor is stopping."""


@implementer(IReadDescriptor)
class Multiplexer:
    """The sockets of one reactor; get it with `Multiplexer.of`.

    :ivar on_fatal: called, soon, when the sockets are lost because epoll_wait(2) has failed: a process that is there
        for its sockets ends then.
    :ivar has_read: set by a socket that has read something, so that another pass follows.
    :ivar contended: more than one of the sockets that are ready now has something to be read.
    :ivar pass_number: the passes before this one in the same turn of the reactor.
    :ivar accepting: the share of accepting in the work of the reactor.
    """

    _multiplexers: WeakKeyDictionary[Reactor, Multiplexer] = WeakKeyDictionary()
    _log = Logger(namespace="sbus.seqpacket")

    @classmethod
    def of(cls, reactor: Reactor) -> Multiplexer:
        """Return the multiplexer of this reactor; it is made on first use."""
        multiplexer = cls._multiplexers.get(reactor)
        if multiplexer is None:
            multiplexer = cls._multiplexers[reactor] = cls(reactor)
        return multiplexer

    def __init__(self, reactor: Reactor) -> None:
        self._reactor = ref(reactor)  # a strong reference would keep the reactor in the table of multiplexers
        self._epoll: select.epoll | None = None
        self._handlers: dict[int, Handler] = {}
        self._suspended: set[int] = set()  # those that have left the epoll set
        self._warn_at = -math.inf
        self._changes: select.epoll | None = None  # within the other epoll set; see `watch_reads`
        self._watched: set[int] = set()
        self._deferred: _Calls = []
        self._closing: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()
        self._closing_is_due = False
        self._retries: dict[Callable[[], object], None] = {}
        self._retry_timer: IDelayedCall | None = None
        self._dispatching = False
        self.on_fatal: Callable[[], object] | None = None
        self._askers: tuple[Callable[[], bool], ...] = ()
        self._may_pass: Callable[[], bool] = self._may_all_pass
        self.has_read = False
        self.contended = False
        self.pass_number = 0
        self.accepting = AcceptPacer()
        self._readers: dict[tuple[int, bool], PacketReader] = {}

    @property
    def reactor(self) -> Reactor:
        """The reactor whose sockets these are."""
        reactor = self._reactor()
        assert reactor is not None, "the reactor is gone"
        return reactor

    def reader(self, max_packet: int, descriptors: bool = False) -> PacketReader:
        """Return the shared buffers for packets of up to `max_packet` bytes.

        All sockets of the multiplexer use them.

        :param descriptors: receive the descriptors that come with packets.
        """
        place = max_packet, descriptors
        reader = self._readers.get(place)
        if reader is None:
            batch = min(batch_size(max_packet), WITH_DESCRIPTORS if descriptors else BATCH)
            reader = self._readers[place] = PacketReader(max_packet, batch, descriptors=descriptors)
        return reader

    def add(self, fd: int, handler: Handler, events: int) -> None:
        """Watch a descriptor for these events; a hang-up is always reported.

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
        """Watch a descriptor for other events from now on."""
        assert self._epoll is not None
        if fd not in self._suspended:
            self._epoll.modify(fd, events)
        elif events:
            self._epoll.register(fd, events)
            self._suspended.remove(fd)

    def suspend(self, fd: int) -> None:
        """Report nothing of a descriptor, not even its hang-up, until `modify` watches it for something again."""
        if fd >= 0 and fd not in self._suspended and self._epoll is not None:
            self._suspended.add(fd)
            self._unregister(self._epoll, fd)

    def remove(self, fd: int) -> None:
        """Stop watching a descriptor; to be called before it is closed."""
        if self._handlers.pop(fd, None) is None or self._epoll is None:
            return
        self.unwatch_reads(fd)
        if fd in self._suspended:
            self._suspended.remove(fd)
        else:
            self._unregister(self._epoll, fd)
        self._rest()

    def watch_reads(self, fd: int) -> None:
        """Report `WRITE` of a socket whenever its peer has read something and it is writable.

        It may be writable all the time, so changes are reported, which one epoll set cannot do for half of the events
        of a socket. A second set is watched by the first.

        :raises OSError: as epoll_create1(2) and epoll_ctl(2).
        """
        if self._epoll is None or fd in self._watched:
            return
        if self._changes is None:
            changes = select.epoll()
            self._epoll.register(changes.fileno(), READ)
            self._changes = changes
        self._changes.register(fd, WRITE | select.EPOLLET)
        self._watched.add(fd)

    def unwatch_reads(self, fd: int) -> None:
        """Take back a `watch_reads`."""
        if fd in self._watched and self._changes is not None:
            self._watched.remove(fd)
            self._unregister(self._changes, fd)

    def warn_rarely(self, text: str) -> None:
        """Log a warning, at most once in `_WARN_INTERVAL` seconds."""
        now = time.monotonic()
        if now >= self._warn_at:
            self._warn_at = now + _WARN_INTERVAL
            self._log.warn("{text}", text=text)

    def _unregister(self, epoll: select.epoll, fd: int) -> None:
        try:
            epoll.unregister(fd)
        except OSError as e:  # the owner closes the descriptor, which ends the watch too
            self._log.error("Descriptor {fd} could not be taken from the epoll set: {why}", fd=fd, why=str(e))

    def _rest(self) -> None:
        """Leave the reactor if there is nothing to watch."""
        if self._epoll is not None and not self._handlers:
            self.reactor.removeReader(self)
            self._epoll.close()
            self._epoll = None
            if self._changes is not None:
                self._changes.close()
                self._changes = None
                self._watched.clear()
            self._readers.clear()

    def ask_after_pass(self, may_pass: Callable[[], bool]) -> None:
        """Ask, when the ready sockets of a pass are served, before the deferred calls, whether another pass may follow
        in this turn of the reactor."""
        self._ask((*self._askers, may_pass))

    def ask_no_more(self, may_pass: Callable[[], bool]) -> None:
        """Take back an `ask_after_pass`."""
        self._ask(tuple(asker for asker in self._askers if asker != may_pass))

    def _ask(self, askers: tuple[Callable[[], bool], ...]) -> None:
        self._askers = askers
        # A loop would be much of the work of a pass, which nearly always has one asker.
        self._may_pass = askers[0] if len(askers) == 1 else self._may_all_pass

    def _may_all_pass(self) -> bool:
        may_follow = True
        for may_pass in self._askers:  # all of them: they measure, too
            may_follow = may_pass() and may_follow
        return may_follow

    def call_soon(self, call: Callable[..., object], *args: object) -> None:
        """Call once the current events are handled, not in the middle of a batch."""
        if not self._deferred and not self._dispatching:
            self.reactor.callLater(0, self._run_deferred)
        self._deferred.append((call, args))

    def close_soon(self, call: Callable[..., object], *args: object) -> None:
        """As `call_soon`, for a step of closing a connection: these steps are made in slices."""
        self._closing.append((call, args))
        if not self._closing_is_due and not self._dispatching:
            self._continue_closing()

    def _run_deferred(self) -> None:
        calls, self._deferred = self._deferred, []
        for call, args in calls:
            self._call(call, args)

    def _close_some(self) -> None:
        """Make steps of closing connections for the time of a slice."""
        self._closing_is_due = True  # the steps that these steps ask for need no separate turn
        end = time.monotonic() + _SLICE
        while self._closing:
            self._call(*self._closing.popleft())
            if time.monotonic() >= end:
                break
        self._closing_is_due = False
        if self._closing:
            self._continue_closing()

    def _continue_closing(self) -> None:
        self._closing_is_due = True
        self.reactor.callLater(0, self._close_some)

    def try_again(self, call: Callable[[], object]) -> None:
        """Repeat a call that found no memory, or no descriptor, in `RETRY` seconds, or later.

        All such calls share one slice in `RETRY` seconds: a user can have thousands of them.
        """
        self._retries[call] = None
        if self._retry_timer is None:
            self._retry_timer = self.reactor.callLater(RETRY, self._retry_some)

    def try_no_more(self, call: Callable[[], object]) -> None:
        """Take back a `try_again`."""
        self._retries.pop(call, None)
        if self._retry_timer is not None and not self._retries:
            self._retry_timer.cancel()
            self._retry_timer = None

    def _retry_some(self) -> None:
        """Make the calls that have waited longest, for the time of a slice."""
        self._retry_timer = None
        end = time.monotonic() + _SLICE
        for call in tuple(self._retries):
            if call not in self._retries:
                continue  # an earlier call has ended its connection
            del self._retries[call]
            self._call(call, ())
            if time.monotonic() >= end:
                break
        if self._retries and self._retry_timer is None:
            self._retry_timer = self.reactor.callLater(RETRY, self._retry_some)

    def _call(self, call: Callable[..., object], args: tuple[object, ...]) -> None:
        try:
            call(*args)
        except BaseException:
            self._log.failure("A call that the multiplexer deferred has failed")

    def doRead(self) -> None:
        """Serve the ready sockets, in as many passes as they need and may have.

        This is `IReadDescriptor`.
        """
        began = 0.0
        for number in _PASSES:
            self.pass_number = number
            self.has_read = False
            if not self._dispatch() or not self.has_read:
                return
            if self.contended or number & 1:  # while nobody else waits, every second pass is enough
                now = time.monotonic()
                began = began or now
                if now - began >= (_PASSES_TIME if number < _LONG_PASSES - 1 else _SHORT_PASSES_TIME):
                    return

    def look(self) -> bool:
        """Serve the ready sockets, as the reactor would; return whether no work is left for its next turn."""
        self.doRead()
        return not (self._deferred or self._closing)

    def _dispatch(self) -> bool:
        """Make one pass; return whether another one may follow."""
        epoll = self._epoll
        if epoll is None:
            return False
        try:
            ready = epoll.poll(0, _SOCKETS_PER_PASS)
            exclusive = len(ready) < 2
            self.contended = not exclusive and self._are_contended(ready)
        except OSError as e:
            self._log.critical("The sockets cannot be waited for any more, and are lost: {why}", why=str(e))
            if self.on_fatal is not None:
                self.reactor.callLater(0, self.on_fatal)
            raise
        if not ready:
            return False
        self._dispatching = True
        try:
            for fd, events in ready:
                handler = self._handlers.get(fd)
                if handler is None:
                    if self._changes is not None and fd == self._changes.fileno():
                        self._report_reads(self._changes)
                    continue
                try:
                    handler.ready(events, exclusive)
                except BaseException:  # such as SystemExit: the reactor would drop all sockets
                    self._fail(handler)
            may_follow = self._may_pass()
            if self._deferred or self._closing:
                self._after_events()
        finally:
            self._dispatching = False
        return may_follow

    def _report_reads(self, changes: select.epoll) -> None:
        """Serve the sockets whose peers have read something."""
        for fd, _ in changes.poll(0, _SOCKETS_PER_PASS):
            handler = self._handlers.get(fd)
            if handler is None:
                continue
            try:
                handler.ready(WRITE, False)
            except BaseException:
                self._fail(handler)

    def _after_events(self) -> None:
        """Make the calls that were deferred in a pass, and a slice of closing."""
        try:
            for _ in _DEFERRED_ROUNDS:
                if not self._deferred:
                    break
                self._run_deferred()
            if self._closing and not self._closing_is_due:
                self._close_some()
        finally:
            if self._deferred:
                self.reactor.callLater(0, self._run_deferred)

    def _are_contended(self, ready: list[tuple[int, int]]) -> bool:
        """Put the sockets whose peers have hung up first; return whether several have packets to be read."""
        if {events for _, events in ready} == _ONLY_READ:
            return True
        ready.sort(key=_stays)
        return len([events for _, events in ready if events & READ]) > 1

    def _fail(self, handler: Handler) -> None:
        """Clean up after `ready` has raised an exception."""
        failure = Failure()
        self._log.failure("Error in {handler}", failure=failure, handler=handler)
        self._guarded(handler, handler.failed, failure)

    def fileno(self) -> int:
        return -1 if self._epoll is None else self._epoll.fileno()

    def logPrefix(self) -> str:
        return "sbus"

    def connectionLost(self, reason: Failure) -> None:
        """Lose all sockets: the reactor is stopping, and removes its readers."""
        for handler in tuple(self._handlers.values()):
            self._guarded(handler, handler.lost, reason)
        self._handlers.clear()
        self._suspended.clear()
        self._rest()

    def _guarded(self, handler: Handler, method: Callable[[Failure], None], failure: Failure) -> None:
        try:
            method(failure)
        except BaseException:
            self._log.failure("Error in {handler}", handler=handler)
