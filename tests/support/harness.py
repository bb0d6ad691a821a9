"""The integration tests' tools: the real twistd as a process, and clients that do not use this package.

The clients use nothing but Python's `socket`, as a client of the original would. Nothing here
sleeps: a client waits for a packet, a server for its log; a wait that times out fails.
"""

from __future__ import annotations

import array
import itertools
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from sbus.syscalls.polling import is_readable
from tests.support import nursery
from tests.support.other_users import connect_as

TIMEOUT = 20.0
"""Time limit for anything that should happen, in seconds.

A busy machine needs it. It is shorter than the block time-out of a bus, which would end what must not begin.
"""

OTHER_USER = (12001, 12001)
"""A UID and a GID of no real user: neither root nor the overflow IDs."""
THIRD_USER = (12002, 12002)
SAME_USER = (os.geteuid(), os.getegid())
"""The user of a client that differs from the others in its PID only."""

ALL_LINES = 1_000_000_000
"""A ``--log-rate`` at which each event has its own line, as tests that wait for lines need."""

WHOAMI = b"CMSG !/cred/whoami"

_LARGEST = 4 << 20


def twistd() -> list[str]:
    """The command that starts the twistd of the interpreter in use."""
    installed = script("twistd")
    if Path(installed[1]).exists():
        return installed
    return [sys.executable, "-c", "from twisted.scripts.twistd import run; run()"]


def can_fork(env: Mapping[str, str | None] | None = None, before: Sequence[str | Path] = ()) -> bool:
    """Return whether a process may be a fork, given the changes of its environment and the command that starts it.

    It may not where coverage is measured, which each process begins by itself, nor if Python would read the variables
    when it starts. Of commands, setpriv alone can start a nursery instead: it leaves the process as it is.
    """
    env = env or {}
    early = any(name.startswith(("LC_", "PYTHON", "TZ")) and name != "PYTHONPATH" for name in env)
    folders = (env.get("PYTHONPATH") or "").split(os.pathsep)
    early |= any((Path(folder) / "sitecustomize.py").exists() for folder in folders if folder)
    early |= bool(before) and before[0] != "setpriv"
    return len(twistd()) == 2 and not early and not any(name.startswith("COVERAGE_PROCESS") for name in os.environ)


def script(name: str) -> list[str]:
    """The command that runs an installed script with the interpreter in use."""
    return [sys.executable, str(Path(sys.executable).with_name(name))]


def run(
    command: Sequence[str | Path],
    directory: str | Path = ".",
    *,
    env: Mapping[str, str | None] | None = None,
    before: Sequence[str | Path] = (),
    pass_fds: Sequence[int] = (),
    timeout: float = TIMEOUT,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, without input. Fork a Python script or ``-c`` program from the nursery if possible.

    :param env: changes of the environment; see `environment_with`.
    :param before: a command that starts the one given behind it.
    """
    words, first, environ = [str(word) for word in command], [*map(str, before)], environment_with(env or {})
    result: subprocess.CompletedProcess[bytes]
    if words[0] == sys.executable and (words[1] == "-c" or words[1][0] != "-") and can_fork(env, first):
        result = nursery.run(words[1:], cwd=directory, env=environ, pass_fds=pass_fds, timeout=timeout, within=first)
    else:
        result = subprocess.run(
            [*first, *words],
            cwd=directory,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            pass_fds=pass_fds,
            timeout=timeout,
        )
    return subprocess.CompletedProcess(
        words, result.returncode, *(os.fsdecode(output) for output in (result.stdout, result.stderr))
    )


def name_of(address: str | Path) -> bytes:
    """Return the address for connect(2), from its form on the command line."""
    text = str(address)
    if text.startswith("@"):
        return b"\0" + text[1:].encode()
    if text.startswith("/dev/unix/abstract/"):
        return bytes.fromhex(text.rpartition("/")[2])
    return text.encode()


class Client:
    """A raw client: a SEQPACKET socket with a time limit for every wait.

    :param address: as the server's ``--socket``.
    :param user: connect as this (uid, gid), in a process of its own.
    :ivar pid, uid, gid: the credentials that the kernel reports to the server.
    """

    _buffer = bytearray(_LARGEST)
    _numbers = itertools.count()

    def __init__(self, address: str | Path, *, user: tuple[int, int] | None = None) -> None:
        self.pid, self.uid, self.gid = os.getpid(), os.geteuid(), os.getegid()
        if user is None:
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                self.sock.connect(name_of(address))
            except BaseException:
                self.sock.close()
                raise
        else:
            self.sock, self.pid = connect_as(name_of(address), user, TIMEOUT)
            self.uid, self.gid = user
        self.sock.setblocking(False)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def credentials(self) -> bytes:
        """The beginning of this client's own secret keys."""
        return b"!/cred/%d/%d/%d" % (self.gid, self.uid, self.pid)

    def send(self, packet: bytes) -> None:
        """Send, as soon as there is room."""
        while not self.push(packet):
            assert self._wait(select.POLLOUT), f"there is no room for a packet for {TIMEOUT} s"

    def sub(self, *patterns: bytes) -> None:
        for pattern in patterns:
            self.send(b"SUB " + pattern)

    def unsub(self, pattern: bytes) -> None:
        self.send(b"UNSUB " + pattern)

    def msg(self, key: bytes, payload: bytes = b"") -> bytes:
        packet = b"MSG " + key + b"\0" + payload
        self.send(packet)
        return packet

    def cmsg(self, *keys: bytes) -> None:
        for key in keys:
            self.send(b"CMSG " + key)

    def push(self, packet: bytes) -> bool:
        """Send without waiting. Return whether the packet was sent."""
        try:
            return self.sock.send(packet) == len(packet)
        except BlockingIOError:
            return False

    def recv(self) -> bytes:
        """Return the next packet, or an empty one at end-of-file."""
        was_reset = False
        while True:
            try:
                return bytes(memoryview(self._buffer)[: self.sock.recv_into(self._buffer)])
            except BlockingIOError:
                assert self._wait(select.POLLIN), f"nothing arrived for {TIMEOUT} s"
            except ConnectionResetError:
                if was_reset:
                    return b""
                was_reset = True  # reported once, before the packets that still wait

    def _wait(self, event: int, timeout: float = TIMEOUT) -> bool:
        poll = select.poll()
        poll.register(self.sock, event)
        return bool(poll.poll(timeout * 1000))

    def waits_for_room(self, timeout: float) -> bool:
        """Wait until something can be sent. Return whether it can."""
        return self._wait(select.POLLOUT, timeout)

    def receive(self, count: int) -> list[bytes]:
        """Return `count` packets."""
        packets: list[bytes] = []
        for _ in range(count):
            packet = self.recv()
            assert packet, f"the connection ended after {len(packets)} packets of {count}"
            packets.append(packet)
        return packets

    def has_input(self) -> bool:
        """Return whether a packet or end-of-file can be read now."""
        return self._wait(select.POLLIN, 0)

    def sync(self) -> list[bytes]:
        """Wait until the server has handled everything sent before. Return what arrived until then.

        What others sent that the server had handled by then is among it, unless the client chose
        an order other than ``order/queue``.
        """
        self.send(WHOAMI)
        packets: list[bytes] = []
        while not (packet := self.recv()).startswith(WHOAMI + b"\0"):
            assert packet, f"the connection ended, after {packets!r:.200}"
            packets.append(packet)
        return packets

    def echo(self, key: bytes = b"to/myself") -> list[bytes]:
        """Do what `sync` does in a dialect without whoami: wait for a message to this client itself."""
        self.sub(key)
        mine = self.msg(key, b"%d" % next(self._numbers))
        self.unsub(key)
        packets: list[bytes] = []
        while (packet := self.recv()) != mine:
            assert packet, f"the connection ended, after {packets!r:.200}"
            packets.append(packet)
        return packets

    def rest(self) -> list[bytes]:
        """Return everything up to end-of-file."""
        packets: list[bytes] = []
        while packet := self.recv():
            packets.append(packet)
        return packets

    def has_ended(self) -> bool:
        """Wait for end-of-file. Return False if a packet arrives instead."""
        return not self.recv()

    def close(self) -> None:
        self.sock.close()


class Process:
    """A twistd process. Its standard output and error are collected in one text.

    :param arguments: twistd's, the plugin's name included.
    :param before: a command that starts the one given behind it.
    :ivar launcher: a command to run instead of ``twistd``; only Python scripts, such as ``twistd``, are forked.
    """

    launcher: Sequence[str] = ()

    def __init__(
        self,
        directory: Path,
        arguments: Iterable[str | Path],
        *,
        env: Mapping[str, str | None] | None = None,
        before: Sequence[str | Path] = (),
        pass_fds: Sequence[int] = (),
        umask: int = -1,
    ) -> None:
        words = [str(part) for part in (*(self.launcher or twistd()), *arguments)]
        self.command = [*map(str, before), *words]
        self._lines: list[str] = []
        self._mark = 0
        self._changed = threading.Condition()
        self._over = False
        self._process: subprocess.Popen[str] | nursery.Forked
        is_script = words[0] == sys.executable and words[1][0] != "-"
        if not is_script or not can_fork(env, before):
            self._process = subprocess.Popen(
                self.command,
                cwd=directory,
                env=environment_with(env or {}),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="backslashreplace",
                pass_fds=pass_fds,
                umask=umask,
            )
        else:
            first = self.command[: len(before)]
            self._process = nursery.Forked(words[1:], directory, environment_with(env or {}), pass_fds, umask, first)
        self.pid = self._process.pid
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                with self._changed:
                    self._lines.append(line)
                    self._changed.notify_all()
        with self._changed:
            self._over = True
            self._changed.notify_all()

    @property
    def log(self) -> str:
        """All output so far, or since the `mark`."""
        with self._changed:
            return "".join(self._lines[self._mark :])

    def mark(self) -> None:
        """Ignore the output so far, because another test begins."""
        with self._changed:
            self._mark = len(self._lines)

    def wait_log(self, pattern: str, count: int = 1) -> list[re.Match[str]]:
        """Wait until the output contains the pattern (`count` times). Return the matches."""
        with self._changed:
            deadline = time.monotonic() + TIMEOUT
            while True:
                found = list(re.finditer(pattern, "".join(self._lines[self._mark :]), re.MULTILINE))
                if len(found) >= count:
                    return found
                left = deadline - time.monotonic()
                assert left > 0, f"no {pattern!r} in the log for {TIMEOUT} s"
                assert not self._over, f"the process ended without {pattern!r} in its log"
                self._changed.wait(left)

    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait(self) -> int:
        """Wait for the end. Return the exit status; a negative one is the signal that ended the process."""
        status = self._process.wait(TIMEOUT)
        self._reader.join(TIMEOUT)
        return status

    def kill(self, number: int) -> None:
        self._process.send_signal(number)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End the process with a signal. Return the exit status."""
        self.kill(number)
        return self.wait()

    def ensure_gone(self) -> None:
        """Clean up in any case."""
        if self.is_running():
            self._process.kill()
        self._process.wait()
        self._reader.join(TIMEOUT)

    # --- what /proc shows --------------------------------------------------------------------

    def cpu(self) -> float:
        """Return the CPU time used so far, in seconds."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def descriptors(self) -> dict[int, str]:
        """Return the open descriptors."""
        found = {}
        for entry in Path(f"/proc/{self.pid}/fd").iterdir():
            try:
                found[int(entry.name)] = os.readlink(entry)
            except FileNotFoundError:  # it was the one that listed them
                continue
        return found

    def memory(self) -> int:
        """Return the resident memory, in bytes."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Bus(Process):
    """A bus that a real twistd serves.

    :param options: those of ``twistd sbus``, besides ``--socket``.
    :param address: the ``--socket``; by default a path in the directory.
    :param flags: twistd's own options.
    :param named: whether to name the address on the command line.
    """

    def __init__(
        self,
        directory: Path,
        *options: str,
        address: str | Path | None = None,
        flags: Sequence[str | Path] = ("-n", "--pidfile="),
        named: bool = True,
        env: Mapping[str, str | None] | None = None,
        before: Sequence[str | Path] = (),
        pass_fds: Sequence[int] = (),
        umask: int = -1,
    ) -> None:
        self.address: str | Path = directory / "bus" if address is None else address
        self._clients: list[Client] = []
        self._before = self._leases = 0
        socket_option = [f"--socket={self.address}"] if named else []
        arguments = [*flags, "sbus", *socket_option, "--log-level=debug", f"--log-rate={ALL_LINES}", *options]
        super().__init__(directory, arguments, env=env, before=before, pass_fds=pass_fds, umask=umask)

    def wait_started(self) -> Bus:
        self.wait_log(r"sbus listens on .*")
        return self

    def has_started(self) -> bool:
        """Wait for the start. Return whether the bus has started."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or "sbus listens on" in "".join(self._lines), TIMEOUT)
        return "sbus listens on" in self.log

    def client(self, *patterns: bytes, user: tuple[int, int] | None = None) -> Client:
        """Return a connected client whose subscriptions are in force."""
        client = Client(self.address, user=user)
        self._clients.append(client)
        if patterns:
            client.sub(*patterns)
            assert client.sync() == []
        return client

    def lease(self) -> Bus:
        """Begin a test with a bus that was used before and has no clients now."""
        # What the log says of the last test may still be on its way: the client that breaks this rule is the last one.
        self._leases += 1
        with Client(self.address) as last:
            last.sub(b"lease/!/%d" % self._leases)
            last.rest()
        found = self.wait_log(rf"violation by client (\d+), .*lease/!/{self._leases}\D")
        self._before = int(found[-1][1])
        self.wait_log(f"client {self._before} disconnected: ")
        self.mark()
        return self

    def nth(self, number: int) -> int:
        """Return the log's number of the client that connected as number `number` in this test."""
        return self._before + number

    def release(self) -> None:
        """End a test: disconnect all clients, and wait until the server has noticed."""
        self.disconnect()
        with self._changed:
            done = self._changed.wait_for(
                lambda: self._over or self._count(" connected: ") == self._count(" disconnected: "), TIMEOUT
            )
        assert done, "the bus has clients that are gone"

    def _count(self, text: str) -> int:
        return sum(text in line for line in self._lines)

    def disconnect(self) -> None:
        for client in self._clients:
            client.close()
        self._clients.clear()

    def ensure_gone(self) -> None:
        self.disconnect()
        super().ensure_gone()

    def dropped(self) -> int:
        """Return the number of messages that the log reports as dropped so far."""
        return sum(int(n) for n in re.findall(r"dropped (\d+) messages", self.log))


def refusal(
    directory: Path,
    *options: str,
    address: str | Path | None = None,
    flags: Sequence[str | Path] = ("-n",),
    named: bool = True,
    env: Mapping[str, str | None] | None = None,
    before: Sequence[str | Path] = (),
    pass_fds: Sequence[int] = (),
) -> str:
    """Return the one line on standard error that explains why a bus does not start; it leaves nothing behind."""
    there = sorted(os.listdir(directory))
    where = [f"--socket={directory / 'bus' if address is None else address}"] if named else []
    command = [*twistd(), *flags, "sbus", *where, *options]
    result = run(command, directory, env=env, before=before, pass_fds=pass_fds)
    assert result.returncode > 0, result
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert "Traceback" not in lines[0]
    assert lines[0].startswith("sbus: ")
    assert sorted(os.listdir(directory)) == there, "something was left behind, or removed"
    return lines[0]


def environment_with(changes: Mapping[str, str | None]) -> dict[str, str]:
    """Return the environment for a twistd: this one without systemd's sockets, with these changes (None removes)."""
    environment: dict[str, str] = {**os.environ, "PYTHONWARNINGS": "default"}
    for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"):
        environment.pop(name, None)
    for name, value in changes.items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    return environment


def numbered(key: bytes, count: int, size: int = 0, start: int = 0) -> list[bytes]:
    """Return distinguishable messages, each of at least `size` bytes."""
    return [(b"MSG %b\0%d " % (key, i)).ljust(size, b".") for i in range(start, start + count)]


def is_held_back(publisher: Client, bystander: Client, packet: bytes, most: int = 20_000) -> bool:
    """Return whether the server has stopped reading from a publisher: its socket fills up and stays full.

    To stay full means: while the server served the bystander many times. `most` packets or so are
    more than any socket holds.
    """
    sent = turns = 0
    while turns < 30:
        if publisher.push(packet):
            sent += 1
            turns = 0
            if sent > most:
                return False
        else:
            bystander.sync()
            turns += 1
    return True


def goes_on(bus: Bus, count: int = 100) -> bool:
    """Return whether two new clients can exchange many messages."""
    with Client(bus.address) as one, Client(bus.address) as other:
        other.sub(b"bystander/*")
        other.sync()
        for packet in numbered(b"bystander/talk", count):
            one.send(packet)  # one by one, so that they need no room in a queue
            if other.recv() != packet:
                return False
        return one.sync() == other.sync() == []


def wait_end(pid: int) -> None:
    """Wait for the end of a process that is not a child of this one."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert is_readable(fd, TIMEOUT), f"process {pid} does not end"
    finally:
        os.close(fd)


def send_with_descriptors(client: Client, packet: bytes, descriptors: Sequence[int]) -> None:
    """Send a packet together with descriptors (SCM_RIGHTS)."""
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
    client.sock.sendmsg([packet], [rights])
