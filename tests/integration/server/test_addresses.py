"""The addresses of a bus: paths, abstract names, and obstacles there; each failure names its remedy."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.server.listening import seqpacket
from tests.support.harness import (
    OTHER_USER,
    THIRD_USER,
    TIMEOUT,
    Bus,
    Client,
    goes_on,
    refusal,
)
from tests.support.waiting import wait_until


def stale(path: Path) -> Path:
    """A socket on which no server listens any more."""
    seqpacket(path, listening=True).close()
    assert stat.S_ISSOCK(path.stat().st_mode)
    return path


class TestPath:
    """--socket=PATH."""

    def test_absolute(self, bus, directory):
        """The bus listens on the path, and removes it when it stops."""
        started = bus()
        assert stat.S_ISSOCK((directory / "bus").stat().st_mode)
        assert goes_on(started)
        assert started.stop() == 0
        assert os.listdir(directory) == []

    def test_relative(self, bus, directory):
        """A relative path is one from where twistd was started."""
        started = bus(address="bus")
        started.address = directory / "bus"
        assert goes_on(started)
        assert started.stop() == 0
        assert os.listdir(directory) == []

    def test_relative_with_another_directory_to_run_in(self, bus, directory):
        """The same if twistd changes to another directory (--rundir)."""
        (directory / "run").mkdir()
        started = bus(address="bus", flags=["-n", "--pidfile=", f"--rundir={directory}/run"])
        started.address = directory / "bus"
        assert goes_on(started)
        assert started.stop() == 0
        assert os.listdir(directory) == ["run"]
        assert os.listdir(directory / "run") == []

    def test_odd_names(self, bus, directory):
        """Blanks, quotes, colons, percent signs and bytes beyond ASCII in a path are ordinary."""
        started = bus(address=directory / "a b'c\":%s{x}\u00e9")
        assert goes_on(started)
        assert started.stop() == 0
        assert os.listdir(directory) == []

    def test_longest(self, bus, directory):
        """A path of 107 bytes is the longest that the kernel takes; one more is refused at once."""
        path = directory / ("x" * (107 - len(str(directory)) - 1))
        assert goes_on(bus(address=path))
        line = refusal(directory, address=f"{path}x")
        assert "108 bytes" in line
        assert "at most 107" in line

    def test_replaced_by_somebody_else(self, bus, directory):
        """The bus does not remove a file that was put in the socket's place meanwhile."""
        started = bus()
        (directory / "bus").unlink()
        (directory / "bus").write_text("somebody else's")
        assert started.stop() == 0
        assert (directory / "bus").read_text() == "somebody else's"

    def test_removed_by_somebody_else(self, bus, directory):
        """A file that is gone already is not an error."""
        started = bus()
        (directory / "bus").unlink()
        assert started.stop() == 0
        assert "Traceback" not in started.log


class TestDefault:
    """The default address."""

    def test_root(self, as_root, spawn, directory):
        """Root's bus listens on /run/sbus.sock."""
        private_run = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /run && exec "$@"', "sh"]
        if subprocess.run([*private_run, "true"], stderr=subprocess.DEVNULL).returncode:
            pytest.skip("unshare(1) and mount(8) cannot make a private /run here")
        started = spawn(Bus, directory, before=private_run, named=False)
        started.wait_log(r"sbus listens on /run/sbus\.sock ")
        started.address = f"/proc/{started.pid}/root/run/sbus.sock"
        assert goes_on(started)
        assert started.stop() == 0

    def test_sbus_finds_sbusd(self, as_root):
        """``sbusd && sbus ping`` reach each other: clients look for the default sockets of both servers."""
        private_run = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /run && exec "$@"', "sh"]
        if subprocess.run([*private_run, "true"], stderr=subprocess.DEVNULL).returncode:
            pytest.skip("unshare(1) and mount(8) cannot make a private /run here")
        sbus, sbusd = (f"{sys.executable} -m {module}" for module in ("sbus.cli", "sbus.server.run.sbusd"))
        script = f"{sbus} ping -c 1; {sbusd} && {sbus} ping -c 1; kill $(cat /run/sbus.pid)"
        environ = {k: v for k, v in os.environ.items() if k not in ("SBUS_SOCKET", "XDG_RUNTIME_DIR")}
        command = [*private_run, "sh", "-c", script]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=TIMEOUT)
        assert "no bus at /run/sbus.sock, nor at /run/sbus.socket: " in done.stderr
        assert "answer from /run/sbus.socket: seq=1" in done.stdout, done.stderr

    def test_user(self, spawn, directory, request):
        """The bus of any other user listens in $XDG_RUNTIME_DIR."""
        become = request.getfixturevalue("become") if os.geteuid() == 0 else []
        directory.chmod(0o777)
        env = {"XDG_RUNTIME_DIR": str(directory)}
        started = spawn(Bus, directory, "--mode=0777", env=env, before=become, named=False)
        started.wait_log(rf"sbus listens on {directory}/sbus\.sock ")
        started.address = directory / "sbus.sock"
        assert goes_on(started)

    def test_user_without_a_directory(self, directory, request):
        """Without that variable the error asks for a place."""
        become = request.getfixturevalue("become") if os.geteuid() == 0 else []
        line = refusal(directory, before=become, env={"XDG_RUNTIME_DIR": None}, named=False)
        assert "XDG_RUNTIME_DIR is not set" in line
        assert "--socket=" in line

    def test_empty_is_not_the_default(self, directory):
        """An empty --socket= (from an unset variable, say) is an error, not the default."""
        assert "must not be empty" in refusal(directory, address="")


class TestAbstract:
    """Abstract addresses."""

    def test_name(self, bus, directory):
        """@NAME: exactly this name, no file, free again when the bus is gone."""
        address = f"@sbus-test-{os.getpid()}"
        started = bus(address=address)
        assert goes_on(started)
        assert os.listdir(directory) == []
        assert started.stop() == 0
        assert goes_on(bus(address=address))

    def test_random(self, bus):
        """/dev/unix/abstract: a random address, printed on the first line of standard output."""
        one, two = bus(address="/dev/unix/abstract"), bus(address="/dev/unix/abstract")
        addresses = [started.log.splitlines()[0] for started in (one, two)]
        assert addresses[0] != addresses[1]
        for started, address in zip((one, two), addresses, strict=True):
            assert address.startswith("/dev/unix/abstract/00")
            assert len(address) == len("/dev/unix/abstract/") + 2 * 108
            started.address = address
            assert goes_on(started)
            assert f"sbus listens on {address}" in started.log

    @pytest.mark.parametrize("form", ["whole", "short", "without the NUL"])
    def test_hexadecimal(self, bus, form):
        """/dev/unix/abstract/HEX: the address as the original prints it; a shorter one is filled up with NULs."""
        name = b"\0sbus-test-%d-%b" % (os.getpid(), form[0].encode())
        whole = name.ljust(108, b"\0")
        text = {"whole": whole.hex(), "short": name.hex(), "without the NUL": name[1:].hex().upper()}[form]
        started = bus(address=f"/dev/unix/abstract/{text}")
        started.address = f"/dev/unix/abstract/{whole.hex()}"
        assert goes_on(started)

    @pytest.mark.parametrize("text", ["xyz", "00" * 109])
    def test_not_hexadecimal(self, directory, text):
        """A name that is not hexadecimal is refused."""
        assert "hexadecimal digits" in refusal(directory, address=f"/dev/unix/abstract/{text}")

    @pytest.mark.parametrize("text", ["@", "@" + "x" * 108])
    def test_no_name(self, directory, text):
        """A name that is empty or too long is refused."""
        assert "1 to 107 bytes" in refusal(directory, address=text)

    def test_in_use(self, bus, directory):
        """An abstract address in use is refused, also with --reuse."""
        started = bus(address=f"@sbus-test-used-{os.getpid()}")
        assert "another server is running there" in refusal(directory, "--reuse", address=started.address)
        assert goes_on(started)

    def test_users(self, as_root, become, bus):
        """Without --allow-user only the server's own user and root can connect, as no file mode protects it."""
        address = f"@sbus-test-users-{os.getpid()}"
        started = bus("--mode=0777", address=address, before=become)
        assert started.client(user=OTHER_USER).sync() == []
        assert started.client().sync() == []
        assert started.client(user=THIRD_USER).has_ended()
        started.stop()
        started = bus(f"--allow-user={THIRD_USER[0]}", address=address)
        assert started.client(user=THIRD_USER).sync() == []
        assert started.client(user=OTHER_USER).has_ended()


class TestInTheWay:
    """The path exists already."""

    def test_live_server(self, bus, directory):
        """A live server's address is refused, with or without --reuse; the live one is not disturbed."""
        started = bus()
        client = started.client(b"undisturbed")
        inode = (directory / "bus").stat().st_ino
        for options in ((), ("--reuse",)):
            line = refusal(directory, *options)
            assert "is in use by a server that is running" in line
            assert "--socket" in line
        assert (directory / "bus").stat().st_ino == inode
        packet = client.msg(b"undisturbed")
        assert client.sync() == [packet]
        assert goes_on(started)

    def test_live_but_busy_server(self, directory):
        """A server that is alive but does not accept (its backlog is full) counts as alive."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.bind(str(directory / "bus"))
            sock.listen(0)
            waiting = []
            try:
                while True:
                    waiting.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                    waiting[-1].setblocking(False)
                    waiting[-1].connect(str(directory / "bus"))
            except BlockingIOError:
                assert "is in use by a server that is running" in refusal(directory, "--reuse")
            finally:
                for client in waiting:
                    client.close()

    def test_live_server_of_another_kind(self, directory):
        """A live stream or datagram socket is not replaced either."""
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            with socket.socket(socket.AF_UNIX, kind) as sock:
                sock.bind(str(directory / "bus"))
                if kind == socket.SOCK_STREAM:
                    sock.listen()
                assert "is in use by a server that is running" in refusal(directory, "--reuse")
                (directory / "bus").unlink()

    @pytest.mark.parametrize("options", [(), ("--reuse",)], ids=["", "reuse"])
    def test_stale(self, bus, directory, options):
        """A stale socket is replaced, with --reuse or without; the new one has the mode that was asked for."""
        stale(directory / "bus").chmod(0o777)
        started = bus(*options)
        assert goes_on(started)
        assert stat.S_IMODE((directory / "bus").stat().st_mode) == 0o700

    def test_stale_one_of_another_user(self, become, directory):
        """A stale socket that this user may not remove is named, with the remedy."""
        stale(directory / "bus").chmod(0o777)
        directory.chmod(0o1777)
        line = refusal(directory, before=become)
        assert "is left over from a server that is gone, and you may not remove it" in line

    def test_relative_path(self, spawn, directory):
        """A relative path is bound and named by its absolute name, which stays right in any directory."""
        started = spawn(Bus, directory, address="bus")
        assert f"sbus listens on {directory}/bus " in started.wait_log("sbus listens on .*")[0][0]
        with Client(directory / "bus") as client:
            assert client.sock.getpeername() == str(directory / "bus")

    def test_standard_input(self, spawn, directory):
        """An inherited socket may be descriptor 0, as from inetd(8)."""
        with seqpacket(directory / "bus", listening=True) as passed:
            before = ["bash", "-c", f'exec "$@" <&{passed.fileno()}', "bash"]
            started = spawn(Bus, directory, address="/dev/fd/0", before=before, pass_fds=[passed.fileno()])
            started.wait_started()
        started.address = directory / "bus"
        assert goes_on(started)
        assert started.descriptors()[0] == os.devnull

    @pytest.mark.parametrize("what", ["file", "empty file", "directory", "pipe", "link", "dangling link"])
    def test_not_a_socket(self, directory, what):
        """A file that is not a socket is never replaced."""
        path = directory / "bus"
        if what.endswith("file"):
            path.write_text("precious" if what == "file" else "")
        elif what == "directory":
            path.mkdir()
        elif what == "pipe":
            os.mkfifo(path)
        elif what == "link":
            path.symlink_to(stale(directory / "elsewhere"))
        else:
            path.symlink_to(directory / "nowhere")
        before = path.lstat()
        line = refusal(directory, "--reuse")
        assert "is not a socket" in line
        assert "remove it yourself" in line
        assert path.lstat() == before

    def test_somebody_elses_server(self, become, bus, directory):
        """A socket that one may not connect to is never replaced: nothing shows whether a server listens there."""
        directory.chmod(0o777)
        started = bus()
        line = refusal(directory, "--reuse", before=become)
        assert f"{started.address} exists already" in line
        assert "remove it yourself" in line
        assert goes_on(started)

    def test_one_of_many(self, spawn, directory):
        """Of many servers that are started at once with --reuse on a stale socket one serves, the others give up."""
        stale(directory / "bus")
        servers = [spawn(Bus, directory, "--reuse") for _ in range(4)]
        serving = [server for server in servers if server.has_started()]
        assert len(serving) == 1
        for server in servers:
            if server not in serving:
                assert server.wait() == 1
                assert "is in use by a server that is running" in server.log
        assert goes_on(serving[0])

    def test_reuse_of_a_server_that_is_just_starting(self, spawn, directory):
        """A server that has made its socket but does not listen yet is not taken for a stale one."""
        gate = directory / "gate"
        os.mkfifo(gate)
        (directory / "sitecustomize.py").write_text(
            "import os, sys\n"
            "def hook(event, args):\n"
            "    if event == 'os.chmod' and '/proc/self/fd/' in str(args[0]) and 'SBUS_TEST_GATE' in os.environ:\n"
            "        print('at the gate', flush=True)\n"
            "        with open(os.environ.pop('SBUS_TEST_GATE')) as gate: gate.read()\n"
            "sys.addaudithook(hook)\n"
        )
        path = os.pathsep.join([str(directory), *filter(None, [os.environ.get("PYTHONPATH")])])
        slow = spawn(Bus, directory, "--reuse", env={"PYTHONPATH": path, "SBUS_TEST_GATE": str(gate)})
        slow.wait_log("at the gate")
        quick = spawn(Bus, directory, "--reuse")
        # It waits for its turn to look at the directory; or it has made up its mind already.
        wait_until(lambda: str(directory) in quick.descriptors().values() or quick.log)
        with open(gate, "w"):
            pass
        assert goes_on(slow.wait_started())
        assert quick.wait() == 1
        assert goes_on(slow)


class TestDirectories:
    """Directories in which no socket can be made."""

    def test_missing(self, directory):
        """A missing directory is named."""
        line = refusal(directory, address=directory / "missing" / "bus")
        assert f"make the directory {directory}/missing first" in line

    def test_not_a_directory(self, directory):
        """A file in place of the directory is named."""
        (directory / "file").touch()
        assert f"{directory}/file is not a directory" in refusal(directory, address=directory / "file" / "bus")

    def test_no_permission(self, become, directory):
        """A directory without write permission is named."""
        line = refusal(directory, before=become)
        assert "Permission denied" in line
        assert str(directory) in line
        assert "--socket" in line

    def test_locked_by_somebody(self, bus, directory):
        """A lock on the directory, held by another process, does not keep the bus from starting."""
        fd = os.open(directory, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            assert goes_on(bus())
        finally:
            os.close(fd)
