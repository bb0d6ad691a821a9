"""The daemon of the former name, the end of an idle server, and its memory."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import stat
import subprocess
import sys

import pytest

from sbus.syscalls.polling import is_readable
from tests.support.harness import OTHER_USER, TIMEOUT, Client, goes_on, numbered, refusal, run, twistd, wait_end


class TestAutoClose:
    """--auto-close."""

    def test_last_client(self, bus, directory):
        """The bus stops when its last client has left, as cleanly as on a signal, and not before the first has come."""
        started = bus("--auto-close", flags=["-n", f"--pidfile={directory}/pid"])
        one = started.client()
        two = started.client()
        one.close()
        assert two.sync() == []
        started.wait_log("client 1 disconnected")
        three = started.client()
        two.close()
        started.wait_log("client 2 disconnected")
        assert three.sync() == []
        three.close()
        assert started.wait() == 0
        assert os.listdir(directory) == []

    def test_last_words(self, bus):
        """Messages of the last client but one, published before it left, are delivered."""
        started = bus("--auto-close")
        reader = started.client(b"words")
        with started.client() as publisher:
            packet = publisher.msg(b"words")
        assert reader.recv() == packet
        reader.close()
        assert started.wait() == 0

    def test_disconnected_client(self, bus):
        """A last client that was disconnected for a violation counts as one that has left."""
        started = bus("--auto-close")
        client = started.client()
        client.send(b"nonsense")
        assert started.wait() == 0

    @pytest.mark.parametrize("flags", [[], ["--reuse"]], ids=["", "reuse"])
    def test_second_server_is_no_client(self, bus, directory, flags):
        """A server that finds the socket in use does not count as a client of the one that listens."""
        started = bus("--auto-close")
        assert "is in use by a server that is running" in refusal(directory, *flags)
        started.client().close()
        assert started.wait() == 0
        assert len(started.wait_log("client . connected")) == 1

    def test_refused_clients_do_not_count(self, as_root, bus):
        """A refused client does not stop the bus by leaving."""
        started = bus("--auto-close", "--mode=0777", "--credentials=own-user")
        assert started.client(user=OTHER_USER).has_ended()
        started.wait_log("refused a connection")
        assert goes_on(started)
        assert started.wait() == 0


class TestDaemon:
    """twistd without -n."""

    @pytest.fixture
    def daemon(self, directory):
        """Start a bus as a daemon and return its process ID; the fixture ends it by that."""
        pids = []

        def start(*options: str) -> int:
            flags = [f"--pidfile={directory}/pid", f"--logfile={directory}/log", f"--rundir={directory}"]
            command = [*twistd(), *flags, "sbus", f"--socket={directory}/bus", "--log-level=debug", *options]
            result = run(command)
            assert (result.returncode, result.stderr) == (0, "")
            pids.append(int((directory / "pid").read_text()))
            return pids[-1]

        yield start
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            wait_end(pid)

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_life(self, daemon, directory, number):
        """The bus serves when twistd returns; a signal stops it and removes the socket and the pid file."""
        pid = daemon()
        address = directory / "bus"
        with Client(address) as client, Client(address) as other:
            other.sub(b"daemon")
            other.sync()
            packet = client.msg(b"daemon")
            assert other.recv() == packet
            assert stat.S_IMODE(address.stat().st_mode) == 0o700
            os.kill(pid, number)
            assert client.has_ended()
            assert other.has_ended()
        wait_end(pid)
        assert os.listdir(directory) == ["log"]
        log = (directory / "log").read_text()
        assert f"sbus listens on {address} " in log
        assert "client 1 connected" in log
        assert "Traceback" not in log

    def test_hangup(self, daemon, directory):
        """A daemon survives SIGHUP, and stops in good order later."""
        pid = daemon()
        with Client(directory / "bus") as client:
            client.sync()  # a signal before the reactor's first turn is ignored without a word
            os.kill(pid, signal.SIGHUP)
            while "SIGHUP: there is nothing to reload" not in (directory / "log").read_text():
                client.sync()
            os.kill(pid, signal.SIGTERM)
            assert client.has_ended()
        wait_end(pid)
        assert os.listdir(directory) == ["log"]

    def test_auto_close(self, daemon, directory):
        """--auto-close stops a daemon too."""
        pid = daemon("--auto-close")
        Client(directory / "bus").close()
        wait_end(pid)
        assert os.listdir(directory) == ["log"]

    def test_random_address(self, directory, daemon):
        """The random abstract address is printed on the standard output of the command that starts the daemon."""
        flags = [f"--pidfile={directory}/pid", f"--logfile={directory}/log"]
        command = [*twistd(), *flags, "sbus", "--socket=/dev/unix/abstract", "--auto-close"]
        result = run(command, directory)
        pid = int((directory / "pid").read_text())
        with Client(result.stdout.strip()) as client:
            assert client.sync() == []
        wait_end(pid)

    def test_second_one(self, daemon, directory):
        """A second daemon at the same address is refused, and the first one is not disturbed."""
        daemon()
        line = refusal(directory, flags=[f"--pidfile={directory}/pid2", f"--logfile={directory}/log2"])
        assert "is in use by a server that is running" in line
        with Client(directory / "bus") as client:
            assert client.sync() == []


class TestIdle:
    """A bus with nothing to do."""

    def test_no_cpu(self, bus):
        """An idle bus with clients, stalled ones among them, uses no CPU time."""
        started = bus("--max-packet=1024", "--block-timeout=600")
        clients = [started.client(b"flood") for _ in range(10)]
        clients[0].cmsg(b"blocking/soft/discard")
        clients[1].cmsg(b"blocking/soft/block")
        clients[1].sync()
        publisher = started.client()
        for packet in numbered(b"flood", 100):
            publisher.send(packet)
        gone = started.client()
        gone.sock.shutdown(socket.SHUT_WR)
        assert goes_on(started)
        before = started.cpu()
        assert not is_readable(publisher.sock, 0.5)
        assert started.cpu() - before <= 0.1


_TWENTY_BATCHES = """
import resource
from sbus.daemon.process import Process

def batch():
    [bytes(60_000) for _ in range(64)]

Process().startService()
batch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    batch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library has no mallopt(3)")
def test_memory_is_used_again():
    """The memory of one batch of large packets is kept for the next, not returned to the kernel."""
    result = subprocess.run(
        [sys.executable, "-c", _TWENTY_BATCHES], capture_output=True, text=True, check=True, timeout=TIMEOUT
    )
    assert int(result.stdout) < 64 * 60_000 // os.sysconf("SC_PAGE_SIZE")  # fewer pages than one batch has
