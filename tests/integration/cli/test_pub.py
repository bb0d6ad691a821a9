"""``sbus pub``: arguments, lines and files become messages; each failure says why."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.integration.cli.commands import (
    Sbus,
    failure,
    fake_server,
    hear,
    misuse,
    sbus,
)
from tests.support.harness import (
    Bus,
    Client,
)
from tests.support.servers import StartBus


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
