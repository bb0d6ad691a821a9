"""The server as a process: how it starts, what ends it, and what it leaves behind."""

from __future__ import annotations

import os
import pty
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sbus.server.run.twistd import Options
from tests.support.harness import TIMEOUT, Bus, Client, environment_with, goes_on, numbered, twistd
from tests.support.waiting import wait_until


class TestStart:
    """The first lines of the log."""

    def test_effective_limits(self, bus, directory):
        """The log has the address, and the limits in force."""
        limits = {
            "max-packet": 1001,
            "max-payload": 1009,
            "user-payloads": 1010,
            "max-clients": 1002,
            "max-patterns": 1003,
            "max-pattern-bytes": 1004,
            "queue-messages": 1005,
            "queue-bytes": 1006,
            "total-queue-bytes": 1007,
            "block-timeout": 1008,
        }
        started = bus(*(f"--{name}={value}" for name, value in limits.items()))
        line = started.wait_log(r"sbus listens on .*")[0][0]
        assert f"sbus listens on {directory}/bus " in line
        for value in limits.values():
            assert str(value) in line

    def test_deprecated_options(self, bus, directory):
        """An option that will be gone works, also if it is abbreviated, and the log says what takes its place."""
        options = ["--max-match-steps=1009", "--metrics-g=64000", "--log-files=3", "--log-file-bytes=5000"]
        started = bus(*options, f"--admin={directory}/admin")
        places = {"max-match-steps": "leave it out", "metrics-group": "--admin-group=GROUP,metrics"}
        for name in Options.deprecated:
            place = places.get(name, "--log-keep=FILESxSIZE")
            started.wait_log(rf"warn: --{name} will be gone in the next release: {place}")
        assert stat.S_IMODE(os.stat(f"{directory}/admin").st_mode) == 0o666
        assert ", 1009 match steps, " in started.log

    def test_no_option_is_deprecated_silently(self, bus, directory):
        """A bus with the new options has no such warning."""
        options = ["--admin-group=64000,metrics", "--admin-group=0", "--log-keep=3x5K", "--user-clients=9"]
        started = bus(*options, f"--admin={directory}/admin")
        assert stat.S_IMODE(os.stat(f"{directory}/admin").st_mode) == 0o666
        assert "will be gone" not in started.log

    def test_slow_backend_is_told(self, bus):
        """A bus that runs in plain Python warns that it is slower."""
        started = bus(env={"SBUS_PURE": "1"})
        started.wait_log(r"warn: the compiled helper is not in use")


class TestFatal:
    """An error that leaves the server without sockets ends the process."""

    @pytest.mark.parametrize("launch", ["sbus", "sbusd"])
    def test_epoll_wait(self, directory, launch):
        """If epoll_wait(2) fails, the process logs it and exits with a status that systemd takes for a failure."""
        code = """
import errno, select, sys
real = select.epoll
class Epoll:
    def __init__(self): self._epoll = real()
    def __getattr__(self, name): return getattr(self._epoll, name)
    def poll(self, *args): raise OSError(errno.EBADF, "broken")
import sbus.seqpacket.multiplexer as multiplexer
class Select:
    EPOLLIN, EPOLLOUT, epoll = select.EPOLLIN, select.EPOLLOUT, Epoll
multiplexer.select = Select
"""
        run = {
            "sbus": "from twisted.scripts.twistd import run as main; sys.argv[0] = 'twistd'; "
            "sys.argv[1:] = ['-n', '--pidfile=', 'sbus', '--socket=bus']; main()",
            "sbusd": "from sbus.server.run.sbusd import main; sys.argv[1:] = ['-f', '-a', 'bus']; main()",
        }[launch]
        with subprocess.Popen(
            [sys.executable, "-c", code + run],
            cwd=directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            try:
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
                    wait_until(lambda: process.poll() is not None or not client.connect_ex(str(directory / "bus")))
                    output, _ = process.communicate(timeout=TIMEOUT)
            finally:
                process.kill()
        assert process.returncode == 1, output
        assert "cannot be waited for" in output


class TestStop:
    """SIGTERM and SIGINT."""

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_signals(self, bus, directory, number):
        """On a signal the bus closes connections, removes its socket and its pid file, and exits with status 0."""
        started = bus(flags=["-n", f"--pidfile={directory}/pid"])
        clients = [started.client(b"x") for _ in range(5)]
        assert int((directory / "pid").read_text()) == started.pid
        assert stat.S_ISSOCK((directory / "bus").stat().st_mode)
        assert started.stop(number) == 0
        for client in clients:
            assert client.has_ended()
        assert os.listdir(directory) == []
        assert "Traceback" not in started.log

    def test_hangup(self, bus, directory):
        """SIGHUP leaves a bus without a terminal running, and the log says what to use instead."""
        started = bus()
        with started.client() as client:
            client.sync()  # from the first turn of the reactor on; before it, the signal is ignored
            started.kill(signal.SIGHUP)
            started.wait_log("SIGHUP: there is nothing to reload; SIGTERM stops")
            client.sync()
        assert started.stop() == 0
        assert os.listdir(directory) == []

    def test_hangup_at_once(self, spawn, directory):
        """SIGHUP that comes as soon as the socket exists does not end the process either."""
        started = spawn(Bus, directory)
        wait_until((directory / "bus").exists, pause=0)
        started.kill(signal.SIGHUP)
        assert goes_on(started.wait_started())
        assert started.stop() == 0

    def test_terminal_that_closes(self, directory):
        """A bus in the foreground of a terminal stops in good order when the terminal closes."""
        leader, terminal = pty.openpty()
        command = [
            "setsid",
            "--ctty",
            *twistd(),
            "-n",
            f"--pidfile={directory}/pid",
            "sbus",
            f"--socket={directory}/bus",
        ]
        with open(directory / "log", "wb") as log:
            process = subprocess.Popen(command, stdin=terminal, stdout=log, stderr=log, env=environment_with({}))
        os.close(terminal)
        try:
            wait_until((directory / "log").read_text, lambda text: "sbus listens on" in text)
            with Client(directory / "bus") as client:
                client.sync()
                process.send_signal(signal.SIGHUP)  # the terminal is still there
                while "nothing to reload" not in (directory / "log").read_text():
                    client.sync()
                os.close(leader)
                leader = -1
                assert client.has_ended()
            assert process.wait(TIMEOUT) == 0
        finally:
            process.kill()
            process.wait()
            if leader >= 0:
                os.close(leader)
        assert os.listdir(directory) == ["log"]

    def test_while_clients_stall(self, bus, directory):
        """Readers that do not read, and blocked publishers, do not delay the stop."""
        started = bus("--max-packet=1024", "--block-timeout=600")
        stalled, blocking = started.client(b"flood"), started.client(b"flood")
        blocking.cmsg(b"blocking/soft/block")
        blocking.sync()
        publisher = started.client()
        for packet in numbered(b"flood", 100):
            publisher.send(packet)
        first = stalled.recv()
        assert first == numbered(b"flood", 1)[0]
        began = time.monotonic()
        assert started.stop() == 0
        assert time.monotonic() - began < 5
        for client in (stalled, blocking, publisher):
            client.rest()
        assert os.listdir(directory) == []

    def test_while_a_half_closed_client_lingers(self, bus):
        """A client that has shut down writing, and still has messages to read, does not delay the stop."""
        started = bus("--max-packet=1024", "--block-timeout=600")
        client = started.client(b"flood")
        for packet in numbered(b"flood", 100):
            client.send(packet)
        client.sock.shutdown(socket.SHUT_WR)
        assert goes_on(started)
        assert started.stop() == 0

    def test_impatient(self, bus, directory):
        """Several signals in a row do no harm."""
        started = bus()
        assert goes_on(started)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            started.kill(number)
        assert started.wait() == 0
        assert os.listdir(directory) == []

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_at_once(self, spawn, directory, number):
        """A signal that comes as soon as the socket exists stops the process just as cleanly."""
        for _ in range(2):
            started = spawn(Bus, directory, flags=["-n", f"--pidfile={directory}/pid"])
            wait_until((directory / "bus").exists, pause=0)
            assert started.stop(number) == 0
            assert os.listdir(directory) == []

    def test_waiting_messages_are_counted(self, bus):
        """Messages that were queued for a client when the bus stopped are counted as dropped."""
        started = bus("--max-packet=1024")
        reader, publisher = started.client(b"flood"), started.client()
        for packet in numbered(b"flood", 500):
            publisher.send(packet)
        publisher.sync()
        assert started.stop() == 0
        assert len(reader.rest()) + started.dropped() == 500


class TestRestart:
    """A bus that is started again."""

    def test_after_a_stop(self, bus, directory):
        """A bus starts again where one was stopped, and serves clients that come back."""
        for _ in range(3):
            started = bus()
            client = started.client(b"again")
            packet = client.msg(b"again")
            assert client.sync() == [packet]
            assert started.stop() == 0
            assert client.has_ended()

    def test_after_a_crash(self, bus, directory):
        """A bus starts again after SIGKILL, without any option; clients see the crash as end-of-file."""
        started = bus()
        client = started.client()
        started.kill(signal.SIGKILL)
        assert started.wait() == -signal.SIGKILL
        assert client.has_ended()
        assert goes_on(bus())

    def test_nothing_is_remembered(self, bus):
        """Subscriptions and messages do not outlive the bus."""
        started = bus()
        with started.client(b"old") as client:
            client.msg(b"old")
        started.stop()
        started = bus()
        client = started.client()
        client.msg(b"old")
        assert client.sync() == []


def test_files_of_the_directory(bus, directory):
    """A running bus makes one file, its socket, and a pid file only if one is asked for."""
    bus(flags=["-n", f"--pidfile={directory}/pid"])
    assert sorted(os.listdir(directory)) == ["bus", "pid"]
    assert Path(directory / "pid").is_file()
