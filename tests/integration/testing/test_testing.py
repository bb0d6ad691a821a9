"""`sbus.testing` with real servers: processes that start, crash and come back, and clients that record."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sbus.client import aio
from sbus.errors import Closed, ConnectError, Disconnected, NotAllowed, TimedOut, UsageError
from sbus.testing import AsyncioRecordingClient, RecordingClient, RunningBus, running_bus
from tests.support import ROOT
from tests.support.descriptors import descriptors
from tests.support.harness import TIMEOUT, wait_end

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def server() -> Iterator[RunningBus]:
    """A bus that the tests of this module share."""
    with running_bus() as bus:
        yield bus


# --- servers ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_comes_and_goes() -> None:
    """The bus accepts connections when the block begins; at its end the process and all of its files are gone."""
    with running_bus() as bus:
        pid, directory = bus.pid, Path(bus.address).parent
        assert bus.is_running
        with bus.connect() as client:
            client.fence(TIMEOUT)
    assert not directory.exists()
    assert not bus.is_running
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert "sbus listens on" in bus.log
    assert "Server Shut Down" in bus.log


@pytest.mark.slow
def test_long_directory_for_temporary_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A bus starts also if the path of $TMPDIR is longer than that of a socket may be."""
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with running_bus() as bus, bus.connect() as client:
        client.fence(TIMEOUT)
    assert list(deep.iterdir()) == []


@pytest.mark.slow
def test_many_open_files() -> None:
    """A test that holds more than 1024 open files can start a bus and use it."""
    script = (
        "import os, resource; from sbus.testing import running_bus;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2);"
        "held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]\n"
        "with running_bus() as bus, bus.record('a') as recording, bus.connect() as client:\n"
        "    client.publish('a', b'x'); print(recording.wait_for(1))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=TIMEOUT)
    assert "payload=b'x'" in done.stdout, done.stderr


def test_options_are_the_servers(directory: Path) -> None:
    """The server has the given options, and its clients use them."""
    address = str(directory / "my bus")
    with running_bus(address, dialect="early", max_packet="1K", mode=0o750) as bus:
        assert bus.address == address
        assert os.stat(address).st_mode & 0o777 == 0o750
        with bus.record("a.") as recording, bus.connect() as client:
            assert client.core.max_packet == 1024
            client.publish("a.b", b"x")
            assert recording.wait_for(1) == [(b"a.b", b"x")]
    assert os.listdir(directory) == []


def test_a_bus_that_cannot_start() -> None:
    """If the server cannot start, the error has its output, and nothing is left of it."""
    said = r"status 1 at its start; .*\nsbus: --max-packet=none: give"
    with pytest.raises(ConnectError, match=said), running_bus(max_packet="none"):
        pass


@pytest.mark.slow
def test_an_address_that_is_taken(directory: Path) -> None:
    """Answers from another server at the address are not taken for the new one's."""
    address = str(directory / "bus")
    with running_bus(address) as first:
        with pytest.raises(ConnectError, match="is in use by a server that is running"), running_bus(address):
            pass
        with first.connect() as client:
            client.fence(TIMEOUT)


def test_a_bus_that_lets_nobody_in(directory: Path) -> None:
    """A bus counts as running even if its policy refuses the test's own connection."""
    plugins = directory / "twisted" / "plugins"
    plugins.mkdir(parents=True)
    (plugins / "nobody_bus.py").write_text(
        "from twisted.plugin import IPlugin\n"
        "from zope.interface import implementer\n"
        "from sbus.interfaces import ICredentialsPolicy\n"
        "from sbus.server.core.credentials import KernelCredentials\n"
        "class Nobody(KernelCredentials):\n"
        "    def mayConnect(self, peer):\n"
        "        return False\n"
        "@implementer(IPlugin, ICredentialsPolicy)\n"
        "class Policy:\n"
        "    name = 'nobody'\n"
        "    description = 'nobody at all'\n"
        "    def make(self, settings):\n"
        "        return Nobody(settings, ())\n"
        "policy = Policy()\n"
    )
    # The server has the import path of the test.
    sys.path.append(str(directory))
    try:
        with running_bus(credentials="nobody") as bus:
            with bus.connect() as client, pytest.raises(Disconnected):
                client.fence(TIMEOUT)
            assert "refused a connection" in bus.log
    finally:
        sys.path.remove(str(directory))


def test_time_runs_out(directory: Path) -> None:
    """A bus that does not come up in time is killed and reported."""
    with pytest.raises(ConnectError, match="did not accept connections within 0 s"), running_bus(timeout=0):
        pass


@pytest.mark.slow
def test_stop_and_start(directory: Path) -> None:
    """A stopped bus can be started again, with other options, at the same address."""
    with running_bus(max_packet=1000) as bus:
        bus.stop()
        assert not os.path.exists(bus.address)
        with pytest.raises(UsageError, match="not running"):
            _ = bus.pid
        bus.stop()  # nothing to do
        bus.start(max_packet=2000)
        with pytest.raises(UsageError, match="running already"):
            bus.start()
        assert "limits: packet 1000 B" in bus.log
        assert "limits: packet 2000 B" in bus.log


@pytest.mark.slow
def test_kill_and_restart() -> None:
    """A killed bus leaves its socket, as after a crash; a restart replaces it."""
    with running_bus() as bus:
        pid = bus.pid
        with bus.connect() as client:
            bus.kill()
            with pytest.raises(Disconnected):
                client.receive(TIMEOUT)
        assert os.path.exists(bus.address)
        with pytest.raises(ConnectError, match="Connection refused"):
            bus.connect()
        bus.restart()
        assert bus.pid != pid
        bus.restart()  # while it runs
        with bus.connect() as client:
            client.fence(TIMEOUT)


@pytest.mark.parametrize("number", [signal.SIGSEGV, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_a_crash_is_reported(number: signal.Signals) -> None:
    """A server that ends by itself makes the test fail, with the end of its log."""

    def crash() -> None:
        with running_bus() as bus:
            os.kill(bus.pid, number)
            wait_end(bus.pid)

    with pytest.raises(Disconnected, match=rf"status -{number:d}\D(?s:.*)sbus listens on"):
        crash()


@pytest.mark.slow
def test_a_failure_of_the_test_comes_first() -> None:
    """An error of the test itself is not hidden by a crash of the server, and the server is gone."""
    pids = []

    def crash_and_fail() -> None:
        with running_bus() as bus:
            pids.append(bus.pid)
            os.kill(bus.pid, signal.SIGKILL)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        crash_and_fail()
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


# --- recording clients ----------------------------------------------------------------------------


def test_blocking_recording(server: RunningBus) -> None:
    """A client records each message that its patterns match once, from the moment that it exists."""
    with server.record("a/", "a/b", "c") as recording, server.connect() as client:
        client.publish_many([("a/b", b"1"), ("b", b"2"), ("c", b"3"), ("a/b", b"1")])
        assert recording.wait_for(3) == [(b"a/b", b"1"), (b"c", b"3"), (b"a/b", b"1")]
        recording.clear()
        client.publish("a/", b"4")
        client.fence(TIMEOUT)
        assert recording.settle() == [(b"a/", b"4")]
        assert recording.wait_for(1) == recording.messages
        with pytest.raises(TimedOut, match=r"1 of 2 messages .* within 0\.01 s, the last Message\(key=b'a/'"):
            recording.wait_for(2, timeout=0.01)


def test_recording_everything(server: RunningBus) -> None:
    """Without patterns a client records every message that is not secret."""
    with RecordingClient(server.address) as recording, server.connect() as client:
        client.publish_many([(b"", b"1"), ("x/y/z", b"2"), ("!/cred////x", b"3")])
        client.fence(TIMEOUT)
        assert recording.settle() == [(b"", b"1"), (b"x/y/z", b"2")]


def test_recording_refused(server: RunningBus) -> None:
    """An invalid pattern is reported, and no connection stays open."""
    before = descriptors()
    with pytest.raises(UsageError):
        server.record("!/my")
    assert not descriptors().items() - before.items()


@pytest.mark.slow
def test_recording_across_a_crash() -> None:
    """When the server goes away a waiting client raises an error; a client that reconnects continues to record."""
    with running_bus() as bus, bus.record() as one, bus.record(reconnect=True) as other:
        with bus.connect() as client:
            client.publish("a", b"1")
            client.fence(TIMEOUT)
        assert other.wait_for(1) == [(b"a", b"1")]
        bus.restart()
        with pytest.raises(Disconnected):
            one.wait_for(2)
        assert one.messages == [(b"a", b"1")]
        other.bus.subscribe("b")  # notices the loss, and subscribes again to all
        other.settle()
        with bus.connect() as client:
            client.publish("c", b"2")
        assert other.wait_for(2) == [(b"a", b"1"), (b"c", b"2")]


def test_asyncio_recording(server: RunningBus) -> None:
    """The client for asyncio does the same, and the tested program runs meanwhile."""

    async def main() -> None:
        async with (
            AsyncioRecordingClient(server.address, "a/", "a/b", "c") as recording,
            await aio.connect(server.address) as client,
        ):
            waiting = asyncio.create_task(recording.wait_for(3))
            await client.publish_many([("a/b", b"1"), ("b", b"2"), ("c", b"3"), ("a/b", b"1")])
            assert await waiting == [(b"a/b", b"1"), (b"c", b"3"), (b"a/b", b"1")]
            recording.clear()
            await client.publish("a/", b"4")
            await client.fence(TIMEOUT)
            assert await recording.settle() == [(b"a/", b"4")]
            assert await recording.wait_for(1) == recording.messages
            with pytest.raises(TimedOut, match=r"1 of 2 messages .* within 0\.01 s, the last Message\(key=b'a/'"):
                await recording.wait_for(2, timeout=0.01)
        with pytest.raises(Closed):
            await recording.wait_for(2)
        with pytest.raises(UsageError):
            async with AsyncioRecordingClient(server.address, "!/my"):
                pass
        with pytest.raises(NotAllowed):
            async with AsyncioRecordingClient(server.address, "!/cred/1/2/3/"):
                pass

    asyncio.run(main())


@pytest.mark.slow
def test_asyncio_recording_of_a_crash() -> None:
    """When the server goes away, a waiting asyncio client raises an error at once."""

    async def main() -> None:
        with running_bus() as bus:
            async with AsyncioRecordingClient(bus.address) as recording:
                waiting = asyncio.create_task(recording.wait_for(1))
                await asyncio.sleep(0)  # it waits
                bus.kill()
                with pytest.raises(Disconnected, match="the server closed the connection"):
                    await waiting

    asyncio.run(main())


# --- under pytest and trial, as users run them ------------------------------------------------------


def run(directory: Path, *arguments: str, **environ: str) -> tuple[int, str]:
    """Run a Python module; return its status and output."""
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]), **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout


PYTEST = ("pytest", "-p", "sbus.testing.pytest_plugin", "-p", "no:sbus", "-p", "no:cacheprovider", "--strict-markers")


def test_the_fixture(directory: Path) -> None:
    """Each test has its own bus, with the options of the nearest markers; a failing test's report has the log."""
    (directory / "test_it.py").write_text(
        """
import os
import signal
import pytest

pytestmark = pytest.mark.sbus_options(max_packet=1000, max_clients=10)
addresses = set()

@pytest.fixture(autouse=True)
def different(sbus_bus):
    assert sbus_bus.address not in addresses
    addresses.add(sbus_bus.address)

class TestMarkers:
    pytestmark = pytest.mark.sbus_options(max_packet=2000)

    @pytest.mark.sbus_options(max_clients=20)
    def test_nearest(self, sbus_bus):
        assert sbus_bus.options == {"max_packet": 2000, "max_clients": 20}

def test_module(sbus_bus):
    assert "packet 1000 B, 10 clients" in sbus_bus.log

def test_fails(sbus_bus):
    raise ValueError("on purpose")

def test_crashes(sbus_bus):
    os.kill(sbus_bus.pid, signal.SIGABRT)
"""
    )
    status, output = run(directory, *PYTEST, "-v", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert status == 1, output
    assert re.findall(r"::(test_\w+) (\w+)", output.split("short test summary")[0]) == [
        ("test_nearest", "PASSED"),
        ("test_module", "PASSED"),
        ("test_fails", "FAILED"),
        ("test_crashes", "PASSED"),
        ("test_crashes", "ERROR"),
    ], output
    assert re.search(r"Disconnected: the bus (ended|exited) .*status -6", output), output
    failure = output[output.index("ValueError: on purpose") :]
    assert "sbus listens on" in failure, output


@pytest.mark.slow
def test_the_plugin_is_registered(directory: Path) -> None:
    """The installed package provides the fixture and the marker."""
    output = run(directory, "pytest", "--fixtures", "-q")[1]
    assert "sbus_bus" in output, f"install sbus again: its entry points have changed\n{output}"
    assert run(directory, "pytest", "--markers")[1].count("sbus_options") == 1


@pytest.mark.slow
def test_trial(directory: Path) -> None:
    """The mixin for trial starts and stops its bus within the test, and leaves the reactor clean."""
    temporary = directory / "tmp"
    temporary.mkdir()
    arguments = ["twisted.trial", "--temp-directory=trial", "tests.integration.testing.trial_testing"]
    status, output = run(directory, *arguments, TMPDIR=str(temporary))
    assert status == 0, output
    assert "PASSED (successes=" in output
    assert os.listdir(temporary) == []


@pytest.mark.slow
def test_an_open_connection_keeps_nothing_from_stopping() -> None:
    """A connected client does not keep the server from stopping in time."""
    with running_bus() as bus:
        client = bus.connect()
        client.fence(TIMEOUT)
    with client, pytest.raises(Disconnected):
        client.receive(TIMEOUT)
