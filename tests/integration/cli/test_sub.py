"""``sbus sub``: what it prints, when, and how it ends."""

from __future__ import annotations

import base64
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.cli.commands import (
    Sbus,
    command,
    environment,
    failure,
    fake_server,
    follow,
    hear,
    misuse,
    sbus,
)
from tests.support.harness import (
    TIMEOUT,
    Bus,
)
from tests.support.servers import StartBus

NASTY = b"\x1b]0;title\x07 \xc2\x9b31m \xe2\x80\xae \xff\0\r\n\t\\ \xc3\xa9"
NASTY_SHOWN = r"\x1b]0;title\x07 \xc2\x9b31m \xe2\x80\xae \xff\x00\r\n\t\\ é"


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
        with follow(shared, "--time", "--count=1", "t/", env={"TZ": "IST-5:30"}) as running:
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
    script = f"{' '.join(command('sbus'))} {arguments} >&-"
    done = subprocess.run(
        ["sh", "-c", script], stderr=subprocess.PIPE, text=True, timeout=TIMEOUT, env=environment(shared)
    )
    assert (done.returncode, done.stderr) == (1, "sbus: standard output is closed\n")
    with open("/dev/full", "wb") as full, Sbus(shared, *arguments.split(), stdout=full) as running:
        assert running.end() == (1, b"", "sbus: standard output: No space left on device\n")


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
