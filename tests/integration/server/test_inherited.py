"""Sockets that a bus inherits from another program or from systemd."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket

import pytest

from sbus.syscalls.memfd import Memfd
from tests.integration.server.listening import seqpacket
from tests.support.harness import (
    OTHER_USER,
    Bus,
    Client,
    goes_on,
    refusal,
)
from tests.support.waiting import wait_until


class TestInherited:
    """/dev/fd/N."""

    @pytest.mark.parametrize("listening", [False, True])
    def test_path(self, spawn, directory, listening):
        """A bound SEQPACKET socket, listening or not, is served; its file stays with the process that made it."""
        with seqpacket(directory / "made", listening=listening) as sock:
            fd = sock.fileno()
            started = spawn(Bus, directory, address=f"/dev/fd/{fd}", pass_fds=[fd]).wait_started()
        started.address = directory / "made"
        assert goes_on(started)
        assert started.stop() == 0
        assert os.listdir(directory) == ["made"]

    def test_waiting_clients(self, spawn, directory):
        """Clients that connected before the bus was started are served."""
        with seqpacket(directory / "made", listening=True) as sock, Client(directory / "made") as client:
            packet = b"MSG early\0bird"
            client.sub(b"early")
            client.send(packet)
            started = spawn(Bus, directory, address=f"/dev/fd/{sock.fileno()}", pass_fds=[sock.fileno()])
            assert client.recv() == packet
            assert started.is_running()

    def test_abstract(self, as_root, spawn, directory):
        """An inherited abstract address is treated as one: other users are refused."""
        name = b"\0sbus-test-inherited-%d" % os.getpid()
        with seqpacket(name) as sock:
            started = spawn(Bus, directory, address=f"/dev/fd/{sock.fileno()}", pass_fds=[sock.fileno()])
            started.wait_started()
        started.address = f"@{name[1:].decode()}"
        assert goes_on(started)
        assert started.client(user=OTHER_USER).has_ended()

    def test_not_open(self, directory):
        """A descriptor that was not passed is refused."""
        assert "descriptor 999 is not an open socket" in refusal(directory, address="/dev/fd/999")

    def test_unbound(self, directory):
        """A socket without an address is refused."""
        with seqpacket() as sock:
            line = refusal(directory, address=f"/dev/fd/{sock.fileno()}", pass_fds=[sock.fileno()])
        assert "bind it before passing it" in line

    def test_of_another_kind(self, directory):
        """A stream socket, a TCP socket and a file are refused: none is a SEQPACKET socket."""
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with stream, socket.socket() as tcp, open("/dev/null") as null:
            for file in (stream, tcp, null):
                fd = file.fileno()
                line = refusal(directory, address=f"/dev/fd/{fd}", pass_fds=[fd])
                assert "SOCK_SEQPACKET" in line or "not an open socket" in line

    def test_connected(self, directory):
        """A connected socket is refused: it cannot listen."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            refusal(directory, address=f"/dev/fd/{ours.fileno()}", pass_fds=[ours.fileno()])

    def test_kept_from_children(self, spawn, directory):
        """The descriptor is served in place: the bus holds the listening socket once."""
        with seqpacket(directory / "made", listening=True) as sock:
            inode = os.fstat(sock.fileno()).st_ino
            started = spawn(Bus, directory, address=f"/dev/fd/{sock.fileno()}", pass_fds=[sock.fileno()])
            started.wait_started()
            assert list(started.descriptors().values()).count(f"socket:[{inode}]") == 1

    @pytest.mark.parametrize("pure", ["0", "1"])
    def test_that_passes_credentials(self, spawn, directory, pure):
        """As with PassCredentials= of systemd: large messages arrive, and no descriptor of a client is kept."""
        with seqpacket(directory / "made", listening=True) as sock, contextlib.ExitStack() as clients:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, True)
            early = clients.enter_context(Client(directory / "made"))
            started = spawn(
                Bus,
                directory,
                address=f"/dev/fd/{sock.fileno()}",
                pass_fds=[sock.fileno()],
                env={"SBUS_PURE": pure},
            ).wait_started()
            for client in (early, clients.enter_context(Client(directory / "made"))):
                client.send(b"CMSG payload/on")
                assert client.recv().startswith(b"CMSG payload/on")
                client.sub(b"k")
                memfd = Memfd.create()
                os.write(memfd.fileno(), b"payload")
                memfd.seal()
                socket.send_fds(client.sock, [b"FMSG k\0000 7"], [memfd.fileno()])
                assert client.recv() == b"FMSG k\0000 7"
                client.send(b"UNSUB k")
                before = len(started.descriptors())
                with open(os.devnull) as null:
                    socket.send_fds(client.sock, [b"MSG a\0"], [null.fileno()] * 200)
                assert client.has_ended()
                wait_until(lambda: len(started.descriptors()), before.__gt__)


def activation(fds: list[int], names: str | None = None) -> tuple[list[str], list[int]]:
    """A command that passes descriptors to the next one as systemd does (sd_listen_fds(3)), and those to pass."""
    moves = " ".join(f"exec {3 + n}<&{fd};" for n, fd in enumerate(fds))
    naming = f"export LISTEN_FDNAMES={names};" if names is not None else ""
    script = f'{moves} {naming} export LISTEN_PID=$$ LISTEN_FDS={len(fds)}; exec "$@"'
    return ["bash", "-c", script, "bash"], fds


class TestSystemd:
    """--socket=systemd, --socket=systemd:NAME."""

    @pytest.fixture
    def high(self):
        """Duplicate a descriptor past those that the shell moves others to."""
        made = []

        def duplicate(sock: socket.socket) -> int:
            made.append(fcntl.fcntl(sock.fileno(), fcntl.F_DUPFD, 50))
            return made[-1]

        yield duplicate
        for fd in made:
            os.close(fd)

    def test_only_one(self, spawn, directory, high):
        """The only socket that systemd passed is served; its file stays with systemd."""
        with seqpacket(directory / "made", listening=True) as sock:
            before, fds = activation([high(sock)])
            started = spawn(Bus, directory, address="systemd", before=before, pass_fds=fds).wait_started()
        started.address = directory / "made"
        assert goes_on(started)
        assert started.stop() == 0
        assert os.listdir(directory) == ["made"]

    def test_by_name(self, spawn, directory, high):
        """Of several sockets the one with that name is served."""
        with seqpacket(directory / "one", listening=True) as one, seqpacket(directory / "two", listening=True) as two:
            before, fds = activation([high(one), high(two)], "first:second")
            started = spawn(Bus, directory, address="systemd:second", before=before, pass_fds=fds).wait_started()
        started.address = directory / "two"
        assert goes_on(started)

    def test_unknown_name(self, directory, high):
        """A name that systemd did not pass is refused, with the setting that gives one."""
        with seqpacket(directory / "one", listening=True) as sock:
            before, fds = activation([high(sock)], "first")
            line = refusal(directory, address="systemd:other", before=before, pass_fds=fds)
        assert "'other'" in line
        assert "FileDescriptorName=other" in line

    def test_nothing_passed(self, directory):
        """Without socket activation the address is refused, and the error says how to get it."""
        line = refusal(directory, address="systemd")
        assert "systemd passed no socket" in line
        assert "ListenSequentialPacket=" in line

    def test_stream_socket(self, directory, high):
        """A stream socket, as ListenStream= makes, is refused, and the setting that is meant is named."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.bind(str(directory / "stream"))
            sock.listen()
            before, fds = activation([high(sock)])
            line = refusal(directory, address="systemd", before=before, pass_fds=fds)
        assert "ListenSequentialPacket=" in line

    def test_a_policy_names_the_sockets(self, spawn, directory, high):
        """Of several sockets, a rule of the policy names one by FileDescriptorName=; any other name is an error."""
        policy = directory / "policy.toml"
        policy.write_text('version = 1\n[[rule]]\nname = "app"\nlisteners = ["app"]\ndeny_publish = ["a/"]\n')
        with seqpacket(directory / "main", listening=True) as one, seqpacket(directory / "app", listening=True) as two:
            passed = [high(one), high(two)]
            before, fds = activation(passed, "bus.socket:other")
            line = refusal(directory, f"--policy={policy}", address="systemd", before=before, pass_fds=fds)
            assert "the bus has no socket 'app': it has main, other" in line
            before, fds = activation(passed, "bus.socket:app")
            started = spawn(Bus, directory, f"--policy={policy}", address="systemd", before=before, pass_fds=fds)
            started.wait_started()
        with Client(directory / "main") as main, Client(directory / "app") as app:
            for client in (main, app):
                client.send(b"MSG a/b\0")
            assert main.sync() == []
            assert app.has_ended()

    @pytest.mark.parametrize("name", [None, "bus"])
    def test_with_the_real_tool(self, spawn, directory, name):
        """systemd-socket-activate starts the bus with the first client, and that client is served."""
        tool = shutil.which("systemd-socket-activate")
        if tool is None:
            pytest.skip("systemd-socket-activate is not installed")
        command = [tool, "--seqpacket", f"--listen={directory}/made"]
        command += [f"--fdname={name}"] if name else []
        command += [f"--setenv={key}={value}" for key in ("PYTHONPATH",) if (value := os.environ.get(key))]
        started = spawn(Bus, directory, address=f"systemd:{name}" if name else "systemd", before=command)
        started.wait_log("Listening on")
        with Client(directory / "made") as client:
            client.sub(b"first")
            packet = client.msg(b"first", b"come, first served")
            assert client.recv() == packet
        started.address = directory / "made"
        assert goes_on(started)
        assert started.stop() == 0
