"""The recorder beside a bus, without processes: counting of clients, restarts, and the order of the stop."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from twisted.application.service import MultiService
from twisted.internet import defer
from twisted.internet.error import ProcessDone, ProcessTerminated
from twisted.internet.task import Clock
from twisted.logger import LogLevel, globalLogPublisher
from twisted.python.failure import Failure

from sbus.daemon.options import duration
from sbus.errors import AddressError, UsageError
from sbus.server.core.limits import Limits
from sbus.server.core.users import RECORDER
from sbus.server.run import recorder as recording
from sbus.server.run.recorder import RecordedBus, recorder_command, split_options
from sbus.server.run.twistd import Options
from sbus.syscalls.addresses import Address, connectable_text, parse
from tests.support.buses import Bus

# --- addresses, and what the command line says ----------------------------------------------------


@pytest.mark.parametrize("text", ["@name", "/dev/unix/abstract/00616263", "/run/sbus.sock"])
def test_address_for_a_child(text: str) -> None:
    """The address that the child gets means the same socket."""
    assert parse(connectable_text(parse(text))).name == parse(text).name


def test_address_of_what_was_passed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A passed socket is addressed by the name that it is bound to, independent of the working directory."""
    monkeypatch.chdir(tmp_path)
    assert connectable_text(Address("systemd", b"\0bus\xff", 3)) == "@bus\udcff"
    assert connectable_text(Address("/dev/fd/3", b"/run/bus", 3)) == "/run/bus"
    assert connectable_text(Address("bus", b"bus")) == f"{tmp_path}/bus"
    deep = Address("bus", b"x" * 100)
    assert connectable_text(deep) == "x" * 100  # absolute it would be too long
    with pytest.raises(AddressError, match="a name that cannot be written"):
        connectable_text(Address("/dev/fd/3", b"\0b\0us", 3))


def test_command() -> None:
    """The command has the address, the dialect, the packet length, and the options of the operator."""
    command = recorder_command(
        parse("@bus"), "there", dialect="early", max_packet=99, options=["--sync=0", "-p", "a b"]
    )
    assert command[:2] == [os.fsencode(sys.executable), b"-P"]
    after = command[command.index(b"sbus-recorder") + 1 :]
    assert after == [
        *(b"--supervised", b"--socket=@bus", b"--journal=" + os.fsencode(Path("there").absolute())),
        *(b"--dialect=early", b"--max-packet=99", b"--sync=0", b"-p", b"a b"),
    ]


def test_options_of_the_recorder() -> None:
    """The value of --record-options is split as in a shell."""
    assert split_options("--sync=0 --pattern='a b'") == ["--sync=0", "--pattern=a b"]
    with pytest.raises(UsageError, match="quote as in a shell"):
        split_options("--pattern='")


def refusal(*arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        Options().parseOptions(["--socket=/nowhere/bus", *arguments])
    return str(end.value)


def test_wrong_options() -> None:
    """Options for a recorder without --record are refused."""
    assert "give --record=DIRECTORY too" in refusal("--record-options=--sync=0")
    assert "quote as in a shell" in refusal("--record=there", "--record-options='")


def test_without_arrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without PyArrow, a bus with --record does not start, and the error names the extra."""
    monkeypatch.setattr(recording, "find_spec", lambda name: None)
    assert refusal("--record=there") == (
        "sbus: this needs pyarrow, which is not installed: pip install 'sbusd[recorder]' (see twistd sbus --help)"
    )


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0", 0), ("250ms", 0.25), ("1", 1), ("1.5s", 1.5), ("15m", 900), ("1h", 3600), ("7d", 604_800)],
)
def test_times(text: str, seconds: float) -> None:
    """A time is in seconds unless it has a unit."""
    assert duration("sync")(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "-1", "1 s", "1e3", "nan", "inf", "1w", "1ss"])
def test_no_times(text: str) -> None:
    """Any other text is refused with an example."""
    with pytest.raises(UsageError, match="give a time, such as 500ms"):
        duration("sync")(text)


def test_longest_time() -> None:
    """A time that is too long is refused with the longest one."""
    assert duration("sync")("9" * 10) == 9_999_999_999
    with pytest.raises(UsageError, match=r"give a time from 0 to 1e\+15 seconds"):
        duration("sync")("9" * 16)


# --- the recorder is not counted as a client ------------------------------------------------------


def test_recorders_do_not_count() -> None:
    """A bus is empty when the last client leaves, whether its recorder is connected or not."""
    bus = Bus(limits=Limits(max_clients=1))
    bus.registry.members.sidecars[77] = RECORDER
    recorder = bus.connect(uid=os.geteuid(), pid=77)
    empty = bus.registry.when_empty()
    client = bus.connect(pid=1)
    assert not bus.connect(pid=2).is_connected  # one client is the limit
    recorder.transport.abortConnection()
    bus.settle()
    bus.registry.members.sidecars[78] = RECORDER
    recorder = bus.connect(uid=os.geteuid(), pid=78)
    assert recorder.is_connected
    assert not empty.called
    client.transport.abortConnection()
    bus.settle()
    assert empty.called
    assert recorder.is_connected


def test_a_recorder_is_not_the_last_client() -> None:
    """A recorder that leaves is not the last client."""
    bus = Bus()
    bus.registry.members.sidecars[77] = RECORDER
    empty = bus.registry.when_empty()
    bus.connect(uid=os.geteuid(), pid=77).transport.abortConnection()
    bus.settle()
    assert not empty.called


def test_recorders_are_disconnected_last() -> None:
    """All other clients can be disconnected before the recorder; a bus that stops waits for all."""
    bus = Bus()
    bus.registry.members.sidecars[77] = RECORDER
    recorder, client = bus.connect(uid=os.geteuid(), pid=77), bus.connect(pid=1)
    bus.registry.disconnect_all(sidecars=False)
    bus.settle()
    assert (client.is_connected, recorder.is_connected) == (False, True)
    stopped = bus.registry.stopService()
    assert not stopped.called
    bus.settle()
    assert stopped.called
    assert not recorder.is_connected


# --- supervision ----------------------------------------------------------------------------------


class Child:
    """A fake process (`IProcessTransport`)."""

    def __init__(self, pid: int, protocol: Any) -> None:
        self.pid = pid
        self.protocol = protocol
        self.calls: list[str] = []
        protocol.makeConnection(self)

    def closeStdin(self) -> None:
        self.calls.append("end")

    def signalProcess(self, name: str) -> None:
        self.calls.append(name)

    def end(self, status: int | None = 0, signal: int | None = None) -> None:
        value = ProcessDone(0) if status == 0 else ProcessTerminated(status, signal)
        self.protocol.processEnded(Failure(value))


class Reactor(Clock):
    """A reactor that starts fake processes."""

    def __init__(self) -> None:
        super().__init__()
        self.children: list[Child] = []
        self.error: OSError | None = None

    def callWhenRunning(self, call: Callable[..., Any]) -> None:
        self.callLater(0, call)

    def spawnProcess(self, protocol: Any, executable: bytes, args: Any, env: Any) -> None:
        if self.error is not None:
            raise self.error
        self.children.append(Child(1000 + len(self.children), protocol))


class FakeBus(MultiService):
    """The part of a bus that `RecordedBus` uses."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = self.members = self
        self.attached: dict[str, Any] = {}
        self.sidecars: dict[int, int] = {}
        self.calls: list[Any] = []

    async def stopListening(self) -> None:
        self.calls.append("stop listening")

    def disconnect_all(self, *, sidecars: bool) -> None:
        self.calls.append(("disconnect", sidecars))

    def stopService(self) -> Any:
        self.calls.append("stop")
        return super().stopService()


@pytest.fixture
def reactor() -> Reactor:
    return Reactor()


@pytest.fixture
def bus() -> FakeBus:
    return FakeBus()


@pytest.fixture
def recorded(reactor: Reactor, bus: FakeBus) -> RecordedBus:
    service = RecordedBus(bus, bus, [b"python"], reactor)  # type: ignore[arg-type]
    service.startService()
    assert reactor.children == []
    reactor.advance(0)
    return service


@pytest.mark.usefixtures("recorded")
def test_started_again_and_again(reactor: Reactor, bus: FakeBus) -> None:
    """A recorder that exits is started again after delays that double, and start over after one that lasted."""
    delays: list[float] = []
    for _ in range(9):
        child = reactor.children[-1]
        assert bus.sidecars == {child.pid: RECORDER}
        child.end(None, 9)
        assert not bus.sidecars
        [call] = reactor.getDelayedCalls()
        delays.append(call.getTime() - reactor.seconds())
        reactor.advance(delays[-1])
        assert reactor.children[-1] is not child
    assert delays == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    reactor.advance(60)
    reactor.children[-1].end(1)
    [call] = reactor.getDelayedCalls()
    assert call.getTime() - reactor.seconds() == 0.5


def test_cannot_be_spawned(reactor: Reactor, bus: FakeBus, recorded: RecordedBus) -> None:
    """If a process cannot be started, that is tried again too."""
    reactor.children[-1].end(1)
    reactor.error = OSError(11, "Resource temporarily unavailable")
    reactor.advance(0.5)
    assert not bus.sidecars
    reactor.error = None
    reactor.advance(1)
    assert len(reactor.children) == 2
    assert recorded.running


def stopping(service: RecordedBus, reactor: Reactor) -> defer.Deferred[None]:
    stopped = service.stopService()
    reactor.advance(0)
    return stopped


def test_order_of_the_end(reactor: Reactor, bus: FakeBus, recorded: RecordedBus) -> None:
    """The bus stops listening, disconnects the other clients, waits for the recorder, and only then stops."""
    stopped = stopping(recorded, reactor)
    [child] = reactor.children
    assert bus.calls == ["stop listening", ("disconnect", False)]
    assert child.calls == ["end"]
    assert not stopped.called
    child.end()
    assert stopped.called
    assert bus.calls[2:] == ["stop"]
    assert reactor.getDelayedCalls() == []


def test_recorder_that_does_not_end(reactor: Reactor, recorded: RecordedBus) -> None:
    """A recorder that takes too long is killed."""
    stopped = stopping(recorded, reactor)
    [child] = reactor.children
    reactor.advance(30)
    assert child.calls == ["end", "KILL"]
    child.end(None, 9)
    assert stopped.called


def test_stopped_between_two_recorders(reactor: Reactor, bus: FakeBus, recorded: RecordedBus) -> None:
    """A bus that stops between two recorders does not start another one."""
    reactor.children[-1].end(1)
    assert stopping(recorded, reactor).called
    assert reactor.getDelayedCalls() == []
    assert bus.calls[-1] == "stop"
    assert len(reactor.children) == 1


@pytest.mark.usefixtures("recorded")
def test_output_is_logged(reactor: Reactor) -> None:
    """A line with a level is logged with that level; any other line is an error."""
    logged: list[tuple[Any, str]] = []

    observe: Any = lambda event: logged.append((event["log_level"], event["text"]))  # noqa: E731

    globalLogPublisher.addObserver(observe)
    try:
        [child] = reactor.children
        child.protocol.errReceived(b"info: it goes well\nwarn: it does n")
        child.protocol.errReceived(b"ot\nTraceback: oh\n" + b"x" * 5000)
    finally:
        globalLogPublisher.removeObserver(observe)
    assert logged == [
        (LogLevel.info, "it goes well"),
        (LogLevel.warn, "it does not"),
        (LogLevel.error, "Traceback: oh"),
        (LogLevel.error, "x" * 5000),
    ]
