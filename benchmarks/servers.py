"""The measured servers: how to build, start and stop each, and its load generator.

Limits are raised until no server drops a message: a server that drops is fast, and a loss voids a run. What each
does by default is in the comments.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.policies import policy

__all__ = [
    "OURS",
    "SERVERS",
    "Failed",
    "Running",
    "Server",
    "Unavailable",
    "Workshop",
    "allow_many_files",
    "running",
    "twistd",
]

SOURCES = Path(__file__).parent / "c"
_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"])
_MOST_FILES = 20_000
_PATIENCE = 5.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class Unavailable(Exception):
    """A server that cannot be measured on this machine; the text gives the reason."""


class Failed(Exception):
    """A run that does not count; the text gives the reason."""


@dataclass(frozen=True)
class Server:
    """One kind of server.

    :ivar command: its words; ``{address}``, ``{folder}``, ``{config}`` and ``{bin}`` (what was built) are filled in.
        Empty where there is none to start.
    :ivar generator: the C file, without ``.c``, that speaks to it.
    :ivar config: the text of its configuration file.
    :ivar parts: more C files that are programs.
    :ivar libraries: what these and the generator are linked with.
    :ivar is_tcp: its address is a port on the loopback.
    :ivar gathers: it puts messages together by itself, so that unbatched and pipelined are one.
    :ivar own: a bus that speaks our protocol; most workloads make sense for these only.
    :ivar settings: for the generator, whatever is measured.
    :ivar is_usual: whether it is measured if no names are given.
    :ivar version: a command whose output has the version.
    """

    name: str
    title: str
    generator: str
    command: tuple[str, ...] = ()
    config: str = ""
    parts: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    is_tcp: bool = False
    gathers: bool = False
    own: bool = False
    version: tuple[str, ...] = ()
    settings: tuple[tuple[str, int], ...] = ()
    is_usual: bool = True

    @property
    def runs(self) -> bool:
        """Return whether there is a process to start."""
        return bool(self.command)


def twistd(*options: str) -> tuple[str, ...]:
    """Return the command that starts sbus, with options of ``twistd sbus``."""
    script = Path(sys.executable).with_name("twistd")
    start = [str(script)] if script.exists() else ["-c", "from twisted.scripts.twistd import run; run()"]
    return (sys.executable, *start, "-n", "--pidfile=", "sbus", "--socket={address}", *options)


_UNBOUNDED = ("--queue-messages=100000000", "--queue-bytes=100000000000", "--total-queue-bytes=100000000000")

_MOSQUITTO = f"""\
listener 0 {{address}}
allow_anonymous true
persistence false
log_type error
max_queued_messages 0
max_queued_bytes 0
{"user root" if os.geteuid() == 0 else ""}
"""

_REDIS = """\
port 0
unixsocket {address}
dir {folder}
save ""
appendonly no
loglevel warning
maxclients 15000
client-output-buffer-limit pubsub 0 0 0
"""

_NATS = """\
listen: "127.0.0.1:{address}"
max_pending: 64GB
max_connections: 70000
write_deadline: "10m"
ping_interval: "10m"
"""

_DBUS_DAEMON = """\
<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-BUS Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig>
  <type>session</type>
  <listen>unix:path={address}</listen>
  <policy context="default">
    <allow user="*"/><allow own="*"/><allow send_destination="*"/><allow eavesdrop="true"/>
  </policy>
  <limit name="max_incoming_bytes">1000000</limit>
  <limit name="max_outgoing_bytes">4000000000</limit>
  <limit name="max_connections_per_user">30000</limit>
  <limit name="max_completed_connections">30000</limit>
  <limit name="max_incomplete_connections">30000</limit>
  <limit name="max_match_rules_per_connection">30000</limit>
</busconfig>
"""

OURS = ("sbus", "bundles")
"""The servers of this package."""

SERVERS: dict[str, Server] = {
    server.name: server
    for server in (
        Server(
            "sbus",
            "sbus",
            "sbus",
            # By default it drops for a receiver that is 65,536 messages or 64 MiB behind.
            command=twistd(*_UNBOUNDED),
            own=True,
        ),
        # The same server, with clients that ask for bundles.
        Server(
            "bundles",
            "sbus, bundles",
            "sbus",
            command=twistd(*_UNBOUNDED),
            gathers=True,
            settings=(("bundles", 1),),
        ),
        # The same server, which has to ask what each client may do.
        Server(
            "policy",
            "sbus, a policy of 100 rules",
            "sbus",
            command=twistd(*_UNBOUNDED, "--policy={config}"),
            config=policy(100),
            own=True,
            is_usual=False,
        ),
        # It never drops, as it waits for the slowest.
        Server(
            "yardstick",
            "yardstick (plain C)",
            "sbus",
            ("{bin}/yardstick", "{address}"),
            parts=("yardstick",),
            own=True,
        ),
        # By default it cuts a subscriber off that is 32 MB behind.
        Server(
            "redis",
            "redis",
            "redis",
            ("redis-server", "{config}"),
            _REDIS,
            version=("redis-server", "--version"),
        ),
        # By default it cuts a subscriber off that is 64 MB or 10 seconds behind.
        Server(
            "nats", "nats", "nats", ("nats-server", "-c", "{config}"), _NATS, is_tcp=True, version=("nats-server", "-v")
        ),
        # By default it drops for a subscriber that is 1000 messages behind.
        Server(
            "mosquitto",
            "mosquitto",
            "mqtt",
            ("mosquitto", "-c", "{config}"),
            _MOSQUITTO,
            version=("mosquitto", "-h"),
        ),
        # It stops reading from a sender that has max_incoming_bytes under way; the limit of what is on its way out must
        # be higher.
        Server(
            "dbus-daemon",
            "dbus-daemon",
            "dbus",
            ("dbus-daemon", "--config-file={config}", "--nofork", "--nopidfile"),
            _DBUS_DAEMON,
            version=("dbus-daemon", "--version"),
        ),
        # By default it cuts a subscriber off whose user has too many bytes under way.
        Server(
            "dbus-broker",
            "dbus-broker",
            "dbus",
            ("{bin}/dbus_broker", "{address}"),
            parts=("dbus_broker",),
            libraries=("-lsystemd",),
            version=("dbus-broker", "--version"),
        ),
        # By default it drops for a subscriber that is 1000 messages behind.
        Server(
            "zmq",
            "zmq proxy",
            "zmq",
            ("{bin}/zmq", "serve", "{address}"),
            libraries=("-lzmq",),
            gathers=True,
            version=("{bin}/zmq", "version"),
        ),
        Server("kernel", "kernel (no server)", "kernel"),
    )
}


# --- building -------------------------------------------------------------------------------------


@dataclass
class Workshop:
    """The directory in which C programs are built and servers run."""

    folder: Path
    _built: dict[str, Path] = field(default_factory=dict)

    def build(self, name: str, flags: Sequence[str] = ()) -> Path:
        """Compile ``c/NAME.c``, with the engine if it is a load generator.

        :param flags: for the compiler: the libraries, say.
        :raises Unavailable: if that does not work.
        """
        if name not in self._built:
            program = self.folder / name
            source = SOURCES / f"{name}.c"
            files = [str(source)]
            if re.search(r"^const struct bus bus", source.read_text(), re.MULTILINE):
                files.insert(0, str(SOURCES / "engine.c"))
            compiler = os.environ.get("CC", "gcc")
            if shutil.which(compiler) is None:
                raise Unavailable(f"there is no C compiler ({compiler})")
            command = [compiler, "-O2", "-pthread", "-o", str(program), *files, "-lm", *flags]
            made = subprocess.run(command, capture_output=True, text=True, timeout=120)
            if made.returncode:
                lines = [line for line in made.stderr.splitlines() if "error" in line] or ["no reason given"]
                raise Unavailable(f"{name}.c cannot be built: {lines[0]}")
            self._built[name] = program
        return self._built[name]

    def prepare(self, server: Server) -> None:
        """Build the programs that a server needs.

        :raises Unavailable: if it cannot be measured here.
        """
        for word in (*server.command[:1], *server.version[:1]):
            if "{" not in word and shutil.which(word, path=_PATH) is None:
                raise Unavailable(f"{word} is not installed")
        if server.name == "dbus-broker" and shutil.which("dbus-broker", path=_PATH) is None:
            raise Unavailable("dbus-broker is not installed")
        for part in (server.generator, *server.parts):
            self.build(part, server.libraries)

    def version(self, server: Server) -> str:
        """Return the version that a server reports; empty if it has no such option."""
        if not server.version:
            return ""
        command = [word.format(bin=self.folder) for word in server.version]
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, env={**os.environ, "PATH": _PATH})
        found = re.search(r"\d+(\.\d+)*", said.stdout + said.stderr)
        return found[0] if found else "?"

    def generate(
        self,
        server: Server,
        mode: str,
        address: str,
        settings: dict[str, Any],
        *,
        cpus: set[int] | None = None,
        most: float = 60,
    ) -> dict[str, Any]:
        """Run the load generator to its end, and return its output.

        :raises Failed: if it fails, or takes more than `most` seconds.
        """
        with self.generating(server, mode, address, settings, cpus=cpus, most=most) as read:
            return read()

    @contextlib.contextmanager
    def generating(
        self,
        server: Server,
        mode: str,
        address: str,
        settings: dict[str, Any],
        *,
        cpus: set[int] | None = None,
        most: float = 60,
    ) -> Iterator[Callable[[], dict[str, Any]]]:
        """Run the load generator, and yield a function that waits for its output.

        The generator's input ends with the context.
        """
        program = self.build(server.generator, server.libraries)
        words = [
            f"{name}={value}" for name, value in {**settings, **dict(server.settings), "deadline": int(most)}.items()
        ]
        process = subprocess.Popen(
            [str(program), mode, address, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=_child(cpus),
        )
        stdin, stdout, stderr = process.stdin, process.stdout, process.stderr
        assert stdin is not None
        assert stdout is not None
        assert stderr is not None

        def read() -> dict[str, Any]:
            line = stdout.readline()  # it has an alarm clock of its own
            try:
                found: dict[str, Any] = json.loads(line)
            except ValueError:
                process.kill()
                said = stderr.read().decode(errors="replace").strip()
                raise Failed(f"the generator: {said[-300:] or 'no word of it in ' + str(int(most)) + ' s'}") from None
            return found

        try:
            yield read
        finally:
            stdin.close()
            _await(process)
            stdout.close()
            stderr.close()


# --- running --------------------------------------------------------------------------------------


@dataclass
class Running:
    """A running server (or, for the kernel, nothing)."""

    address: str
    started: float
    process: subprocess.Popen[bytes] | None
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid if self.process else 0

    def memory(self) -> dict[str, int]:
        """Return the resident memory in kilobytes, now and at its peak."""
        if self.process is None:
            return {}
        status = Path(f"/proc/{self.pid}/status").read_text()
        found = dict(re.findall(r"^(VmRSS|VmHWM):\s+(\d+) kB", status, re.MULTILINE))
        return {"rss_kb": int(found.get("VmRSS", 0)), "peak_kb": int(found.get("VmHWM", 0))}


@contextlib.contextmanager
def running(
    workshop: Workshop, server: Server, *, cpus: set[int] | None = None, command: Sequence[str] | None = None
) -> Iterator[Running]:
    """Run a fresh server in an empty directory, and end it by its process ID.

    :raises Failed: if it ended by itself.
    """
    with tempfile.TemporaryDirectory(prefix="bus-", dir=workshop.folder) as folder:
        address = str(_free_port()) if server.is_tcp else f"{folder}/s" if server.runs else "-"
        log = Path(folder, "log")
        process = None
        words = {"address": address, "folder": folder, "config": f"{folder}/config", "bin": str(workshop.folder)}
        if server.config:
            Path(words["config"]).write_text(server.config.format(**words))
        started = time.monotonic()
        if server.runs:
            argv = [word.format(**words) for word in command or server.command]
            with log.open("wb") as output:
                process = subprocess.Popen(
                    [shutil.which(argv[0], path=_PATH) or argv[0], *argv[1:]],
                    cwd=folder,
                    env={**os.environ, "PATH": _PATH},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    preexec_fn=_child(cpus),
                )
        try:
            failed = None
            try:
                yield Running(address, started, process, log)
            except Failed as e:
                failed = e
            if process is not None and process.poll() is not None:
                said = log.read_text(errors="replace")[-300:]
                failed = Failed(f"the server has ended by itself ({process.returncode}): {said}")
            if failed is not None:
                raise failed
        finally:
            if process is not None:
                process.terminate()
                _await(process)


def _await(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process that is about to end; kill it if it does not."""
    try:
        process.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _child(cpus: set[int] | None) -> Callable[[], None]:
    """Prepare a child before exec: it ends with its parent, and stays on its CPUs."""

    def prepare() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if cpus:
            os.sched_setaffinity(0, cpus)

    return prepare


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def allow_many_files() -> int:
    """Raise the limit of open files as far as permitted, up to a bound, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return _MOST_FILES
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most
