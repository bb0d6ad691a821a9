"""`sbus.testing` without a server: what is imported when, options, recording, fakes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
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
    """Return the modules that a fresh interpreter has loaded after this statement."""
    script = f"import sys; {statement}; print(*sys.modules)"
    return set(
        subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    )


def test_the_plugin_costs_nothing() -> None:
    """A run of pytest that uses no bus loads no part of this package but the plugin."""
    loaded = loaded_by("import sbus.testing.pytest_plugin")
    assert {name for name in loaded if name.split(".")[0] == "sbus"} == {
        "sbus",
        "sbus.lazy",
        "sbus.testing",
        "sbus.version",
        "sbus.testing.pytest_plugin",
    }
    assert "twisted" not in loaded


def test_server_processes_need_no_twisted() -> None:
    """A test that starts a server and records its messages does not load Twisted."""
    assert "twisted" not in loaded_by("from sbus.testing import running_bus, RecordingClient, AsyncioRecordingClient")


def test_every_name_is_there() -> None:
    """Every public name is defined in one of the package's modules."""
    for name in sbus.testing.__all__:
        assert getattr(sbus.testing, name).__module__.startswith("sbus.testing."), name


def test_no_other_name_is_there() -> None:
    """An unknown name raises the usual error."""
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
        ({"policy": Path("p.toml")}, ["--policy=p.toml"]),
        ({"mode": 0o770}, ["--mode=770"]),
        ({"mode": "0770"}, ["--mode=0770"]),
    ],
)
def test_options(options: Any, words: list[str]) -> None:
    """Options written in Python become options of the command line."""
    assert command_line(options) == words


def test_auto_close_is_refused() -> None:
    """auto_close is refused: such a bus would stop with the connection that waits for it."""
    with pytest.raises(UsageError, match="auto_close"), running_bus(auto_close=True):
        pass


class Waiter:
    """A waiter (`sbus.client.core.Waiter`) that keeps its results and errors."""

    def __init__(self) -> None:
        self.results: list[object] = []

    def set_result(self, value: bytes) -> None:
        self.results.append(value)

    def set_exception(self, error: Exception) -> None:
        self.results.append(error)

    def __await__(self) -> Generator[Any, None, bytes]:
        while not self.results:
            yield
        if isinstance(self.results[0], Exception):
            raise self.results[0]
        return b""


def wait(recording: _Recording, count: int) -> tuple[Any, Waiter]:
    """Start to wait for `count` messages."""
    waiter = Waiter()
    call = recording._wait(count, waiter)
    assert call.send(None) is None
    return call, waiter


def result(call: Any) -> Any:
    with pytest.raises(StopIteration) as stop:
        call.send(None)
    return stop.value.value


def test_a_message_is_recorded_once() -> None:
    """A message that arrives once per matching pattern is recorded once; an equal message is recorded again."""
    recording = _Recording()
    message = Message(b"a", b"1")
    recording._record(message)
    recording._record(message)
    recording._record(Message(b"a", b"1"))
    assert recording.messages == [(b"a", b"1"), (b"a", b"1")]


def test_waiting_for_different_counts() -> None:
    """Each caller gets its messages as soon as its count is reached, in whatever order the callers came."""
    recording = _Recording()
    (three, third), (one, first) = wait(recording, 3), wait(recording, 1)
    recording._record(Message(b"a", b"1"))
    assert (first.results, third.results) == ([b""], [])
    assert result(one) == [(b"a", b"1")]
    recording._record(Message(b"b", b""))
    recording._record(Message(b"c", b""))
    assert len(result(three)) == 3


def test_the_end_of_a_recording() -> None:
    """Waiting raises the reason for the end of the connection, during it and after it; recorded messages stay."""
    recording = _Recording()
    recording._record(Message(b"a", b"1"))
    call, _ = wait(recording, 2)
    recording._ended(Closed("over"))
    for waiting in (call, recording._wait(2, Waiter())):
        with pytest.raises(Closed, match="over"):
            waiting.send(None)
    assert result(recording._wait(1, Waiter())) == [(b"a", b"1")]


def test_clear() -> None:
    """After `clear` counts start at 0 again."""
    recording = _Recording()
    recording._record(Message(b"a", b"1"))
    recording.clear()
    call, _ = wait(recording, 1)
    recording._record(Message(b"b", b"2"))
    assert result(call) == [(b"b", b"2")]


class Greeter(Protocol):
    """The protocol from the docstring of `sbus.testing.fakes`."""

    def dataReceived(self, data: bytes) -> None:
        assert self.transport is not None
        self.transport.write(b"MSG reply\0" + data.partition(b"\0")[2] + b" to you")


def test_a_fake_transport() -> None:
    """Packets are delivered one by one, and sent when the clock has moved."""
    transport = FakePacketTransport()
    transport.connect(Greeter())
    transport.deliver(b"MSG greeting\0hello", b"MSG greeting\0good day")
    assert transport.written == []
    transport.clock.advance(0)
    assert transport.written == [b"MSG reply\0hello to you", b"MSG reply\0good day to you"]


def test_the_end_of_a_fake_connection() -> None:
    """After the peer's end-of-file the protocol is disconnected."""
    transport = FakePacketTransport()
    transport.connect(Greeter())
    transport.end()
    transport.clock.advance(0)
    assert not transport.connected
    assert transport.reason is not None
