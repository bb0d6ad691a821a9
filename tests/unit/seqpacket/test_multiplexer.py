"""The multiplexer: one epoll set behind every reactor."""

from __future__ import annotations

import gc
import os
import weakref

import pytest
from twisted.internet import main
from twisted.internet.interfaces import IReadDescriptor
from twisted.python.failure import Failure
from zope.interface.verify import verifyObject

from sbus.seqpacket.multiplexer import HANGUP, READ, WRITE, Multiplexer
from sbus.seqpacket.transport import PacketTransport
from tests.support.descriptors import descriptors
from tests.support.reactors import HandTurnedReactor, Recorder, socket_pair
from tests.unit.seqpacket.handlers import Handler

# --- in the reactor, and out of it ----------------------------------------------------------------


def test_in_the_reactor_while_it_has_sockets(reactor, multiplexer, handlers):
    """The multiplexer is in the reactor only while it has a socket."""
    assert reactor.getReaders() == []
    assert multiplexer.fileno() == -1
    one, two = handlers(), handlers()
    assert reactor.getReaders() == [multiplexer]
    assert os.readlink(f"/proc/self/fd/{multiplexer.fileno()}") == "anon_inode:[eventpoll]"
    one.close()
    assert reactor.getReaders() == [multiplexer]
    two.close()
    assert reactor.getReaders() == []
    assert multiplexer.fileno() == -1
    multiplexer.doRead()


def test_comes_back(reactor, multiplexer, handlers):
    """A multiplexer that was idle goes on with the next socket."""
    handlers().close()
    handler = handlers()
    handler.peer.send(b"one")
    reactor.turn()
    assert handler.events == [READ]


def test_no_descriptor_is_left(reactor):
    """A hundred starts and stops leave no descriptor open, and no buffers in the multiplexer."""
    before = descriptors()
    for _ in range(100):
        recorder = Recorder()
        ours, peer = socket_pair()
        PacketTransport(reactor, ours).start(recorder)
        peer.send(b"one")
        reactor.turn()
        peer.close()
        reactor.settle()
        assert recorder.lost
        assert recorder.packets == [b"one"]
    assert not descriptors().items() - before.items()
    assert reactor.getReaders() == []


def test_one_hub_a_reactor(reactor, multiplexer):
    """A reactor has one multiplexer, and shares it with no other."""
    other = HandTurnedReactor()
    assert Multiplexer.of(reactor) is multiplexer
    assert Multiplexer.of(other) is not multiplexer
    assert Multiplexer.of(other).reactor is other


def test_reactors_do_not_meet(handlers):
    """The turn of one reactor serves no socket of another's."""
    mine, yours = HandTurnedReactor(), HandTurnedReactor()
    one, two = Handler(Multiplexer.of(mine)), Handler(Multiplexer.of(yours))
    one.peer.send(b"one")
    two.peer.send(b"two")
    mine.turn()
    assert (one.events, two.events) == ([READ], [])
    yours.turn()
    assert (one.events, two.events) == ([READ], [READ])
    one.close()
    assert mine.getReaders() == []
    assert len(yours.getReaders()) == 1
    two.close()


def test_hub_goes_with_its_reactor():
    """Neither a reactor that is no longer used nor its multiplexer stays in memory."""
    reactor = HandTurnedReactor()
    Handler(Multiplexer.of(reactor)).close()
    gone = weakref.ref(reactor), weakref.ref(Multiplexer.of(reactor))
    del reactor
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_read_descriptor(multiplexer):
    """The multiplexer is a read descriptor, as the reactor expects."""
    verifyObject(IReadDescriptor, multiplexer)
    assert multiplexer.logPrefix() == "sbus"


# --- what is ready --------------------------------------------------------------------------------


def test_events(reactor, multiplexer, handlers):
    """A socket gets the events that it is watched for, and always a hang-up."""
    handler = handlers(events=WRITE)
    handler.peer.send(b"one")
    reactor.turn()
    assert handler.events == [WRITE]
    multiplexer.modify(handler.sock.fileno(), 0)
    reactor.turn()
    assert handler.events == [WRITE]
    multiplexer.modify(handler.sock.fileno(), READ)
    reactor.turn()
    assert handler.events == [WRITE, READ]
    multiplexer.modify(handler.sock.fileno(), 0)
    handler.peer.close()
    reactor.turn()
    assert handler.events[2] & HANGUP
    assert not handler.events[2] & (READ | WRITE)


def test_alone(reactor, handlers):
    """A socket learns whether it alone is ready."""
    one, two = handlers(), handlers()
    one.peer.send(b"one")
    reactor.turn()
    two.peer.send(b"two")
    reactor.turn()
    assert one.exclusive == [True, False]
    assert two.exclusive == [False]


def test_crowded(reactor, multiplexer, handlers):
    """Sockets are contended if more than one has packets to be read; a socket that is only writable does not count."""
    one, two = handlers(), handlers(events=WRITE)
    seen = []
    one.react = lambda: seen.append(multiplexer.contended)
    one.peer.send(b"one")
    reactor.turn()
    multiplexer.modify(two.sock.fileno(), READ)
    reactor.turn()
    two.peer.send(b"two")
    reactor.turn()
    assert seen == [False, False, True]


def test_so_many_a_turn(reactor, handlers):
    """A turn serves at most 64 sockets; those that are always ready are served in rotation."""
    many = [handlers() for _ in range(200)]
    for handler in many:
        handler.peer.send(b"one")
    reactor.turn()
    assert sum(len(handler.events) for handler in many) == 64
    reactor.turn(3)
    assert {len(handler.events) for handler in many} == {1, 2}


def test_looks_again_while_something_is_read(reactor, multiplexer, handlers):
    """A socket that becomes ready while others read is served in the same turn, and a turn has an end."""
    one, two, mute = handlers(), handlers(), handlers()

    def read():
        one.sock.recv(100)
        multiplexer.has_read = True
        two.peer.send(b"for two")

    one.react = read
    one.peer.send(b"one")
    reactor.turn()
    assert len(one.events) == len(two.events) == 1
    assert mute.events == []
    rounds = []

    def read_for_ever():
        rounds.append(multiplexer.pass_number)
        multiplexer.has_read = True

    two.react = read_for_ever
    reactor.turn()
    assert rounds == list(range(32))


@pytest.mark.parametrize(("seconds", "passes"), [(0.0, 32), (1 / 2048, 8), (1 / 8192, 8), (1 / 16384, 12), (1 / 32, 4)])
def test_many_passes_are_short(multiplexer, handlers, now, seconds, passes):
    """Eight passes have 5 ms, the ones that follow them half a millisecond; a socket alone has two for each look."""
    now[0] = 100.0
    handler = handlers()

    def read_for_ever():
        now[0] += seconds
        multiplexer.has_read = True

    handler.react = read_for_ever
    handler.peer.send(b"one")
    multiplexer.doRead()
    assert len(handler.events) == passes


def test_removed_in_the_same_turn(reactor, multiplexer, handlers):
    """A socket that another one removes in the same turn gets no more calls."""
    one, two = handlers(), handlers()
    one.react = two.close
    two.react = one.close
    one.peer.send(b"one")
    two.peer.send(b"two")
    reactor.turn()
    assert len(one.events) + len(two.events) == 1


def test_remove_all_in_a_turn(reactor, multiplexer, handlers):
    """A turn in which the last socket is removed ends well."""
    handler = handlers()
    handler.react = handler.close
    handler.peer.send(b"one")
    reactor.turn()
    assert reactor.getReaders() == []
    assert handler.failures == []


def test_remove_unknown(multiplexer, handlers):
    """Removing a socket that is not there does nothing."""
    handler = handlers()
    multiplexer.remove(handler.peer.fileno())
    handler.close()
    multiplexer.remove(0)


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("exception", [ZeroDivisionError, SystemExit])
def test_failure_is_contained(reactor, handlers, logged, exception):
    """An exception in one socket is logged and passed to its handler; the others are served.

    That includes those for which the reactor would drop the multiplexer with all its sockets.
    """

    def fail():
        raise exception

    many = [handlers() for _ in range(10)]
    bad = many[4]
    bad.react = fail
    for handler in many:
        handler.peer.send(b"one")
    reactor.turn()
    assert all(handler.events for handler in many)
    assert [len(handler.failures) for handler in many] == [0, 0, 0, 0, 1, 0, 0, 0, 0, 0]
    bad.failures[0].trap(exception)
    assert [event["log_failure"].type for event in logged] == [exception]
    assert logged[0]["handler"] is bad


def test_failure_of_a_failure(reactor, handlers, logged):
    """An exception while a failed socket is cleaned up is logged, and does not reach other sockets."""

    def fail(*_):
        raise ZeroDivisionError

    bad, good = handlers(), handlers()
    bad.react = fail
    bad.failed = fail
    for handler in (bad, good):
        handler.peer.send(b"one")
    reactor.turn()
    assert good.events == [READ]
    assert len(logged) == 2


def test_reactor_gives_up(reactor, multiplexer, handlers, logged):
    """A reactor that stops closes every socket of its multiplexer, even if one of them raises."""

    def fail(reason):
        raise ZeroDivisionError

    many = [handlers() for _ in range(5)]
    many[2].lost = fail
    reason = Failure(main.CONNECTION_LOST)
    for reader in reactor.removeAll():
        reader.connectionLost(reason)
    assert [handler.reasons for handler in many] == [[reason], [reason], [], [reason], [reason]]
    assert len(logged) == 1
    assert multiplexer.fileno() == -1
    late = handlers()
    late.peer.send(b"one")
    reactor.turn()
    assert late.events == [READ]


# --- buffers --------------------------------------------------------------------------------------


def test_buffers_are_shared(multiplexer):
    """Sockets with the same limit read through the same buffers, whose size has a bound."""
    assert multiplexer.reader(1000) is multiplexer.reader(1000)
    assert multiplexer.reader(1000) is not multiplexer.reader(1001)
    for limit in (1000, 409_600, 1 << 20, 16 << 20):
        reader = multiplexer.reader(limit)
        assert reader.max_packet == limit
        assert 1 <= reader.batch <= 64
        assert reader.batch * limit <= 32 << 20
    assert multiplexer.reader(409_600).batch == 64


def test_buffers_are_freed(multiplexer, handlers):
    """An idle multiplexer keeps no buffers."""
    handler = handlers()
    reader = multiplexer.reader(1000)
    handler.close()
    assert multiplexer.reader(1000) is not reader


def test_failed_registration(reactor, multiplexer):
    """A descriptor that cannot be watched leaves nothing behind, neither in the multiplexer nor in the reactor."""
    with open(__file__) as file:
        before = descriptors()
        with pytest.raises(PermissionError):
            multiplexer.add(file.fileno(), Handler.__new__(Handler), READ)
        assert reactor.getReaders() == []
        assert not descriptors().items() - before.items()
