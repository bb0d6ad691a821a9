"""The command ``sbus`` as a process, with pipes and a terminal, against a real server; and its page of the docs."""

from __future__ import annotations

import base64
import contextlib
import errno
import fcntl
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from sbus.syscalls.polling import is_readable
from tests.support import ROOT, nursery
from tests.support.harness import (
    OTHER_USER,
    TIMEOUT,
    WHOAMI,
    Bus,
    Client,
    can_fork,
    name_of,
    run,
    script,
    wait_end,
)
from tests.support.servers import StartBus

DOCS = ROOT / "docs"


def command(name: str) -> list[str]:
    """Return the command line that runs a command with this interpreter."""
    script = Path(sys.executable).with_name(name)
    return (
        [str(script)]
        if script.exists()
        else [sys.executable, "-m", {"sbus": "sbus.cli", "sbusd": "sbus.server.run.sbusd"}[name]]
    )


def environment(bus: Bus | None = None, **changes: str) -> dict[str, str]:
    """Return an environment for a command, without the variables that name a bus."""
    ours = {k: v for k, v in os.environ.items() if k not in ("SBUS_SOCKET", "XDG_RUNTIME_DIR", "NO_COLOR")}
    ours |= {"SBUS_SOCKET": str(bus.address)} if bus else {}
    return ours | {"LC_ALL": "C.UTF-8", "TERM": "xterm"} | changes


def complaints(errors: str) -> str:
    """Standard error of sbusd without the line that it always has in plain Python."""
    return "".join(line for line in errors.splitlines(keepends=True) if "the compiled helper is not in use" not in line)


class Sbus:
    """A running ``sbus``; its standard error is a pipe."""

    def __init__(self, bus: Bus | None, *arguments: str | bytes | Path, **how: Any) -> None:
        changes = how.pop("env", {})
        env = environment(bus, **changes)
        how = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | how
        self.process: subprocess.Popen[Any] | nursery.Piped
        if len(command("sbus")) == 1 and can_fork(changes) and "preexec_fn" not in how:
            self.process = nursery.Piped([*command("sbus"), *arguments], ".", env, **how)
        else:
            # Without buffers, so that `line` leaves the rest for `end`.
            self.process = subprocess.Popen([*command("sbus"), *arguments], env=env, bufsize=0, **how)

    def __enter__(self) -> Sbus:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    @property
    def output(self) -> IO[bytes]:
        """Its standard output."""
        assert self.process.stdout is not None
        return self.process.stdout

    def line(self) -> str:
        """The next line of standard output."""
        return self.output.readline().decode()

    def wait_subscribed(self) -> Sbus:
        """Wait until ``sub --verbose`` says that it has subscribed."""
        assert self.process.stderr is not None
        line = self.process.stderr.readline().decode()
        assert line.startswith("sbus: subscribed to "), line
        return self

    def end(self, number: int | None = None) -> tuple[int, bytes, str]:
        """Wait for the end, after sending a signal if given; return the status and the rest of both outputs."""
        if number is not None:
            self.process.send_signal(number)
        output, errors = self.process.communicate(timeout=TIMEOUT)
        assert self.process.returncode is not None
        return self.process.returncode, output or b"", (errors or b"").decode()


def sbus(
    bus: Bus | None, *arguments: str | bytes | Path, stdin: bytes = b"", status: int = 0, **env: str
) -> tuple[bytes, str]:
    """Run ``sbus`` to its end; return standard output and standard error."""
    line, environ = [*command("sbus"), *arguments], environment(bus, **env)
    if len(command("sbus")) == 1 and can_fork(env):
        done = nursery.run(line, stdin=stdin, timeout=TIMEOUT, env=environ)
    else:
        done = subprocess.run(line, input=stdin, capture_output=True, timeout=TIMEOUT, env=environ)
    assert done.returncode == status, (done.stdout, done.stderr.decode())
    return done.stdout, done.stderr.decode()


def failure(bus: Bus | None, *arguments: str | bytes | Path, status: int = 1, **how: Any) -> str:
    """Run ``sbus`` and expect it to fail with one line on standard error; return that line."""
    output, errors = sbus(bus, *arguments, status=status, **how)
    assert output == b""
    assert errors.startswith("sbus: ")
    assert errors.count("\n") == 1
    return errors.rstrip("\n")


def misuse(*arguments: str | bytes) -> str:
    """Run ``sbus`` and expect wrong usage; return standard error."""
    output, errors = sbus(None, *arguments, status=2)
    assert output == b""
    return errors


@pytest.fixture
def subscriber(shared: Bus) -> Iterator[Client]:
    """A raw client that is subscribed to ``t/``.

    A test whose publisher is stopped in the middle uses the key ``flood`` instead: what that one has left in its socket
    is delivered while the next test runs.
    """
    with Client(shared.address) as client:
        client.sub(b"t/")
        client.sync()
        yield client


# --- pub ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "stdin", "payloads"),
    [
        (["hé llo"], b"", ["hé llo".encode()]),
        ([], b"not read", [b""]),
        (["-"], b"a\nb\0\xff\n", [b"a\nb\0\xff\n"]),
        (["--lines"], b"a\n\nb\0\xff", [b"a", b"", b"b\0\xff"]),
        (["--lines", "-"], b"a\r\n", [b"a\r"]),
        (["--file", "FILE"], b"", [b"from\na file\n"]),
        (["--lines", "--file", "FILE"], b"", [b"from", b"a file"]),
        (["--repeat", "150", "x"], b"", [b"x"] * 150),
        (["--repeat", "2", "-"], b"twice", [b"twice"] * 2),
        (["--no-wait", "--", "--lines"], b"", [b"--lines"]),
        (["-3.5"], b"", [b"-3.5"]),
        (["-1e-3", "--repeat", "2", "-t5"], b"", [b"-1e-3"] * 2),
        (["--no-wait", "--", "-3.5"], b"", [b"-3.5"]),
    ],
)
def test_pub(
    shared: Bus, subscriber: Client, directory: Path, arguments: list[str], stdin: bytes, payloads: list[bytes]
) -> None:
    """The payload is published byte for byte, from the argument, from standard input or from a file."""
    (directory / "file").write_bytes(b"from\na file\n")
    given = [str(directory / "file") if argument == "FILE" else argument for argument in arguments]
    assert sbus(shared, "pub", b"t/\xffk y", *given, stdin=stdin) == (b"", "")
    assert subscriber.receive(len(payloads)) == [b"MSG t/\xffk y\0" + payload for payload in payloads]
    assert subscriber.sync() == []


def test_pub_lines_at_once(shared: Bus, subscriber: Client) -> None:
    """With --lines each line is published as soon as it comes, while more may follow."""
    with Sbus(shared, "pub", "--lines", "t/l", stdin=subprocess.PIPE) as running:
        assert running.process.stdin is not None
        for line in (b"one", b"two"):
            running.process.stdin.write(line + b"\n")
            running.process.stdin.flush()
            assert subscriber.recv() == b"MSG t/l\0" + line
        running.process.stdin.close()
        running.process.stdin = None
        assert running.end() == (0, b"", "")


LOSS = '{"time": 1.0, "lost": 3, "bytes": 30, "total": 3, "why": "queue-full"}'


def test_pub_json_lines_with_lines_that_are_no_messages(shared: Bus, subscriber: Client) -> None:
    """Blank lines are passed over, and, with a word on each, losses and digests as sub and journal cat print them."""
    lines = [
        *("\ufeff", '{"key": "t/1", "payload": "a"}', "", " \t", LOSS),
        '{"seq": 3, "kind": "lost", "time": 1.0, "details": {"messages": 3}}',
        '{"seq": 4, "kind": "digest", "time": 1.0, "key": "t/3", "details": {"length": 70000, "sha256": "ab"}}',
        '{"seq": 5, "kind": "message", "key": "t/2", "payload": "b"}\r',
    ]
    output, errors = sbus(shared, "pub", "--json-lines", stdin="\n".join(lines).encode())
    assert output == b""
    assert subscriber.receive(2) == [b"MSG t/1\0a", b"MSG t/2\0b"]
    assert errors.splitlines()[0] == f"sbus: line 5 of standard input is no message, but a loss: {LOSS}"
    for number, line in enumerate(errors.splitlines()[1:], 6):
        assert line.startswith(f"sbus: line {number} of standard input is no message, but a loss: ")
    for line in ("[]", "null", "3", '{"key": "t/1"}', '{"lost": 3, "key": "t/1"}', "x", "[" * 200_000):
        assert "line 1 of standard input is no message" in failure(
            shared, "pub", "--json-lines", stdin=line.encode(), status=2
        )


def test_pub_rate_at_high_rates(shared: Bus) -> None:
    """Thousands of messages a second, each of which waits for its time, go out without an interruption."""
    start = time.monotonic()
    sbus(shared, "pub", "--repeat=4000", "--rate=4000", "--timeout=50", "t/r", "x")
    assert time.monotonic() - start >= 0.9


def test_pub_rate(shared: Bus, subscriber: Client) -> None:
    """--rate spreads the messages over time: the last comes no earlier than it should."""
    start = time.monotonic()
    with Sbus(shared, "pub", "--repeat", "6", "--rate", "5", "t/r", "x"):
        subscriber.receive(6)
        assert time.monotonic() - start >= 5 / 5


def test_pub_timeout_holds_beside_the_rate(shared: Bus) -> None:
    """--timeout also holds while a message waits for its time under --rate."""
    errors = failure(shared, "pub", "--repeat=0", "--rate=20", "--timeout=0.5", "t/r", "x", status=124)
    assert "timed out" in errors


def test_pub_until_stopped(shared: Bus, subscriber: Client) -> None:
    """--repeat=0 continues until Ctrl-C, which ends it without a message and by the signal."""
    subscriber.sub(b"flood")
    subscriber.sync()
    with Sbus(shared, "pub", "--repeat", "0", "flood", "x") as running:
        assert subscriber.receive(1000) == [b"MSG flood\0x"] * 1000
        assert running.end(signal.SIGINT) == (-signal.SIGINT, b"", "")


def test_pub_limit(shared: Bus, subscriber: Client) -> None:
    """The longest packet is published. One byte more is refused with the rule, and nothing is published."""
    room = 409_600 - len(b"MSG t/long\0")
    sbus(shared, "pub", "t/long", "-", stdin=bytes(room))
    assert subscriber.recv() == b"MSG t/long\0" + bytes(room)
    error = failure(shared, "pub", "t/long", "-", stdin=bytes(room + 1), status=2)
    assert "the packet is longer than the limit: 409601 bytes, and the limit is 409600" in error
    error = failure(shared, "pub", "t/long", "-", stdin=bytes(1 << 20), status=2)
    assert "the packet is longer than the limit: standard input has more than 409600 bytes" in error
    assert "--max-packet" in error
    error = failure(shared, "pub", "t/long", "--lines", stdin=b"good\n" + bytes(1 << 20) + b"\n", status=2)
    assert "line 2 of standard input has more than 409600 bytes" in error
    # The command has failed without a confirmation, so the message may come after an answer to the subscriber.
    assert subscriber.recv() == b"MSG t/long\0good"
    assert subscriber.sync() == []


def test_pub_json_lines_limit(shared: Bus, subscriber: Client) -> None:
    """A message that fits into a packet fits into a line, too; a line that no message needs is not read to its end."""
    room = 409_600 - len(b"MSG t/long\0")
    line = json.dumps({"seq": 1, "key": "t/long", "payload": "\x01" * room}).encode()
    sbus(shared, "pub", "--json-lines", stdin=line)
    assert subscriber.recv() == b"MSG t/long\0" + b"\x01" * room
    with Sbus(shared, "pub", "--json-lines", stdin=subprocess.PIPE) as running:
        assert running.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            for _ in range(64):
                running.process.stdin.write(bytes(1 << 20))
        status, _, errors = running.end()
    assert (status, "line 1 of standard input has more than 2523136 bytes" in errors) == (2, True)


def test_pub_max_packet(shared: Bus) -> None:
    """--max-packet sets the limit of the client, before the command's name and after it."""
    for arguments in (["--max-packet=64", "pub", "t/x"], ["pub", "--max-packet=64", "t/x"]):
        assert "the limit is 64" in failure(shared, *arguments, "x" * 60, status=2)


def test_raised_limit(bus: StartBus) -> None:
    """On a bus with a raised limit, commands that are not told of it publish and print longer messages."""
    server = bus("--max-packet=1M")  # as far as a socket takes: 32 bytes less
    long = b"x" * 1_000_000
    with Sbus(server, "sub", "--raw", "--count", "4", "--verbose", "t/") as running:
        running.wait_subscribed()
        sbus(server, "pub", "t/1", "-", stdin=long)
        sbus(server, "pub", "--lines", "t/2", stdin=b"short\n" + long + b"\n" + long)
        status, output, _ = running.end()
    assert (status, output) == (0, long + b"short" + 2 * long)
    for words in (["t/x", "-"], ["--lines", "t/x"]):
        error = failure(server, "pub", *words, stdin=bytes(1 << 20), status=2)
        assert "has more than 1048544 bytes" in error
        assert "--max-packet" not in error  # nobody can raise that


def test_pub_confirms(shared: Bus) -> None:
    """If the server rejects a message, pub fails, unless it was started with --no-wait."""
    with fake_server() as (address, listener):
        with Sbus(None, "--socket", address, "pub", "a", "b") as running:
            peer = listener.accept()[0]
            with peer:
                assert hear(peer) == b"MSG a\0b"
            status, _, errors = running.end()
        assert status == 1
        assert re.fullmatch(r"sbus: the (server closed the connection|connection broke).*: .*its? log.*\n", errors)
        with Sbus(None, "--socket", address, "pub", "--no-wait", "a", "b") as running, listener.accept()[0]:
            assert running.end() == (0, b"", "")


def test_pub_timeout(shared: Bus) -> None:
    """--timeout ends pub with 124, whether it waits for the server or for its input."""
    with fake_server() as (address, _):
        assert "publishing" in failure(None, "-s", address, "pub", "--timeout=0.2", "a", "b", status=124)
    reading, writing = os.pipe()
    with (
        open(reading),
        open(writing, "w"),
        Sbus(shared, "pub", "--timeout=0.2", "--lines", "t/x", stdin=reading) as running,
    ):
        assert running.end()[0] == 124


@pytest.mark.parametrize(
    "arguments",
    [
        ["pub"],
        ["pub", "a", "b", "c"],
        ["pub", "--lines", "a", "b"],
        ["pub", "--file=/dev/null", "a", "b"],
        ["pub", "--file=/nonexistent", "a"],
        ["pub", "--lines", "--repeat=2", "a"],
        ["pub", "--rate=0", "a", "b"],
        ["sub"],
        ["sub", "--json", "--raw", "a"],
        ["sub", "--raw", "--time", "a"],
        ["sub", "--soft=never", "a"],
        ["sub", "--count=0", "a"],
        ["sub", "--timeout=-1", "a"],
        ["match", "a"],
        ["bench", "nothing"],
        ["bench", "--seconds=1000"],
        ["bench", "--start", "--socket=x"],
        ["bench", "--size=lots"],
        ["ping", "--interval=-1"],
        ["nonsense"],
        ["--nonsense"],
        [],
    ],
    ids=" ".join,
)
def test_misuse(arguments: list[str]) -> None:
    """A wrong command line gives status 2 and the usage on standard error."""
    assert "Usage: sbus" in misuse(*arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["publ"], "No such command 'publ'. Did you mean 'pub'?"),
        (["journal", "lss"], "No such command 'lss'. Did you mean 'ls'?"),
        (["nonsense"], "No such command 'nonsense'.\n"),
    ],
)
def test_mistyped_commands(arguments: list[str], said: str) -> None:
    """The error for an unknown command names the one that was probably meant."""
    assert said in misuse(*arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pub", "a/!/b", "x"], "'!' is reserved"),
        (["sub", "!/"], "'!' is reserved"),
        (["sub", "!/cred/01///"], "without leading zeros"),
        (["match", "!/x", "a"], "invalid pattern !/x: '!' is reserved"),
        (["match", "a", "a/!"], "invalid key a/!: '!' is reserved"),
    ],
)
def test_forbidden_keys(shared: Bus, arguments: list[str], said: str) -> None:
    """An invalid key or pattern gives status 2 and the rule."""
    assert said in failure(shared, *arguments, status=2)


# --- sub ------------------------------------------------------------------------------------------


NASTY = b"\x1b]0;title\x07 \xc2\x9b31m \xe2\x80\xae \xff\0\r\n\t\\ \xc3\xa9"
NASTY_SHOWN = r"\x1b]0;title\x07 \xc2\x9b31m \xe2\x80\xae \xff\x00\r\n\t\\ é"


def follow(bus: Bus, *arguments: str | bytes, **how: Any) -> Sbus:
    """Run ``sbus sub``, and wait until its subscriptions are in force."""
    return Sbus(bus, "sub", "--verbose", *arguments, **how).wait_subscribed()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], f"t/\\x20k {NASTY_SHOWN}\nt/e \n".encode()),
        (["--raw"], NASTY),
        (["--format=%n %k|%p|%s %%"], f"1 t/ k|{NASTY_SHOWN}|{len(NASTY)} %\n2 t/e||0 %\n".encode()),
        (["--format", r"%K\0%P\t%x %b\\\n\c"], b"t/ k\0" + NASTY + b"\t%b %b\\\nt/e\0\t \\\n"),
    ],
    ids=["text", "raw", "safe", "exact"],
)
def test_sub(shared: Bus, options: list[str], expected: bytes) -> None:
    """Messages are printed as text that is safe to look at, byte for byte, or in the user's format."""
    if b"%b" in expected:
        expected = expected % (NASTY.hex().encode(), base64.b64encode(NASTY))
    with shared.client() as publisher, follow(shared, *options, "--count=2", "t/") as running:
        publisher.msg(b"t/ k", NASTY)
        publisher.msg(b"t/e")
        assert running.end() == (0, expected, "")


def test_sub_json(shared: Bus) -> None:
    """With --json there is one object per line, in ASCII, from which the message can be restored."""
    before = time.time()
    with shared.client() as publisher, follow(shared, "--json", "--count=3", "t/") as running:
        publisher.msg(b"t/1", "é\x1b\0\n".encode())
        publisher.msg(b"t/2", b"\xff")
        publisher.msg(b"t/\xff", b"")
        status, output, _ = running.end()
    assert status == 0
    assert output.isascii()
    objects = [json.loads(line) for line in output.splitlines()]
    for each in objects:
        assert before <= each.pop("time") <= time.time()
    assert objects == [
        {"key": "t/1", "payload": "é\x1b\0\n", "encoding": "text"},
        {"key": "t/2", "payload": "/w==", "encoding": "base64"},
        {"key": "dC//", "key_encoding": "base64", "payload": "", "encoding": "text"},
    ]


def test_sub_time(shared: Bus) -> None:
    """Times are local, with their offset; %t and %T are the same moment."""
    with shared.client() as publisher:
        with follow(shared, "--time", "--count=1", "t/", env={"TZ": "XXX-5:30"}) as running:
            publisher.msg(b"t/1", b"x")
            assert re.fullmatch(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+05:30 t/1 x\n", running.end()[1])
        with follow(shared, "--format=%t %T", "--count=1", "t/", env={"TZ": "UTC"}) as running:
            publisher.msg(b"t/1", b"x")
            text, seconds = running.end()[1].decode().split()
    whole, _, part = seconds.partition(".")
    assert text == time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(int(whole))) + f".{part[:3]}+00:00"


def test_sub_unknown_format() -> None:
    """An unknown directive is refused."""
    assert "%q is not a directive" in misuse("sub", "--format=%k %q", "a")
    assert "% is not a directive" in misuse("sub", "--format=100%", "a")


def test_sub_without_utf8(shared: Bus) -> None:
    """If the locale is not UTF-8, output is ASCII: other bytes could be control characters there."""
    env = {"LC_ALL": "C", "PYTHONIOENCODING": "latin-1"}
    with shared.client() as publisher, follow(shared, "--count=1", "t/", env=env) as running:
        publisher.msg(b"t/\xc3\xa9", "é".encode())
        assert running.end()[1] == b"t/\\xc3\\xa9 \\xc3\\xa9\n"


def test_sub_several_patterns(shared: Bus) -> None:
    """A message is printed once, however many patterns match it."""
    with shared.client() as publisher, follow(shared, "--count=3", "t/", "t/*", "u", "t/1") as running:
        for key in (b"t/1", b"u", b"v", b"t/2"):
            publisher.msg(key, b"x")
        assert running.end() == (0, b"t/1 x\nu x\nt/2 x\n", "")


def test_sub_prints_at_once(shared: Bus) -> None:
    """A pipe gets each message when it comes."""
    with shared.client() as publisher, follow(shared, "t/") as running:
        for payload in (b"one", b"two"):
            publisher.msg(b"t/x", payload)
            assert running.line() == f"t/x {payload.decode()}\n"
        assert running.end(signal.SIGINT) == (-signal.SIGINT, b"", "")


def test_sub_count(shared: Bus) -> None:
    """After --count messages sub exits, and leaves later ones unread."""
    with shared.client() as publisher, follow(shared, "--count=2", "t/") as running:
        for number in range(100):
            publisher.msg(b"t/x", b"%d" % number)
        assert running.end() == (0, b"t/x 0\nt/x 1\n", "")


def test_sub_timeout(shared: Bus) -> None:
    """--timeout ends sub with 124 and the number of messages, in a steady flow as well."""
    assert failure(shared, "sub", "--timeout=0.2", "t/", status=124).endswith("0 messages came within 0.2 s")
    with Sbus(shared, "pub", "--repeat=0", "flood", "x"):
        with shared.client(b"flood") as other:
            other.recv()
        for seconds in ("0.3", "3", "10"):  # on a busy machine, the first message may come later
            output, errors = sbus(shared, "sub", f"--timeout={seconds}", "flood", status=124)
            if output:
                break
    assert set(output.splitlines()) == {b"flood x"}
    assert output.endswith(b"\n")
    assert f"{len(output.splitlines()):,} message" in errors


def test_sub_closed_pipe(shared: Bus) -> None:
    """When the reader of its output has gone, sub ends by SIGPIPE at once, without a message."""
    with shared.client() as publisher, follow(shared, "t/") as running:
        publisher.msg(b"t/x", b"1")
        assert running.line() == "t/x 1\n"
        running.output.close()
        running.process.stdout = None
        assert running.process.wait(TIMEOUT) == -signal.SIGPIPE
        assert running.process.stderr is not None
        assert running.process.stderr.read() == b""


def test_sub_head(shared: Bus) -> None:
    """In a pipeline that ends early, in the middle of a flood of messages, nothing is printed on standard error."""
    with Sbus(shared, "pub", "--repeat=0", "flood", "x"):
        script = f"{' '.join(command('sbus'))} sub flood | head -n 3; echo ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", script], capture_output=True, timeout=TIMEOUT, env=environment(shared))
    assert done.stdout == b"flood x\n" * 3 + b"141\n"
    assert done.stderr == b""


def test_full_disk(shared: Bus) -> None:
    """If output cannot be written, the command fails with one line."""
    with open("/dev/full", "wb") as full, follow(shared, "--count=1", "t/", stdout=full) as running:
        shared.client().msg(b"t/x")
        assert running.end() == (1, b"", "sbus: standard output: No space left on device\n")


def test_closed_descriptors(shared: Bus) -> None:
    """Closed standard descriptors are treated as /dev/null."""
    script = f"{' '.join(command('sbus'))} pub t/x - <&- >&- 2>&-"
    with shared.client() as subscriber:
        subscriber.sub(b"t/")
        subscriber.sync()
        assert subprocess.run(["sh", "-c", script], timeout=TIMEOUT, env=environment(shared)).returncode == 0
        assert subscriber.recv() == b"MSG t/x\0"


@pytest.mark.parametrize("arguments", ["whoami", "--help", "sub --help", "ping -c 1", "match a a"])
def test_output_that_cannot_be_written_is_a_failure(shared: Bus, arguments: str) -> None:
    """A command whose output is closed, or goes to a full disk, fails with one line."""
    for output, reason in (
        (">&-", "standard output is closed"),
        (">/dev/full", "standard output: No space left on device"),
    ):
        script = f"{' '.join(command('sbus'))} {arguments} {output}"
        done = subprocess.run(
            ["sh", "-c", script], stderr=subprocess.PIPE, text=True, timeout=TIMEOUT, env=environment(shared)
        )
        assert (done.returncode, done.stderr) == (1, f"sbus: {reason}\n")


def test_keys_in_errors_are_text(shared: Bus) -> None:
    """An error quotes a key as the shell's user has written it, not as Python's bytes."""
    assert "the routing key '!/ö' is not allowed" in failure(shared, "pub", "!/ö", status=2)
    assert "the pattern 'a/!' is not allowed" in failure(shared, "sub", "a/!", status=2)


def test_python_m_sbus() -> None:
    """``python -m sbus`` is the command ``sbus``."""
    done = subprocess.run([sys.executable, "-m", "sbus", "match", "a", "a"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "a: matches\n", "")


def test_sub_empty_pattern(shared: Bus) -> None:
    """The empty pattern, an empty argument, matches every key."""
    with shared.client() as publisher, follow(shared, "--count=2", "") as running:
        publisher.msg(b"", b"no key")
        publisher.msg(b"t/x", b"y")
        assert running.end() == (0, b" no key\nt/x y\n", "")


FIRST = [b"CMSG payload/on", b"CMSG !/cred/whoami"]
"""What ``sub`` asks first, besides the questions of every client."""


def test_sub_flood_control() -> None:
    """Flood-control options are sent before the subscriptions, so that they hold from the first message on."""
    with fake_server() as (address, listener):
        arguments = ["--soft=discard", "--hard=error", "--order=stack", "a", "b/"]
        with Sbus(None, "-s", address, "sub", *arguments), listener.accept()[0] as peer:
            packets = [hear(peer) for _ in range(7)]
    assert packets == [
        *FIRST,
        b"CMSG blocking/soft/discard",
        b"CMSG blocking/hard/error",
        b"CMSG order/stack",
        b"SUB a",
        b"SUB b/",
    ]


def test_sub_last_messages(shared: Bus) -> None:
    """The messages that a server sent before it closed the connection are printed; then the loss is reported."""
    with fake_server() as (address, listener), Sbus(None, "-s", address, "sub", "a") as running:
        with listener.accept()[0] as peer:
            assert [hear(peer) for _ in range(3)] == [*FIRST, b"SUB a"]
            for number in range(10):
                peer.send(b"MSG a\0%d" % number)
        status, output, errors = running.end()
    assert status == 1
    assert output == b"".join(b"a %d\n" % number for number in range(10))
    assert errors == (
        f"sbus: the server closed the connection ({address}): it may have stopped, "
        "or refused or disconnected this client; its log says which\n"
    )


def test_sub_reconnect(bus: StartBus) -> None:
    """With --reconnect, sub outlives its server, subscribes again, and reports that messages may be missing."""
    first = bus()
    with follow(first, "--reconnect", "--count=2", "t/") as running:
        with first.client() as publisher:
            publisher.msg(b"t/x", b"1")
            assert running.line() == "t/x 1\n"
        first.stop()
        assert running.process.stderr is not None
        assert running.process.stderr.readline() == f"sbus: waiting: the bus at {first.address} has gone\n".encode()
        second = bus()
        assert b"messages may have been missed" in running.process.stderr.readline()
        with second.client() as publisher:
            # The notice does not mean that the new subscription is in force already.
            deadline = time.monotonic() + TIMEOUT
            while running.process.poll() is None and time.monotonic() < deadline:
                publisher.msg(b"t/x", b"2")
                publisher.sync()
        assert running.end() == (0, b"t/x 2\n", "")


def test_sub_waits_for_a_bus(bus: StartBus, directory: Path) -> None:
    """With --reconnect, sub says once that there is no bus yet, and then prints what comes."""
    address = directory / "bus"
    with Sbus(None, "--socket", address, "sub", "--reconnect", "--verbose", "--count=1", "t/") as running:
        assert running.process.stderr is not None
        assert running.process.stderr.readline().startswith(f"sbus: waiting: no bus at {address}: ".encode())
        late = bus()
        running.wait_subscribed()
        with late.client() as publisher:
            publisher.msg(b"t/x", b"1")
        assert running.end() == (0, b"t/x 1\n", "")


def test_sub_reader_has_gone_while_it_waits(bus: StartBus) -> None:
    """While sub waits for its bus, it notices at once that the reader of its output has gone."""
    first = bus()
    with follow(first, "--reconnect", "t/") as running:
        first.stop()
        assert running.process.stderr is not None
        assert b"has gone" in running.process.stderr.readline()
        running.output.close()
        assert running.process.wait(TIMEOUT) == -signal.SIGPIPE


def test_sub_reconnect_timeout(bus: StartBus) -> None:
    """--timeout also holds while sub tries to reconnect."""
    first = bus()
    with follow(first, "--reconnect", "--timeout=1.5", "t/") as running:
        first.stop()
        status, output, errors = running.end()
    assert (status, output) == (124, b"")
    assert "0 messages came within 1.5 s" in errors


# --- on a terminal --------------------------------------------------------------------------------


class Terminal:
    """A pseudo-terminal with a command in its foreground."""

    def __init__(self, bus: Bus | None, *arguments: str, **env: str) -> None:
        self.fd, theirs = pty.openpty()
        self.running = Sbus(
            bus,
            *arguments,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env=env,
        )
        os.close(theirs)
        self.text = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.running.__exit__()
        os.close(self.fd)

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def read_until(self, pattern: str) -> str:
        """Read until the pattern occurs in the text read so far; return that text."""
        while not re.search(pattern, self.text):
            assert is_readable(self.fd, TIMEOUT), f"no {pattern!r} in {self.text!r}"
            assert self._read(), f"no {pattern!r} in {self.text!r}"
        return self.text

    def end(self) -> int:
        """Read until the process has ended; return its exit status."""
        while self._read():
            pass
        return self.running.process.wait(TIMEOUT)

    def _read(self) -> bool:
        try:
            data = os.read(self.fd, 65536)
        except OSError as e:
            if e.errno != errno.EIO:
                raise
            return False  # no process has the other side open
        self.text += data.decode()
        return bool(data)


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, "\x1b[36mt/k\x1b[0m \\x1b[31m\r\n"),
        ({"NO_COLOR": "1"}, "t/k \\x1b[31m\r\n"),
        ({"NO_COLOR": ""}, "\x1b[36mt/k\x1b[0m \\x1b[31m\r\n"),
        ({"TERM": "dumb"}, "t/k \\x1b[31m\r\n"),
    ],
    ids=["colours", "NO_COLOR", "empty", "dumb"],
)
def test_colors(shared: Bus, env: dict[str, str], expected: str) -> None:
    """Keys are coloured on a capable terminal without NO_COLOR; escapes in a payload never reach the terminal."""
    with shared.client() as publisher, Terminal(shared, "sub", "-v", "--count=1", "t/", **env) as terminal:
        terminal.read_until("subscribed.*\n")
        publisher.msg(b"t/k", b"\x1b[31m")
        assert terminal.end() == 0
        assert terminal.text.partition("\n")[2] == expected


def test_ctrl_c(shared: Bus) -> None:
    """Ctrl-C on a terminal ends sub by the signal, without a message."""
    with Terminal(shared, "sub", "-v", "t/") as terminal:
        terminal.read_until("subscribed.*\n")
        terminal.type("\x03")
        assert terminal.end() == -signal.SIGINT
        assert terminal.text.partition("\n")[2] == "^C"


def test_ctrl_c_of_ping(shared: Bus) -> None:
    """Ctrl-C makes ping print its summary and exit with status 0."""
    with Terminal(shared, "ping", "--interval=60") as terminal:
        terminal.read_until("seq=1 .*\n")
        terminal.type("\x03")
        assert terminal.end() == 0
        assert "1 packets transmitted, 1 received, 0% packet loss" in terminal.text


def test_hangup(shared: Bus) -> None:
    """When its terminal goes away, sub ends."""
    with Terminal(shared, "sub", "-v", "t/") as terminal:
        terminal.read_until("subscribed.*\n")
        os.close(terminal.fd)
        assert terminal.running.process.wait(TIMEOUT) in (-signal.SIGHUP, -signal.SIGPIPE)
        terminal.fd = os.open(os.devnull, os.O_RDONLY)


@pytest.mark.slow
def test_progress_bar() -> None:
    """bench shows a progress bar on standard error if that is a terminal."""
    arguments = ["bench", "--start", "--seconds=100ms", "--size=1K", "roundtrip"]
    with Terminal(None, *arguments) as terminal:
        assert terminal.end() == 0
        assert re.search(r"roundtrip +\[#+\] +100%", terminal.text)
        assert "round trips" in terminal.text
    output, errors = sbus(None, *arguments)
    assert b"round trips" in output
    assert complaints(errors) == ""


# --- where the bus is, and what can go wrong there ------------------------------------------------


@contextlib.contextmanager
def fake_server() -> Iterator[tuple[str, socket.socket]]:
    """Yield the address and the listening socket of a server that the test plays."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        address = f"@sbus-test-{os.urandom(8).hex()}"
        listener.bind(name_of(address))
        listener.listen()
        listener.settimeout(TIMEOUT)
        yield address, listener


def hear(peer: socket.socket) -> bytes:
    """Return the next packet from the client of a fake server, which ignores requests for bundles."""
    while (packet := peer.recv(99)) in (b"CMSG bundle/on", b"CMSG bye/on", b"CMSG denied/on"):
        pass
    return packet


def test_which_bus(shared: Bus, directory: Path) -> None:
    """--socket comes before $SBUS_SOCKET, then $XDG_RUNTIME_DIR if a socket is there, then /run/sbus.sock."""
    real, wrong = str(shared.address), str(directory / "wrong")
    (directory / "sbus.sock").symlink_to(real)
    for arguments in (["-s", real, "whoami"], ["whoami", "--socket", real], ["-s", wrong, "whoami", "-s", real]):
        sbus(None, *arguments, SBUS_SOCKET=wrong)
    sbus(None, "whoami", SBUS_SOCKET=real, XDG_RUNTIME_DIR="/nonexistent")
    sbus(None, "whoami", XDG_RUNTIME_DIR=str(directory))
    assert f"no bus at {wrong}: " in failure(None, "whoami", SBUS_SOCKET=wrong, XDG_RUNTIME_DIR=str(directory))
    (directory / "sbus.sock").unlink()
    if not os.path.exists("/run/sbus.sock"):
        assert "no bus at /run/sbus.sock, nor at " in failure(None, "whoami", XDG_RUNTIME_DIR=str(directory))


def test_no_bus(directory: Path) -> None:
    """Without a server, one line says why, and what to do."""
    path = directory / "bus"
    assert "No such file or directory: start one" in failure(None, "pub", "a", "b", "-s", path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left_over:
        left_over.bind(str(path))
        assert "Connection refused: the server is gone; start it again" in failure(None, "sub", "a", "-s", path)
    path.unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        stream.bind(str(path))
        stream.listen()
        assert "a socket of another kind" in failure(None, "ping", "-s", path)


def test_bad_address() -> None:
    """A malformed address is wrong usage."""
    assert "an abstract name has 1 to 107 bytes" in failure(None, "whoami", "-s", "@", status=2)


def test_not_permitted(bus: StartBus, become: list[str]) -> None:
    """A user who may not use the socket, or the bus, gets one line that says so."""

    def as_other(started: Bus) -> str:
        done = run([*script("sbus"), "pub", "a", "b"], env={"SBUS_SOCKET": str(started.address)}, before=become)
        assert done.returncode == 1
        return done.stderr

    started = bus()
    assert as_other(started) == (
        f"sbus: cannot connect to {started.address}: Permission denied: you lack the permission; "
        "ask the operator of the bus for --mode, --group or --allow-user\n"
    )
    os.chmod(started.address, 0o777)
    started.stop()
    closed = bus("--mode=0777", "--credentials=own-user")
    assert re.fullmatch(r"sbus: the (server closed the connection|connection broke: .*) \(.*\): .*\n", as_other(closed))
    closed.wait_log(f"uid {OTHER_USER[0]}")


# --- whoami, ping, match --------------------------------------------------------------------------


def test_whoami(shared: Bus) -> None:
    """whoami prints the credentials of its own process."""
    with Sbus(shared, "whoami") as running:
        name = f"!/cred/{os.getegid()}/{os.geteuid()}/{running.process.pid}\n"
        assert running.end() == (0, name.encode(), "")


def test_ping(shared: Bus) -> None:
    """ping prints a line per answer and a summary, as ping(8) does."""
    output, errors = sbus(shared, "ping", "--count=3", "--interval=0.01")
    assert errors == ""
    lines = output.decode().splitlines()
    assert lines[0] == f"PING {shared.address}"
    times = []
    for number, line in enumerate(lines[1:4], 1):
        found = re.fullmatch(rf"answer from {shared.address}: seq={number} time=(\d+\.\d{{3}}) ms", line)
        assert found
        times.append(float(found[1]))
    assert lines[4:6] == ["", f"--- {shared.address} ping statistics ---"]
    assert re.fullmatch(r"3 packets transmitted, 3 received, 0% packet loss, time \d+ms", lines[6])
    assert lines[7].startswith(f"rtt min/avg/max/mdev = {min(times):.3f}/")
    assert f"/{max(times):.3f}/" in lines[7]
    assert len(lines) == 8


def test_ping_json(shared: Bus) -> None:
    """With --json each answer is an object, and the summary is the last one."""
    output, _ = sbus(shared, "ping", "--count=2", "--interval=0", "--json")
    first, second, summary = map(json.loads, output.splitlines())
    assert (first["seq"], second["seq"]) == (1, 2)
    times = sorted((first["time_ms"], second["time_ms"]))
    assert summary["address"] == str(shared.address)
    assert (summary["sent"], summary["received"]) == (2, 2)
    assert [summary["min_ms"], summary["max_ms"]] == times
    assert times[0] <= summary["avg_ms"] <= times[1]
    assert summary["mdev_ms"] == pytest.approx((times[1] - times[0]) / 2, abs=0.001)


def test_ping_lost(shared: Bus) -> None:
    """A late answer counts as lost, with status 124, and is not taken for the next one."""
    arguments = ["ping", "--timeout=1.5", "--interval=1.5", "--count=2"]
    with (
        fake_server() as (address, listener),
        Sbus(None, "-s", address, *arguments) as running,
        listener.accept()[0] as peer,
    ):
        assert hear(peer) == WHOAMI
        assert running.line() == f"PING {address}\n"
        assert running.line() == "no answer yet: seq=1\n"
        peer.send(WHOAMI + b"\0!/cred/1/2/3")  # the answer to the first request
        assert hear(peer) == WHOAMI
        assert not is_readable(running.output, 0.05)
        peer.send(WHOAMI + b"\0!/cred/1/2/3")
        assert running.line().startswith(f"answer from {address}: seq=2 ")
        status, output, errors = running.end()
    assert status == 124
    assert b"2 packets transmitted, 1 received, 50% packet loss" in output
    assert errors == "sbus: 1 of 2 requests got no answer within 1.5 s\n"


def test_ping_server_stops(shared: Bus) -> None:
    """When the server goes away between two requests, ping prints its summary at once and fails."""
    with fake_server() as (address, listener), Sbus(None, "-s", address, "ping", "--interval=60") as running:
        with listener.accept()[0] as peer:
            hear(peer)
            peer.send(WHOAMI + b"\0!/cred/1/2/3")
            running.line()
            assert "seq=1" in running.line()
        status, output, errors = running.end()
    assert status == 1
    assert b"1 packets transmitted, 1 received" in output
    assert "the server closed the connection" in errors


def test_match() -> None:
    """match prints for each key whether it matches and where matching stops; the status is 0 if every key matched."""
    assert sbus(None, "match", "a/*/c", "a/b/c", "a//c") == (b"a/b/c: matches\na//c: matches\n", "")
    output, _ = sbus(None, "match", "é/*b", "é/b", "é/b", status=1)
    one = "é/b: does not match: '*' takes everything up to the next '/' or the end, "
    one += "so nothing is left for what follows it\n  é/*b\n     ^\n  é/b\n     ^\n"
    assert output.decode() == one * 2
    assert sbus(None, "match", "-q", "a", "a", "b", status=1) == (b"", "")
    assert sbus(None, "match", "--dialect=early", "a.", "a.b.c") == (b"a.b.c: matches\n", "")
    assert sbus(None, "match", "--quiet", "!/cred////x", "!/cred/1/2/3/x") == (b"", "")


def test_early_dialect(bus: StartBus) -> None:
    """With --dialect=early pub, sub and ping work with such a server; whoami reports that it does not exist there."""
    started = bus("--dialect=early")
    with follow(started, "--dialect=early", "--count=1", "t.") as running:
        sbus(started, "pub", "--dialect=early", "t.a.b", "x")
        assert running.end() == (0, b"t.a.b x\n", "")
    sbus(started, "--dialect=early", "ping", "--count=1")
    assert "the early dialect has no control messages" in failure(started, "--dialect=early", "whoami", status=2)


# --- bench ----------------------------------------------------------------------------------------


def test_bench(shared: Bus) -> None:
    """bench measures a running server; nothing is lost, and the figures fit together."""
    output, errors = sbus(shared, "bench", "--json", "--seconds=0.1", "--size=10", "--receivers=3")
    assert errors == ""
    found = json.loads(output)
    assert found["address"] == str(shared.address)
    throughput, fanout, roundtrip = found["tests"]
    for flow, receivers in ((throughput, 1), (fanout, 3)):
        assert flow["receivers"] == receivers
        assert flow["size"] == 10
        assert flow["published"] > 0
        assert flow["delivered"] == receivers * flow["published"]
        assert flow["lost"] == 0
        assert flow["seconds"] >= 0.1
        assert flow["delivered_per_second"] == pytest.approx(flow["delivered"] / flow["seconds"], rel=0.02)
    assert roundtrip["round_trips"] > 0
    assert roundtrip["min_us"] <= roundtrip["p50_us"] <= roundtrip["p99_us"] <= roundtrip["max_us"]
    assert shared.client().sync() == []


def test_bench_that_is_killed(shared: Bus) -> None:
    """Its receivers end, too: they do not keep the server, or the pipe behind the command, for half a minute."""
    command = [sys.executable, "-m", "sbus", "--socket", str(shared.address), "bench", "--seconds=20", "fanout"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process, shared.client(b"sbus-bench/") as observer:
        assert observer.recv().startswith(b"MSG sbus-bench/")
        observer.close()
        process.kill()
        assert process.communicate(timeout=TIMEOUT)[0] == b""  # when nobody has the pipe any more


@pytest.mark.slow
def test_bench_interrupted(directory: Path) -> None:
    """Ctrl-C ends bench at once; its server and its files are gone then."""
    with Terminal(None, "bench", "--start", "--seconds=10", TMPDIR=str(directory)) as terminal:
        terminal.read_until("throughput +.*[1-9]%")
        children = Path(
            f"/proc/{terminal.running.process.pid}/task/{terminal.running.process.pid}/children"
        ).read_text()
        assert len(children.split()) == 2  # the server and a receiver
        terminal.type("\x03")
        assert terminal.end() == -signal.SIGINT
        for pid in map(int, children.split()):
            wait_end(pid)
    assert list(directory.iterdir()) == []


# --- help and completion --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pub", "sub", "get", "probe", "whoami", "ping", "match", "bench"])
def test_help(name: str) -> None:
    """Each command has a help text with examples, and is in the list of commands."""
    output, _ = sbus(None, name, "--help")
    assert re.search(rf"Examples?:\n  +.*sbus {name}", output.decode())
    assert re.search(rf"^  {name} +\w", sbus(None, "-h")[0].decode(), re.MULTILINE)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script(shell: str) -> None:
    """The help shows how to set up completion, and the shown variable prints the script."""
    assert f"_SBUS_COMPLETE={shell}_source sbus" in sbus(None, "--help")[0].decode()
    output, _ = sbus(None, _SBUS_COMPLETE=f"{shell}_source")
    assert b"_SBUS_COMPLETE" in output


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("sbus p", {"plain,pub", "plain,probe", "plain,ping", "plain,policy", "plain,patterns"}),
        ("sbus sub --soft d", {"plain,discard"}),
        ("sbus sub --ord", {"plain,--order"}),
        ("sbus whoami --socket /ru", {"file,/ru"}),
        ("sbus bench through", {"plain,throughput"}),
    ],
)
def test_completion(words: str, expected: set[str]) -> None:
    """Commands, options, their values, and files are completed."""
    last = str(len(words.split()) - 1)
    output, _ = sbus(None, _SBUS_COMPLETE="bash_complete", COMP_WORDS=words, COMP_CWORD=last)
    assert set(output.decode().split()) == expected


# --- the page of the docs -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keeping(module_bus: StartBus) -> Bus:
    """A bus with last values below ``state/``, as the page has it."""
    return module_bus("--last-value=state/")


def sessions() -> list[list[tuple[str, list[str]]]]:
    """Return the console sessions of the page: commands, each with the lines that it and earlier ones print."""
    found = []
    for block in re.findall(
        r"^\.\. code-block:: console\n\n((?:   .*\n|\n)+)", (DOCS / "cli.rst").read_text(), re.MULTILINE
    ):
        steps: list[tuple[str, list[str]]] = []
        for line in re.sub("^   ", "", block.rstrip() + "\n", flags=re.MULTILINE).splitlines():
            if line.startswith("$ "):
                steps.append((line[2:], []))
            else:
                steps[-1][1].append(line)
        found.append(steps)
    return found


@pytest.mark.parametrize("session", sessions(), ids=lambda session: session[0][0][:40])
def test_docs(keeping: Bus, directory: Path, session: list[tuple[str, list[str]]]) -> None:
    """A shell session on the page happens as shown."""
    (directory / "bin").mkdir()
    for name in ("sbus", "sbusd"):
        (directory / "bin" / name).write_text(f'#!/bin/sh\nexec {" ".join(command(name))} "$@"\n')
        (directory / "bin" / name).chmod(0o755)
    env = environment(keeping, PATH=f"{directory / 'bin'}:{os.environ['PATH']}")
    reading, writing = os.pipe()
    jobs: list[subprocess.Popen[bytes]] = []
    daemons: list[int] = []
    with open(reading) as transcript:
        with open(writing, "wb") as output:
            for text, expected in session:
                words = text.removesuffix("&").strip()
                job = subprocess.Popen(["bash", "-c", words], cwd=directory, env=env, stdout=output, stderr=output)
                if text.endswith("&"):
                    jobs.append(job)
                else:
                    job.wait(TIMEOUT)
                daemons += [int(file.read_text()) for file in directory.glob("*.pid")]
                for shown in expected:
                    line = shown.replace("/run/sbus.sock", str(keeping.address))
                    wanted = ".*".join(map(re.escape, line.split("...")))
                    assert re.fullmatch(wanted, next_line(transcript))
            for job in jobs:
                assert job.wait(TIMEOUT) == 0
        for pid in daemons:
            wait_end(pid)
        assert complaints(transcript.read()) == ""


def next_line(stream: Any) -> str:
    """Return the next line; a thread reads it, because a stream has no time-out."""
    lines: list[str] = []

    def read() -> None:
        while (line := stream.readline()) and not complaints(line):
            pass
        lines.append(line)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(TIMEOUT)
    assert lines, "the next line of the session does not come"
    assert lines[0], "the session ended early"
    return lines[0].rstrip("\n")
