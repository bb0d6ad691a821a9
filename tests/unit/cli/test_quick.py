"""The short way of ``sbus pub``: it imports little, and differs in nothing else from the whole command."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sbus.cli import quick
from sbus.protocol.controls import BYE_ON, DENIED_ON, WHOAMI
from sbus.protocol.notices import DENIED
from sbus.protocol.packets import CMSG, MSG, build

TIMEOUT = 60
INPUT = b"two\nlines"
ANSWER = build(CMSG, WHOAMI, b"!/cred/1/2/3")
REFUSAL = b"CMSG denied\0MSG a/key some.rule"


class Server:
    """A bus that a test plays: it takes one client, and answers or closes."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(address)
        self.listener.listen()
        self.listener.settimeout(TIMEOUT)

    def serve(self, reply: bytes, questions: int = 1) -> list[bytes]:
        """Reply to each ``whoami`` of the next client and close; return its packets up to the last one."""
        peer = self.listener.accept()[0]
        with peer:
            peer.settimeout(TIMEOUT)
            received: list[bytes] = []
            while received.count(build(CMSG, WHOAMI)) < questions:
                received.append(peer.recv(1 << 20))
                if received[-1] == build(CMSG, WHOAMI):
                    peer.send(reply)
        return received


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(str(tmp_path / "bus"))
    with server.listener:
        yield server


def environment() -> dict[str, str]:
    """Return an environment in which coverage imports nothing."""
    return {name: value for name, value in os.environ.items() if not name.startswith("COV")}


def run(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """Run ``sbus`` in a process that first runs `before`, and prints its modules at its end."""
    script = (
        "import sys, atexit; atexit.register(lambda: print('loaded', *sys.modules));"
        f"{before}sys.argv = ['sbus', *{arguments!r}]; from sbus.cli import run; run()"
    )
    command = [sys.executable, "-c", script]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment(), timeout=TIMEOUT, input=INPUT.decode()
    )


@pytest.mark.parametrize("size", [65_000, 65_600, 300_000])
def test_long_input(server: Server, size: int) -> None:
    """What was read from standard input is not lost when it turns out that the whole command has to run."""
    heard: list[bytes] = []

    def serve() -> None:
        if size > 65_536:  # the short way has connected, and left again
            server.listener.accept()[0].close()
        heard.extend(server.serve(ANSWER, 2 if size > 65_536 else 1))  # a long message waits for the bus's limit

    thread = threading.Thread(target=serve)
    thread.start()
    data = os.urandom(size)
    command = [sys.executable, "-m", "sbus", "-s", server.address, "pub", "a/key", "-"]
    done = subprocess.run(command, input=data, capture_output=True, env=environment(), timeout=TIMEOUT)
    thread.join(TIMEOUT)
    assert done.returncode == 0, done.stderr
    assert build(MSG, b"a/key", data) in heard


def test_input_that_pauses(server: Server) -> None:
    """A pause in a non-blocking standard input is not its end."""
    heard: list[bytes] = []

    def serve() -> None:
        with server.listener.accept()[0] as peer:
            assert peer.recv(1) == b""  # the short way has met the pause, and left
            os.write(writer, b"two")
            os.close(writer)
        heard.extend(server.serve(ANSWER))

    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.write(writer, b"one")
    thread = threading.Thread(target=serve)
    thread.start()
    command = [sys.executable, "-m", "sbus", "-s", server.address, "pub", "a/key", "-"]
    done = subprocess.run(command, stdin=reader, capture_output=True, env=environment(), timeout=TIMEOUT)
    thread.join(TIMEOUT)
    os.close(reader)
    assert done.returncode == 0, done.stderr
    assert build(MSG, b"a/key", b"onetwo") in heard


def result_of(call: Callable[[], subprocess.CompletedProcess[str]], server: Server, reply: bytes) -> tuple[object, ...]:
    """Return what the server receives, without ``bundle/on``, and what the user sees."""
    heard: list[bytes] = []
    thread = threading.Thread(target=lambda: heard.extend(server.serve(reply)))
    thread.start()
    done = call()
    thread.join(TIMEOUT)
    seen = [packet for packet in heard if packet != b"CMSG bundle/on"]
    return seen, done.returncode, done.stderr, done.stdout.rpartition("loaded ")[0]


@pytest.mark.parametrize("payload", ["a payload", "-", "-3.5"])
def test_pub_imports_next_to_nothing(server: Server, payload: str) -> None:
    """A plain ``sbus pub`` loads eleven modules of sbus, and four of Python, all in C or nearly so."""
    bare = subprocess.run(
        [sys.executable, "-c", "import sys; print(*sys.modules)"], capture_output=True, text=True, env=environment()
    )
    thread = threading.Thread(target=server.serve, args=[ANSWER])
    thread.start()
    done = run("-s", server.address, "pub", "a/key", payload)
    thread.join(TIMEOUT)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.rpartition("loaded ")[2].split())
    assert loaded - set(bare.stdout.split()) - {"atexit"} == {
        *("sbus", "sbus.lazy", "sbus.version", "sbus.distribution"),
        *("sbus.cli", "sbus.cli.quick", "sbus.cli.unread", "sbus.client", "sbus.client.lookup"),
        *("__future__", "_socket", "errno", "itertools"),
    }


REPLIES = {
    "answered": ANSWER,
    "denied": REFUSAL,
    "bye": b"CMSG bye\0violation it broke a rule",
    "unknown-bye": b"CMSG bye\0of-the-future and why",
    "closed": b"CMSG other\0",
}
WORDS = {
    "payload": (["a/key", "a payload"], b"a payload"),
    "empty": (["a/key"], b""),
    "input": (["a/key", "-"], INPUT),
    "number": (["a/key", "-3.5"], b"-3.5"),
    "numbers": (["-.5e-3", "-1."], b"-1."),
}


@pytest.mark.parametrize(
    ("words", "payload", "reply"),
    [
        # The short way sends, and then waits: make test has each message and each reply once.
        pytest.param(*message, reply, id=f"{what}-{how}", marks=[] if at == place else pytest.mark.slow)
        for at, (what, message) in enumerate(WORDS.items())
        for place, (how, reply) in enumerate(REPLIES.items())
    ],
)
def test_like_the_whole_command(server: Server, words: list[str], payload: bytes, reply: bytes) -> None:
    """The server receives the same packets but for ``bundle/on``; output and status are the same, also on failure."""
    arguments = ["--socket", server.address, "pub", *words]
    slow = "import sbus.cli.quick as q; q.publish = lambda *_: False;"
    short = result_of(lambda: run(*arguments), server, reply)
    assert short == result_of(lambda: run(*arguments, before=slow), server, reply)
    assert short[0] == [
        build(CMSG, BYE_ON),
        build(CMSG, DENIED_ON),
        build(MSG, words[0].encode(), payload),
        build(CMSG, WHOAMI),
    ]
    assert short[1] == {ANSWER: 0, REFUSAL: 4}.get(reply, 1)


@pytest.mark.parametrize(
    "arguments",
    [
        ["pub"],
        ["pub", "a", "b", "c"],
        ["pub", "-", "a"],
        ["pub", "a", "-inf"],
        ["pub", "a", "-1_0"],
        ["pub", "a", "-٣"],
        ["pub", "a", "-f"],
        ["pub", "--", "a"],
        ["pub", "--lines", "a"],
        ["--dialect=early", "pub", "a"],
        ["pub", "", "b"],
        ["pub", "!/cred/1/2/3/x"],
        ["pub", "a", "x" * 70_000],
        ["pub", "a", "-s"],
        ["pub", "a", "-s", "--help"],
        ["-s", "@", "pub", "a"],
        ["-s", "/dev/fd/3", "pub", "a"],
        ["-s", "/" * 200, "pub", "a"],
        ["-s", "/nonexistent/bus", "pub", "a"],
        ["whoami"],
        [],
    ],
    ids=lambda words: " ".join(words)[:30],
)
def test_everything_else_is_left_to_the_whole_command(server: Server, arguments: list[str]) -> None:
    """Whatever else the command line says, nothing is sent."""
    assert quick.publish(arguments, {"SBUS_SOCKET": server.address}) is False
    server.listener.setblocking(False)
    try:
        peer = server.listener.accept()[0]
    except BlockingIOError:
        return
    with peer:
        assert peer.recv(100) == b""


def test_completion_is_left_to_the_whole_command(server: Server) -> None:
    """The shell's completion runs the command line with a variable set, and nothing is published."""
    assert quick.publish(["pub", "a"], {"SBUS_SOCKET": server.address, "_SBUS_COMPLETE": "bash_complete"}) is False


def test_packets_are_those_of_the_protocol() -> None:
    """The packets that the module spells out are those that the protocol's table gives."""
    assert tuple(build(CMSG, key) for key in (BYE_ON, DENIED_ON)) == quick._ASKED
    assert build(CMSG, DENIED, b"") == quick._DENIED
    assert build(CMSG, WHOAMI) == quick._WHOAMI
