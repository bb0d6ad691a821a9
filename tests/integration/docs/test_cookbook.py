"""Each program of the cookbook does what its page says."""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.docs.pages import Script
from tests.integration.docs.programs import COMPILER, COOKBOOK, output, run
from tests.support.harness import OTHER_USER, TIMEOUT, Client, Process
from tests.support.queues import QueueProcess, ask
from tests.support.servers import StartBus
from tests.support.waiting import wait_until

Start = Callable[..., Script]


@pytest.fixture
def start(spawn: Callable[..., Any], directory: Path) -> Start:
    """Start an example: ``start("mail.py", "read", address)``; its output is in its ``log``."""

    def start(name: str, *arguments: object, before: list[str] | None = None, **env: str) -> Script:
        command = [*(before or []), sys.executable, COOKBOOK / name, *map(str, arguments)]
        script: Script = spawn(Script, directory, *command, env=env)
        return script

    return start


# --- the cookbook ---------------------------------------------------------------------------------


def test_telemetry(bus: StartBus, start: Start, directory: Path) -> None:
    """``watch`` prints readings, the last one first, and ``keep`` has all of them in its file."""
    started = bus("--last-value=telemetry/")
    address = started.address
    with started.client() as early:
        early.msg(b"telemetry/early/load", b"%.3f 0.25" % time.time())
        early.sync()
    keeping = start("telemetry.py", "keep", address, directory / "readings")
    keeping.wait_log("^keeping$")
    watching = start("telemetry.py", "watch", address)
    watching.wait_log(r"^early 0\.25 \d+\.\d s ago$")
    start("telemetry.py", "measure", address, "host", "0.01")
    assert watching.wait_log(r"^host \d+\.\d\d \d+\.\d s ago$", count=3)
    text = wait_until((directory / "readings").read_text, lambda text: text.count("\n") >= 3)
    kept = text.rpartition("\n")[0].splitlines()
    assert all(re.fullmatch(r"telemetry/host/load \d+\.\d{3} \d+\.\d\d", line) for line in kept)


def test_calculator(bus: StartBus, start: Start) -> None:
    """Replies and errors come back, and a request without a responder says so."""
    address = bus().address
    server = start("calculator.py", "serve", address)
    server.wait_log("at your service")
    assert output("cookbook/calculator.py", "ask", address, "sum", "1", "2.5", "3") == "6.5\n"
    assert output("cookbook/calculator.py", "ask", address, "product", "2", "3") == "6\n"
    assert (
        "the calculator says: could not convert string to float: "
        in run("cookbook/calculator.py", "ask", address, "sum", "x").stderr
    )
    server.stop(signal.SIGKILL)
    done = run("cookbook/calculator.py", "ask", address, "sum", "1")
    assert (done.returncode, done.stderr) == (1, "no calculator is there, or it does not answer\n")


def test_mail(bus: StartBus, start: Start) -> None:
    """Mail reaches the user with the UID."""
    address = bus().address
    reader = start("mail.py", "read", address)
    reader.wait_log("waiting for mail")
    output("cookbook/mail.py", "send", address, os.geteuid(), "hello")
    reader.wait_log("^hello$")


@pytest.mark.slow
def test_mail_of_others(bus: StartBus, start: Start, become: list[str]) -> None:
    """Mail for one user does not reach another, not even root's own reader."""
    address = bus("--mode=0777").address
    ours, theirs = (start("mail.py", "read", address, before=before) for before in ([], become))
    for reader in (ours, theirs):
        reader.wait_log("waiting for mail")
    output("cookbook/mail.py", "send", address, OTHER_USER[0], "for you")
    output("cookbook/mail.py", "send", address, "root", "for root", before=become)
    theirs.wait_log("^for you$")
    ours.wait_log("^for root$")
    assert "for you" not in ours.log
    assert "for root" not in theirs.log


def test_pump(bus: StartBus, start: Start) -> None:
    """The administrator commands the pump, and its display believes the keeper's messages."""
    address, me = bus().address, os.geteuid()
    start("pump.py", "serve", address, me).wait_log("the pump is ready")
    watching = start("pump.py", "watch", address, me)
    watching.wait_log("watching")
    assert output("cookbook/pump.py", "start", address) == "running\n"
    assert output("cookbook/pump.py", "stop", address) == "stopped\n"
    assert watching.wait_log("^stopped$")
    assert "running" in watching.log


@pytest.mark.slow
def test_pump_of_several_users(bus: StartBus, start: Start, become: list[str]) -> None:
    """Another user neither commands the pump nor deceives its display; names of users do as well as UIDs."""
    started = bus("--mode=0777")
    address = started.address
    start("pump.py", "serve", address, "root").wait_log("the pump is ready")
    watching = start("pump.py", "watch", address, 0)
    watching.wait_log("watching")
    done = run("cookbook/pump.py", "start", address, before=become)
    assert (done.returncode, done.stderr) == (1, "the pump says: only the administrator may command the pump\n")
    with started.client(user=OTHER_USER) as liar:
        liar.msg(b"pump/state", b"exploded")
        liar.sync()
    watching.wait_log(r"^!/cred/\d+/\d+/\d+ pretends to be the pump$")
    assert output("cookbook/pump.py", "start", address) == "running\n"
    watching.wait_log("^running$")
    assert "exploded" not in watching.log


def test_safe(bus: StartBus, start: Start) -> None:
    """The safe keeps a note and returns it; notes come from the keeper only."""
    address, me = bus().address, os.geteuid()
    start("safe.py", "keep", address).wait_log("the safe is open")
    assert output("cookbook/safe.py", "get", address, me) == "\n"
    assert output("cookbook/safe.py", "put", address, me, "my secret") == "kept\n"
    assert output("cookbook/safe.py", "get", address, me) == "my secret\n"
    assert run("cookbook/safe.py", "get", address, me + 1).stderr == "another program pretends to be the safe\n"


@pytest.mark.slow
def test_safe_of_several_users(bus: StartBus, start: Start, become: list[str]) -> None:
    """A user can neither get another user's note nor put one in another's name."""
    started = bus("--mode=0777")
    address = started.address
    start("safe.py", "keep", address).wait_log("the safe is open")
    assert output("cookbook/safe.py", "put", address, 0, "root's") == "kept\n"
    assert output("cookbook/safe.py", "put", address, 0, "theirs", before=become) == "kept\n"
    assert output("cookbook/safe.py", "get", address, 0) == "root's\n"

    # A request in the other user's name succeeds, but its sender does not get the token.
    spy = started.client(b"", b"!/cred////")
    spy.msg(b"safe/where", spy.credentials + b"/sbus/reply/x\0")
    [_, answer] = spy.receive(2)
    safe = answer.partition(b"\0+")[2]
    theirs = b"!/cred/%d/%d//sbus/reply/x" % (OTHER_USER[1], OTHER_USER[0])
    spy.msg(safe, theirs + b"\0put forged")
    spy.msg(safe, theirs + b"\0confirm " + 32 * b"0")
    # The safe ignores reply keys that are malformed, or that other users can read too.
    for reply_to in (b"!/cred/x/", b"!/cred////sbus/reply/x", b"x/sbus/reply/y"):
        spy.msg(safe, reply_to + b"\0put forged")
    assert spy.sync() == []
    assert output("cookbook/safe.py", "get", address, 0, before=become) == "theirs\n"


def get(path: Path) -> bytes:
    """Return the page of a web server; empty if there is none yet."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(TIMEOUT)
        try:
            sock.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return b""
        sock.sendall(b"GET / HTTP/1.0\r\n\r\n")
        answer = b"".join(iter(lambda: sock.recv(10_000), b""))
    assert b"200 OK" in answer
    return answer.partition(b"\r\n\r\n")[2]


def shows(client: Client, web: Path, packet: bytes, text: bytes) -> bool:
    """Wait until the page shows a message, and return whether it does."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        client.send(packet)
        client.sync()
        if get(web) == text:
            return True
    return False


def test_dashboard(bus: StartBus, spawn: Callable[..., Any], directory: Path) -> None:
    """The web page shows the newest telemetry, and forgets it when the bus is restarted."""
    started = bus()
    web = directory / "web"
    env = {"SBUS_SOCKET": str(started.address), "DASHBOARD": f"unix:{web}"}
    dashboard = spawn(Process, directory, ["-n", "--pidfile=", "-y", COOKBOOK / "dashboard.py"], env=env)
    client = started.client()
    assert shows(client, web, b"MSG telemetry/a/load\x00001", b"telemetry/a/load: 001\n")
    started.stop()
    again = bus()
    assert shows(again.client(), web, b"MSG telemetry/b/load\x00002", b"telemetry/b/load: 002\n")
    dashboard.stop(signal.SIGINT)


def test_gateway(bus: StartBus, start: Start) -> None:
    """Each TCP connection sends and gets its own lines, also after a restart of the bus."""
    started = bus()
    gateway = start("gateway.py", started.address)
    port = int(gateway.wait_log(r"port (\d+)")[0][1])
    listener = started.client(b"gateway/*/in")
    one, other = (socket.create_connection(("127.0.0.1", port), TIMEOUT) for _ in range(2))
    with one, one.makefile("rb") as from_one, other, other.makefile("rb") as from_other:
        assert sorted([from_one.readline(), from_other.readline()]) == [b"you are 1\n", b"you are 2\n"]
        one.sendall(b"hello\nyou\r\n")
        first, second = listener.receive(2)
        assert (first[-6:], second[-4:]) == (b"\0hello", b"\0you")
        assert first.startswith(b"MSG gateway/")
        number = first.split(b"/")[1]
        listener.msg(b"gateway/%b/out" % number, b"back")
        assert from_one.readline() == b"back\n"

        started.stop()
        again = bus()
        gateway.wait_log("messages may have been missed: the server disconnected this client: the server is stopping")
        again.client().msg(b"gateway/%b/out" % number, b"still there")
        assert from_one.readline() == b"still there\n"
    assert gateway.stop(signal.SIGINT) == 0
    assert "Traceback" not in gateway.log


@pytest.mark.skipif(not COMPILER, reason="there is no C compiler")
@pytest.mark.parametrize("abstract", [False, True], ids=["path", "abstract"])
def test_c_program(bus: StartBus, spawn: Callable[..., Any], directory: Path, abstract: bool) -> None:
    """The C program compiles without a warning, and publishes and receives."""
    assert COMPILER
    program = directory / "client"
    flags = ["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-O2"]
    subprocess.run([COMPILER, *flags, "-o", program, COOKBOOK / "client.c"], check=True)
    started = bus(address=f"@{directory}" if abstract else directory / "bus")

    def client(*arguments: str) -> str:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=TIMEOUT)
        assert (done.returncode, done.stderr) == (0, ""), done
        return done.stdout

    address = str(started.address)
    me = rf"!/cred/{os.getegid()}/{os.geteuid()}/\d+"
    assert re.fullmatch(me + "\n", client("whoami", address))
    receiver = spawn(Script, directory, program, "sub", address, "sensors/", "3")
    receiver.wait_log("^subscribed as " + me)
    listener = started.client(b"sensors/")
    assert client("pub", address, "sensors/door", "open") == ""
    assert listener.recv() == b"MSG sensors/door\0open"
    listener.msg(b"sensors/nothing")
    listener.msg(b"sensors/zeros", b"a\0b")
    assert receiver.wait() == 0
    assert receiver.log.endswith("sensors/door: open\nsensors/nothing: \nsensors/zeros: a\0b\n")

    too_long = subprocess.run([program, "pub", address, "k" * 100_000, "p" * 100_000], timeout=TIMEOUT)
    assert too_long.returncode == 0
    assert len(started.client().sync()) == 0  # the server has accepted the packets and disconnected no client
    no_bus = subprocess.run([program, "pub", f"{directory}/none", "k", "p"], capture_output=True, text=True)
    assert (no_bus.returncode, no_bus.stderr) == (1, f"{directory}/none: No such file or directory\n")


@pytest.mark.parametrize("language", ["node", pytest.param("java", marks=pytest.mark.slow)])
def test_stream_programs(bus: StartBus, spawn: Callable[..., Any], directory: Path, language: str) -> None:
    """The programs in Node and in Java publish, receive, and learn their names through the stream door."""
    command: list[str | Path] = ["node", COOKBOOK / "client.js"]
    if language == "java":
        command = ["java", "-cp", directory / "classes", "Client"]
    if not shutil.which("javac" if language == "java" else "node"):
        pytest.skip("there is no JDK" if language == "java" else "there is no Node")
    if language == "java":
        subprocess.run(["javac", "-d", directory / "classes", COOKBOOK / "Client.java"], check=True)
    address = str(directory / "door")
    started = bus(f"--stream=door={address}")

    def client(*arguments: str) -> str:
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=6 * TIMEOUT)
        assert (done.returncode, done.stderr) == (0, ""), done
        return done.stdout

    me = rf"!/cred/{os.getegid()}/{os.geteuid()}/\d+"
    assert re.fullmatch(me + "\n", client("whoami", address))
    receiver = spawn(Script, directory, *command, "sub", address, "sensors/", "3")
    receiver.wait_log("^subscribed as " + me)
    listener = started.client(b"sensors/")
    assert client("pub", address, "sensors/door", "open") == ""
    assert listener.recv() == b"MSG sensors/door\0open"
    listener.msg(b"sensors/nothing")
    listener.msg(b"sensors/umlaut", "ä".encode())
    assert receiver.wait() == 0
    assert receiver.log.endswith("sensors/door: open\nsensors/nothing: \nsensors/umlaut: ä\n")
    assert subprocess.run([*command, "pub", address], capture_output=True, timeout=6 * TIMEOUT).returncode == 2


def test_worker(bus: StartBus, spawn: Callable[..., Any], directory: Path) -> None:
    """The shell script runs its command for each message, in order, and publishes the result."""
    started = bus()
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    env = {"SBUS_SOCKET": str(started.address), "PATH": path}
    worker = spawn(Script, directory, "sh", COOKBOOK / "worker.sh", "count", "wc", "-c", env=env)
    worker.wait_log("subscribed to jobs/count at")
    (directory / "four").write_text("four")
    client = started.client(b"jobs/count/*")
    client.msg(b"jobs/count", bytes(directory / "four"))
    client.msg(b"jobs/count", b"none")
    assert client.recv() == b"MSG jobs/count/done\x004 " + bytes(directory / "four")
    assert client.recv().startswith(b"MSG jobs/count/failed\0wc: ")
    assert started.stop() == 0
    worker.wait()


def test_parts(bus: StartBus, start: Start, directory: Path) -> None:
    """A file of several packets' length arrives whole, and so does an empty one."""
    address = bus().address
    for size in (0, 2_000_000):
        (directory / "large").write_bytes(os.urandom(size))
        receiver = start("parts.py", "receive", address, "files/large", directory / "copy")
        receiver.wait_log("^waiting$")
        output("cookbook/parts.py", "send", address, "files/large", directory / "large")
        assert receiver.wait() == 0, receiver.log
        assert f"{size} bytes" in receiver.log
        assert (directory / "copy").read_bytes() == (directory / "large").read_bytes()


def test_parts_of_several_senders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of two senders may alternate; a message with a missing part is dropped alone, and what waits is bounded."""
    monkeypatch.syspath_prepend(str(COOKBOOK))
    example = importlib.import_module("parts")

    class Recorder:
        def __init__(self) -> None:
            self.parts: list[bytes] = []

        def publish(self, key: str, payload: bytes) -> None:
            self.parts.append(payload)

    def split(payload: bytes) -> list[bytes]:
        recorder = Recorder()
        example.send_parts(recorder, "key", payload)
        return recorder.parts

    first, second = b"f" * 600_000, b"s" * 700_000
    one, other = split(first), split(second)
    parts = example.Parts()
    received = [parts.add(part) for pair in zip(one, other, strict=True) for part in pair]
    assert received == [None] * 4 + [first, second]
    assert [parts.add(part) for part in (one[0], other[0], one[2], *other[1:])][-1] == second
    assert parts.broken == 1
    assert [parts.add(part) for part in (b"", b"no header", bytes(24), *one[1:])] == [None] * 5
    for _ in range(example.MOST_MESSAGES + 1):
        parts.add(split(first)[0])
    assert parts.broken == 2
    parts = example.Parts(most_bytes=2 * len(one[0]))
    assert [parts.add(part) for part in (*one[:2], other[0])] == [None] * 3
    assert parts.broken == 1
    assert [parts.add(part) for part in (one[2], *other[1:])] == [None, None, second]


def writer_of(fifo: Path) -> int:
    """Wait until a process reads a FIFO, and return a descriptor to write to it."""

    def look() -> int | None:
        try:
            return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            return None  # nobody reads

    fd = wait_until(look, lambda fd: fd is not None)
    assert fd is not None
    return fd


@pytest.mark.slow
def test_dispatcher(bus: StartBus, start: Start, directory: Path) -> None:
    """Each job goes to one idle worker, a job of a worker that dies to another one, and errors come back."""
    address = bus().address
    workers = {"ann": start("dispatcher.py", "work", address, "ann")}
    workers["ann"].wait_log("^ready$")
    dispatcher = start("dispatcher.py", "dispatch", address)
    dispatcher.wait_log("^dispatching$")
    workers["ann"].wait_log("^joined$")  # although it was there first
    fifos = [directory / "one", directory / "two"]
    for fifo in fifos:
        os.mkfifo(fifo)
    asking = [start("dispatcher.py", "ask", address, fifos[0])]
    first = writer_of(fifos[0])
    workers["bob"] = start("dispatcher.py", "work", address, "bob")
    workers["bob"].wait_log("^ready$")
    asking.append(start("dispatcher.py", "ask", address, fifos[1]))
    second = writer_of(fifos[1])  # while the first job is not done

    workers["ann"].stop(signal.SIGKILL)
    os.write(second, b"two")
    os.close(second)
    assert asking[1].wait() == 0
    assert asking[1].log == f"bob {hashlib.sha256(b'two').hexdigest()}\n"

    def write() -> bool:
        try:
            return os.write(first, b"one") == 3
        except BrokenPipeError:
            return False  # the new worker does not read yet

    wait_until(write)
    os.close(first)
    assert asking[0].wait() == 0
    assert asking[0].log == f"bob {hashlib.sha256(b'one').hexdigest()}\n"
    assert "No such file" in run("cookbook/dispatcher.py", "ask", address, directory / "none").stderr

    # The worker joins again, however soon another dispatcher starts.
    dispatcher.stop(signal.SIGKILL)
    start("dispatcher.py", "dispatch", address).wait_log("^dispatching$")
    workers["bob"].wait_log("^joined$")
    (directory / "three").write_text("three")
    assert output("cookbook/dispatcher.py", "ask", address, directory / "three").startswith("bob ")


def test_thumbnails(bus: StartBus, start: Start, spawn: Callable[..., Any], directory: Path) -> None:
    """Four workers make all thumbnails, also that of a worker that is killed; what is no picture is dead in the end."""
    address, made = bus().address, directory / "made"
    made.mkdir()
    spawn(QueueProcess, directory, address, "--queue=thumbnails,deliveries=2").wait_started()
    workers = [start("thumbnails.py", "work", address, made) for _ in range(4)]
    for worker in workers:
        worker.wait_log("^ready$")
    picture = b"P6 64 48 255\n" + b"\1\2\3\4\5\6" * (32 * 48)
    names = [f"{number}.ppm" for number in range(20)]
    for name in names:
        (directory / name).write_bytes(picture)
    os.mkfifo(directory / "slow.ppm")
    (directory / "bad.ppm").write_text("a text")
    added = output(
        "cookbook/thumbnails.py", "add", address, *(directory / each for each in ["slow.ppm", "bad.ppm", *names])
    )
    assert added.startswith("1 slow.ppm\n2 bad.ppm\n3 0.ppm\n")

    slow = writer_of(directory / "slow.ppm")
    (busy,) = wait_until(lambda: [worker for worker in workers if "working on slow.ppm" in worker.log])
    busy.stop(signal.SIGKILL)

    def write() -> bool:
        try:
            return os.write(slow, picture) == len(picture)
        except BrokenPipeError:
            return False  # the next worker does not read yet

    wait_until(write)
    os.close(slow)
    wait_until(lambda: ask(address, "ls", "thumbnails")["jobs"], lambda jobs: jobs["dead"] == sum(jobs.values()) == 1)
    small = b"P6 32 24 255\n" + b"\1\2\3" * (32 * 24)
    assert {path.name: path.read_bytes() for path in made.iterdir()} == dict.fromkeys(["slow.ppm", *names], small)
    [dead] = ask(address, "peek", "thumbnails", dead=True)
    assert (dead["key"], dead["tries"]) == ("thumbnails/bad.ppm", 2)
    assert dead["reason"].startswith("failed: ValueError: not a PPM")
