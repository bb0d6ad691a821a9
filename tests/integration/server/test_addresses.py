"""The bus's addresses: listening, permission to connect, and the socket's file."""

from __future__ import annotations

import contextlib
import fcntl
import grp
import json
import os
import pwd
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from sbus.syscalls.memfd import Memfd
from tests.support.harness import (
    OTHER_USER,
    THIRD_USER,
    TIMEOUT,
    Bus,
    Client,
    goes_on,
    refusal,
)
from tests.support.waiting import paused, wait_until


def seqpacket(name: str | Path | bytes | None = None, *, listening: bool = False) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if name is not None:
        sock.bind(name if isinstance(name, bytes) else str(name))
    if listening:
        sock.listen()
    return sock


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


class TestMode:
    """--mode and --group: which users can connect."""

    @pytest.mark.parametrize("mode", ["0700", "0777", "700", "0"])
    def test_final_mode(self, bus, directory, mode):
        """The file has exactly this mode, whatever the umask; without --mode 0700."""
        options = () if mode == "0700" else (f"--mode={mode}",)
        bus(*options, umask=0o077)
        assert stat.S_IMODE((directory / "bus").stat().st_mode) == int(mode, 8)

    @pytest.mark.parametrize(("mode", "umask"), [("0700", 0), ("0750", 0o022), ("0777", 0o777)])
    def test_never_more(self, bus, directory, mode, umask):
        """The file never has more permissions than the mode, not even for a moment, as an observer outside sees."""
        program = (
            "import os, sys\n"
            "path, final, seen = sys.argv[1], int(sys.argv[2], 8), set()\n"
            "stat = os.stat\n"
            "print('watching', flush=True)\n"
            "while True:\n"
            "    try:\n"
            "        mode = stat(path).st_mode & 0o7777\n"
            "    except FileNotFoundError:\n"
            "        continue\n"
            "    seen.add(mode)\n"
            "    if mode == final: break\n"
            "print(sorted(seen))\n"
        )
        command = [sys.executable, "-c", program, str(directory / "bus"), mode]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watcher:
            try:
                assert watcher.stdout is not None
                assert watcher.stdout.readline() == "watching\n"
                bus(f"--mode={mode}", umask=umask)
                seen = json.loads(watcher.stdout.readline())
            finally:
                watcher.kill()
        assert seen[-1] == int(mode, 8)
        assert all(found & ~int(mode, 8) == 0 for found in seen), [oct(found) for found in seen]

    def test_never_more_step_by_step(self, bus, directory):
        """The same at each step of the server: it is looked at before each change of the file."""
        (directory / "sitecustomize.py").write_text(
            "import os, sys\n"
            f"path = {str(directory / 'bus')!r}\n"
            "def hook(event, args):\n"
            "    if event in ('os.chmod', 'os.chown', 'socket.bind', 'socket.listen') and os.path.exists(path):\n"
            "        print('step', event, oct(os.stat(path).st_mode & 0o7777), flush=True)\n"
            "sys.addaudithook(hook)\n"
        )
        path = os.pathsep.join([str(directory), *filter(None, [os.environ.get("PYTHONPATH")])])
        started = bus("--mode=0640", f"--group={os.getegid()}", umask=0, env={"PYTHONPATH": path})
        steps = [match[1] for match in started.wait_log(r"step os\.ch\w+ (0o\d+)", 2)]
        assert set(steps) == {"0o0"}

    @pytest.mark.parametrize("mode", ["", "rwx", "1777"])
    def test_no_mode(self, directory, mode):
        """Text that is not a mode is refused with an example of one."""
        line = refusal(directory, f"--mode={mode}")
        assert f"--mode={mode}: " in line
        assert "such as 770" in line

    def test_others_are_kept_out(self, as_root, bus):
        """With the default mode no other user can connect."""
        started = bus()
        with pytest.raises(PermissionError):
            Client(started.address, user=OTHER_USER)

    @pytest.mark.parametrize("by", ["name", "number"])
    def test_group(self, as_root, bus, directory, by):
        """The file belongs to the group, whose members may connect if the mode says so; others may not."""
        group = next(entry for entry in grp.getgrall() if entry.gr_gid not in (os.getegid(), 65534))
        started = bus("--mode=0770", f"--group={group.gr_name if by == 'name' else group.gr_gid}")
        assert (directory / "bus").stat().st_gid == group.gr_gid
        member = started.client(b"hello", user=(OTHER_USER[0], group.gr_gid))
        packet = member.msg(b"hello")
        assert member.sync() == [packet]
        with pytest.raises(PermissionError):
            Client(started.address, user=OTHER_USER)

    def test_no_such_group(self, directory):
        """A group that does not exist is refused before there is a socket."""
        line = refusal(directory, "--group=no-such-group")
        assert "there is no group 'no-such-group'" in line
        assert "getent group" in line

    def test_group_of_others(self, become, directory):
        """A user who is not a member of the group (nor root) gets an error that says so."""
        directory.chmod(0o777)
        line = refusal(directory, "--group=0", before=become)
        assert "only a member of the group (or root)" in line
        assert "--group" in line


class TestUsers:
    """--allow-user, and policies."""

    def test_only_those(self, as_root, bus):
        """Only the named users and the server's own are admitted; the log names the others."""
        started = bus("--mode=0777", f"--allow-user={OTHER_USER[0]}")
        allowed = started.client(b"hello", user=OTHER_USER)
        own = started.client()
        packet = own.msg(b"hello")
        own.sync()
        assert allowed.sync() == [packet]
        refused = started.client(user=THIRD_USER)
        assert refused.has_ended()
        who = f"pid {refused.pid} uid {refused.uid} gid {refused.gid}"
        started.wait_log(f"warn: refused a connection from {who}: the client's user is not allowed on this bus")

    def test_by_name_and_several(self, as_root, bus):
        """Users can be given by name, and more than one."""
        user = next(entry for entry in pwd.getpwall() if entry.pw_uid not in (0, 65534))
        started = bus("--mode=0777", f"--allow-user={user.pw_name}", "-u", str(THIRD_USER[0]))
        for allowed in ((user.pw_uid, user.pw_gid), THIRD_USER):
            assert started.client(user=allowed).sync() == []
        assert started.client(user=OTHER_USER).has_ended()

    @pytest.mark.parametrize("group", [OTHER_USER[0], 0])
    def test_the_group_does_not_matter(self, as_root, bus, group):
        """The UID decides."""
        started = bus("--mode=0777", f"--allow-user={OTHER_USER[0]}")
        assert started.client(user=(OTHER_USER[0], group)).sync() == []
        assert started.client(user=(THIRD_USER[0], group)).has_ended()

    def test_refused_publisher(self, as_root, bus):
        """Packets that a refused user has sent in the meantime are not handled."""
        started = bus("--mode=0777", f"--allow-user={OTHER_USER[0]}")
        listener = started.client(b"")
        with paused(started.pid):
            refused = Client(started.address, user=THIRD_USER)
            refused.msg(b"hello")
        with refused:
            assert refused.rest() == []
        assert listener.sync() == []

    def test_own_user_is_always_allowed(self, become, bus, directory):
        """The server's own user need not be named; root must be."""
        directory.chmod(0o777)
        started = bus("--mode=0777", f"--allow-user={THIRD_USER[0]}", before=become)
        assert started.client(user=OTHER_USER).sync() == []
        assert started.client(user=THIRD_USER).sync() == []
        assert started.client().has_ended()

    def test_no_such_user(self, directory):
        """A user that does not exist is refused."""
        line = refusal(directory, "--allow-user=no-such-user")
        assert "--allow-user=no-such-user: there is no such user" in line
        assert "getent passwd" in line

    @pytest.mark.parametrize("uid", ["4294967295", "-1"])
    def test_no_uid(self, directory, uid):
        """Text that is not a UID is refused."""
        assert f"--allow-user={uid}: " in refusal(directory, f"--allow-user={uid}")

    def test_own_user_policy(self, as_root, bus):
        """--credentials=own-user refuses every other user, whatever the mode and --allow-user say."""
        started = bus("--mode=0777", "--credentials=own-user", f"--allow-user={OTHER_USER[0]}")
        assert started.client().sync() == []
        assert started.client(user=OTHER_USER).has_ended()

    def test_no_such_policy(self, directory):
        """A policy that is not installed is refused, and the error lists those that are."""
        line = refusal(directory, "--credentials=none-such")
        assert "'none-such'" in line
        assert "kernel, own-user" in line


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
