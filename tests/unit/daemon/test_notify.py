"""What systemd hears of a service, on a socket that plays systemd."""

from __future__ import annotations

import os
import signal
import socket
import time

import pytest
from twisted.internet.task import Clock

from sbus.daemon.notify import Notifier
from tests.support.harness import TIMEOUT, Bus, Process


@pytest.fixture(params=["path", "abstract"])
def systemd(request, tmp_path):
    """A socket that plays systemd, and its name in the environment."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        name = str(tmp_path / "notify") if request.param == "path" else f"@sbus-test-{os.getpid()}"
        sock.bind("\0" + name[1:] if name.startswith("@") else name)
        sock.settimeout(TIMEOUT)
        yield sock, name


def heard(sock):
    """Return all that has been said so far."""
    said = []
    sock.setblocking(False)
    try:
        while True:
            said.append(sock.recv(100))
    except BlockingIOError:
        return said


def test_pings_at_half_of_the_time(systemd):
    """Pings follow at half of the watchdog's time, and only while the reactor turns."""
    sock, name = systemd
    clock = Clock()
    notifier = Notifier(clock, {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "30000000"})
    notifier.startService()
    notifier.ready()
    clock.advance(0)
    assert heard(sock) == [b"READY=1", b"WATCHDOG=1"]
    clock.advance(14.9)
    assert heard(sock) == []
    clock.advance(0.1)
    assert heard(sock) == [b"WATCHDOG=1"]
    notifier.stopService()
    clock.advance(15)
    assert heard(sock) == [b"STOPPING=1", b"WATCHDOG=1"]


def test_reloads(systemd):
    """A reload has a beginning, with the monotonic time that Type=notify-reload asks for, and an end."""
    sock, name = systemd
    notifier = Notifier(Clock(), {"NOTIFY_SOCKET": name})
    notifier.reloads(True)
    notifier.reloads(False)
    begin, end = heard(sock)
    state, usec = begin.split(b"\nMONOTONIC_USEC=")
    assert (state, end) == (b"RELOADING=1", b"READY=1")
    assert 0 <= time.monotonic() * 1e6 - int(usec) < TIMEOUT * 1e6


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "many"},
        {"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"},
    ],
    ids=["no systemd", "not a number", "another process"],
)
def test_no_watchdog(environ):
    """Without a socket, a time or a watchdog of its own, a service does not ping, and fails for nothing."""
    clock = Clock()
    notifier = Notifier(clock, environ)
    notifier.startService()
    notifier.ready()
    assert clock.getDelayedCalls() == []
    notifier.stopService()


def test_recorder(systemd, spawn, directory):
    """``twistd sbus-recorder`` does the same, without a bus."""
    sock, name = systemd
    options = [f"--socket={directory}/bus", f"--journal={directory}/journal"]
    started = spawn(
        Process,
        directory,
        ["-n", "--pidfile=", "sbus-recorder", *options],
        env={"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "200000", "WATCHDOG_PID": None},
    )
    started.wait_log("starting up")
    assert [sock.recv(100) for _ in range(3)] == [b"READY=1", b"WATCHDOG=1", b"WATCHDOG=1"]
    started.kill(signal.SIGTERM)
    while (said := sock.recv(100)) != b"STOPPING=1":
        assert said == b"WATCHDOG=1"
    assert started.wait() == 0


def test_process(systemd, spawn, directory):
    """``twistd sbus`` says that it serves, that it is alive, and that it stops."""
    sock, name = systemd
    started = spawn(Bus, directory, env={"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "200000", "WATCHDOG_PID": None})
    assert sock.recv(100) == b"READY=1"
    assert [sock.recv(100), sock.recv(100)] == [b"WATCHDOG=1"] * 2
    started.client().sync()
    started.kill(signal.SIGTERM)
    while (said := sock.recv(100)) != b"STOPPING=1":
        assert said == b"WATCHDOG=1"
    assert started.wait() == 0


def test_a_bus_reports_its_reloads(systemd, spawn, directory):
    """A bus that reads its policy again says so before and after, also if the policy is broken."""
    sock, name = systemd
    policy = directory / "policy.toml"
    policy.write_text("version = 1")
    started = spawn(Bus, directory, f"--policy={policy}", env={"NOTIFY_SOCKET": name, "WATCHDOG_USEC": None})
    assert sock.recv(100) == b"READY=1"
    for text in ("version = 1", "version = 2"):
        policy.write_text(text)
        started.kill(signal.SIGHUP)
        assert sock.recv(100).startswith(b"RELOADING=1\nMONOTONIC_USEC=")
        assert sock.recv(100) == b"READY=1"
