"""`sbus.testing` without a server: what is loaded when, how options are written, how messages are recorded, fakes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator
from typing import Any

import pytest
from twisted.internet.protocol import Protocol

import sbus.testing
from sbus.client.core import Message
from sbus.errors import Closed, UsageError
from sbus.testing import FakePacketTransport, running_bus
from sbus.testing.clients import _Recording
from sbus.testing.servers import command_line


def loaded_by(statement: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after this statement."""
    script = f"import sys; {statement}; print(*sys.modules)"
    return set(
        subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    )


def test_the_plugin_costs_nothing() -> None:
    """A run of pytest that uses no bus loads no part of this package but the plugin itself."""
    loaded = loaded_by("import sbus.testing.pytest_plugin")
    assert {name for name in loaded if name.split(".")[0] == "sbus"} == {
        "sbus",
        "sbus.testing",
        "sbus.version",
        "sbus.testing.pytest_plugin",
    }
    assert "twisted" not in loaded


def test_server_processes_need_no_twisted() -> None:
    """A test that starts a server and records what it sends does not load Twisted."""
    assert "twisted" not in loaded_by("from sbus.testing import running_bus, RecordingClient, AsyncioRecordingClient")


def test_every_name_is_there() -> None:
    """Every public name leads to what is defined in one of the package's modules."""
    for name in sbus.testing.__all__:
        assert getattr(sbus.testing, name).__module__.startswith("sbus.testing."), name


def test_no_other_name_is_there() -> None:
    """A name that does not exist is reported as usual."""
    with pytest.raises(AttributeError, match=r"module 'sbus\.testing' has no attribute 'Bus'"):
        sbus.testing.Bus  # noqa: B018


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, []),
        ({"block_timeout": 0.5, "dialect": "early"}, ["--block-timeout=0.5", "--dialect=early"]),
        ({"block_across_users": True, "reuse": False, "group": None}, ["--block-across-users"]),
        ({"allow_user": [0, "nobody"]}, ["--allow-user=0", "--allow-user=nobody"]),
        ({"allow_user": 0}, ["--allow-user=0"]),
        ({"mode": 0o770}, ["--mode=770"]),
        ({"mode": "0770"}, ["--mode=0770"]),
    ],
)
def test_options(options: Any, words: list[str]) -> None:
    """Options are written in Python and become those of the command line."""
    assert command_line(options) == words


def test_auto_close_is_refused() -> None:
    """A bus that stops with its last client would not outlive the connection that waits for it."""
    with pytest.raises(UsageError, match="auto_close"), running_bus(auto_close=True):
        pass


class Waiter:
    """A waiter (`sbus.client.core.Waiter`) that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def set_result(self, value: bytes) -> None:
        self.told.append(value)

    def set_exception(self, error: Exception) -> None:
        self.told.append(error)

    def __await__(self) -> Generator[Any, None, bytes]:
        while not self.told:
            yield
        if isinstance(self.told[0], Exception):
            raise self.told[0]
        return b""


def wait(recording: _Recording, count: int) -> tuple[Any, Waiter]:
    """Begin to wait for so many messages."""
    waiter = Waiter()
    call = recording._wait(count, waiter)
    assert call.send(None) is None
    return call, waiter


def result(call: Any) -> Any:
    with pytest.raises(StopIteration) as stop:
        call.send(None)
    return stop.value.value


def test_a_message_is_recorded_once() -> None:
    """A message that several patterns match, and so comes several times, is recorded once; an equal one counts."""
    recording = _Recording()
    message = Message(b"a", b"1")
    recording._record(message)
    recording._record(message)
    recording._record(Message(b"a", b"1"))
    assert recording.messages == [(b"a", b"1"), (b"a", b"1")]


def test_waiting_for_different_counts() -> None:
    """Each one who waits is served when his count is there, whoever came first."""
    recording = _Recording()
    (three, third), (one, first) = wait(recording, 3), wait(recording, 1)
    recording._record(Message(b"a", b"1"))
    assert (first.told, third.told) == ([b""], [])
    assert result(one) == [(b"a", b"1")]
    recording._record(Message(b"b", b""))
    recording._record(Message(b"c", b""))
    assert len(result(three)) == 3


def test_the_end_of_a_recording() -> None:
    """Who waits when the connection ends, or after it, is told why; what was recorded can still be had."""
    recording = _Recording()
    recording._record(Message(b"a", b"1"))
    call, _ = wait(recording, 2)
    recording._ended(Closed("over"))
    for waiting in (call, recording._wait(2, Waiter())):
        with pytest.raises(Closed, match="over"):
            waiting.send(None)
    assert result(recording._wait(1, Waiter())) == [(b"a", b"1")]


def test_clear() -> None:
    """After `clear` counts begin anew."""
    recording = _Recording()
    recording._record(Message(b"a", b"1"))
    recording.clear()
    call, _ = wait(recording, 1)
    recording._record(Message(b"b", b"2"))
    assert result(call) == [(b"b", b"2")]


class Greeter(Protocol):
    """A protocol as the docstring of `sbus.testing.fakes` has it."""

    def dataReceived(self, data: bytes) -> None:
        assert self.transport is not None
        self.transport.write(b"MSG reply\0" + data.partition(b"\0")[2] + b" to you")


def test_a_fake_transport() -> None:
    """Packets come and go one by one, and what is sent soon is there when the clock has moved."""
    transport = FakePacketTransport()
    transport.connect(Greeter())
    transport.deliver(b"MSG greeting\0hello", b"MSG greeting\0good day")
    assert transport.written == []
    transport.clock.advance(0)
    assert transport.written == [b"MSG reply\0hello to you", b"MSG reply\0good day to you"]


def test_the_end_of_a_fake_connection() -> None:
    """The peer's end-of-file reaches the protocol, which then is disconnected."""
    transport = FakePacketTransport()
    transport.connect(Greeter())
    transport.end()
    transport.clock.advance(0)
    assert not transport.connected
    assert transport.reason is not None
