"""The process: its help, its options, how it starts and refuses to start, and how it stops."""

from __future__ import annotations

import ctypes
import os
import pty
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest

from sbus.server.core.limits import Limits
from sbus.server.run.twistd import Options
from sbus.syscalls.polling import is_readable
from tests.support.harness import (
    OTHER_USER,
    TIMEOUT,
    Bus,
    Client,
    environment_with,
    goes_on,
    numbered,
    refusal,
    run,
    twistd,
    wait_end,
)
from tests.support.waiting import wait_until


def output_of(*arguments: str) -> str:
    """Run twistd, which must succeed; return its output."""
    result = run([*twistd(), *arguments], env={"COLUMNS": "100"})
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


@pytest.fixture(scope="module")
def options():
    """Each option's explanation, as one line, by its long name."""
    text = output_of("sbus", "--help")
    found = {}
    for block in re.split(r"\n(?=  (?:-\w, |    )--)", text.partition("\n\n")[0]):
        match = re.match(r"\s*(?:-\w, )?--([a-z-]+)=?\s+(.*)", block, re.DOTALL)
        if match:
            found[match[1]] = " ".join(match[2].split())
    return found


class TestHelp:
    """The help texts."""

    def test_listed(self):
        """twistd --help lists the bus."""
        assert re.search(r"^\s+sbus\s+\S+", output_of("--help"), re.MULTILINE)

    @pytest.mark.parametrize(
        ("option", "default", "unit"),
        [
            ("socket", "/run/sbus.sock", "path"),
            ("mode", "0700", "octal"),
            ("group", "the process's", "GID"),
            ("allow-user", "admits", "UID"),
            ("credentials", "kernel", "olicy"),
            ("on-violation", "disconnect", "ignore"),
            ("dialect", "current", "early"),
            ("block-timeout", "30", "econds"),
            ("queue-messages", "65536", "essages"),
            ("queue-bytes", "67108864", "ytes"),
            ("total-queue-bytes", "268435456", "ytes"),
            ("max-packet", "409600", "ytes"),
            ("max-payload", "67108864", "ytes"),
            ("user-payloads", "64", "files"),
            ("max-clients", "16384", "lients"),
            ("max-patterns", "16384", "atterns"),
            ("max-pattern-bytes", "1048576", "ytes"),
            ("user-clients", "256", "USER=CLIENTS"),
            ("log-keep", "5x1M", "size"),
            ("last-value", "keys=10000,bytes=16M", "SIZE"),
        ],
    )
    def test_options(self, options, option, default, unit):
        """twistd sbus --help explains each option, with its default and its unit."""
        explanation = options[option]
        assert re.search(rf"\[default: .*{re.escape(default)}", explanation), explanation
        assert unit in explanation
        assert len(explanation) > 20

    def test_limits_are_last(self):
        """The limits come after all other options; options that will be gone are not there."""
        others, limits = output_of("sbus", "--help").partition("\n\n")[0].split("\nLimits:\n")
        names = [re.findall(r"^  (?:-\w,|   ) --([a-z-]+)", part, re.MULTILINE) for part in (others, limits)]
        of_limits = {field.name.replace("_", "-") for field in fields(Limits)}
        assert set(names[1]) == of_limits - {"max-match-steps", "user-clients-of"}
        accepted = {name.rstrip("=") for name in Options().longOpt if len(name.rstrip("=")) > 1}
        assert set(names[0]) == accepted - of_limits - set(Options.deprecated)

    @pytest.mark.parametrize("flag", ["reuse", "auto-close", "block-across-users", "no-interest"])
    def test_flags(self, options, flag):
        """twistd sbus --help explains each flag."""
        assert len(options[flag]) > 20

    def test_components(self):
        """The help lists the installed components, the built-in ones among them."""
        text = " ".join(output_of("sbus", "--help").split())
        for name in ("kernel:", "own-user:", "blocking/soft/queue", "blocking/hard/error", "order/random"):
            assert name in text

    def test_version(self):
        """twistd sbus --version prints the version."""
        assert re.fullmatch(r"sbus \d+\.\d+\S*\n", output_of("sbus", "--version"))


class TestWrongOptions:
    """A wrong option gives one line on standard error with the remedy, and leaves nothing half-started."""

    @pytest.mark.parametrize(
        ("option", "remedy"),
        [
            ("--block-timeout=0", "give a time of 0.001 seconds or more, such as"),
            ("--block-timeout=-1", "give a time of 0.001 seconds or more, such as"),
            ("--block-timeout=soon", "give a time of 0.001 seconds or more, such as"),
            ("--block-timeout=nan", "give a time of 0.001 seconds or more, such as"),
            ("--block-timeout=inf", "give a time of 0.001 seconds or more, such as"),
            ("--queue-messages=0", "a number of messages above 0"),
            ("--queue-messages=1.5", "a number of messages above 0"),
            ("--queue-bytes=-5", "a number of bytes above 0"),
            ("--queue-bytes=64X", "a number of bytes above 0"),
            ("--total-queue-bytes=", "a number of bytes above 0"),
            ("--max-packet=many", "a number of bytes above 0"),
            ("--max-packet=63", "64"),
            ("--max-packet=1000000000000000", "no socket sends more than"),
            ("--allow-user=²", "there is no such user"),
            ("--max-clients=0", "a number of clients above 0"),
            ("--user-clients=0", "a number of clients above 0, or that of one user"),
            ("--user-clients=nobody-here=9", "there is no such user 'nobody-here'"),
            ("--admin-group=no-such-group", "there is no such group"),
            ("--admin-group=" + "1" * 5000, "there is no such group"),
            ("--admin-group=no-such-group,metrics", "there is no such group"),
            ("--admin-group=0,all", "give GROUP, or GROUP,metrics"),
            ("--admin-group=0", "--admin=PATH too"),
            ("--log-keep=5", "the files to keep and the size of each, such as 5x1M"),
            ("--log-keep=0x1M", "the files to keep and the size of each, such as 5x1M"),
            ("--log-keep=5x", "the files to keep and the size of each, such as 5x1M"),
            ("--log-keep=5x1X", "the files to keep and the size of each, such as 5x1M"),
            ("--max-patterns=0", "a number of patterns above 0"),
            ("--max-pattern-bytes=0", "a number of bytes above 0"),
            ("--on-violation=shrug", "disconnect or ignore"),
            ("--dialect=late", "current or early"),
            ("--credentials=", "kernel"),
            ("--last-value=a,keys=0", "above 0"),
            ("--last-value=a,bytes=16X", "above 0"),
            ("--last-value=!/cred////x", "leave it out"),
            ("--last-value=!/x", "give another pattern"),
        ],
    )
    def test_value(self, option, remedy):
        """The error quotes a wrong value and says what would be right."""
        with pytest.raises(SystemExit) as caught:
            Options().parseOptions(["--socket=/nowhere", option])
        line = str(caught.value)
        assert line.startswith("sbus: ")
        assert "\n" not in line
        assert remedy in line
        name = option.partition("=")[0]
        assert name in line or name[2:].replace("-", "_") in line or "credentials policy" in line

    @pytest.mark.parametrize("option", ["--queue-bytes=64X", "--max-packet=63", "--on-violation=shrug"])
    def test_value_on_the_command_line(self, directory, option):
        """twistd prints that line and nothing else, and makes no file."""
        line = refusal(directory, option)
        assert line.endswith(" (see twistd sbus --help)")

    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            (["--no-such-option"], "--no-such-option"),
            (["superfluous"], "there are only options here"),
            (["--reuse=yes"], "--reuse"),
        ],
    )
    def test_usage(self, directory, arguments, complaint):
        """A wrong command line gives one line that points to the help."""
        line = refusal(directory, *arguments)
        assert complaint in line
        assert "twistd sbus --help" in line

    def test_as_a_daemon(self, directory):
        """Without -n the reason is on standard error too, before anything runs in the background."""
        flags = [f"--pidfile={directory}/pid", f"--logfile={directory}/log"]
        assert "missing" in refusal(directory, address=directory / "missing" / "bus", flags=flags)
        assert "--dialect=late" in refusal(directory, "--dialect=late", flags=flags)

    def test_pid_file_of_a_live_process(self, bus, directory):
        """The pid file of a daemon that runs is refused at once: no file is made or removed."""
        started = bus(flags=["-n", f"--pidfile={directory}/pid"])
        there = sorted(os.listdir(directory))
        result = run([*twistd(), "-n", f"--pidfile={directory}/pid", "sbus", f"--socket={directory}/other"], directory)
        assert result.returncode > 0
        assert f"the pid file {directory}/pid is that of process {started.pid}, which runs" in result.stderr
        assert sorted(os.listdir(directory)) == there
        assert goes_on(started)

    def test_no_log_file(self, spawn, directory):
        """If twistd cannot open its log after the socket was made, the socket is removed."""
        started = spawn(Bus, directory, flags=["-n", "--pidfile=", f"--logfile={directory}/missing/log"])
        assert started.wait() > 0
        assert os.listdir(directory) == []

    def test_no_pid_file(self, spawn, directory):
        """A pid file that cannot be written is refused before the socket is made."""
        started = spawn(Bus, directory, flags=["-n", f"--pidfile={directory}/missing/pid"])
        assert started.wait() > 0
        assert os.listdir(directory) == []


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


def test_files_of_the_directory(bus, directory):
    """A running bus makes one file, its socket, and a pid file only if one is asked for."""
    bus(flags=["-n", f"--pidfile={directory}/pid"])
    assert sorted(os.listdir(directory)) == ["bus", "pid"]
    assert Path(directory / "pid").is_file()
