"""``sbus request``, ``reply`` and ``serve``, and messages from JSON lines, as processes against a real server."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import sbus as package
from sbus.errors import RequestFailed
from tests.integration.cli.commands import Sbus, failure, misuse, sbus
from tests.support.harness import TIMEOUT, Bus, Client


@contextmanager
def replying(bus: Bus, *arguments: str, **how: Any) -> Iterator[Sbus]:
    """Run ``sbus reply`` until it answers."""
    with Sbus(bus, "reply", "--verbose", *arguments, **how) as running:
        assert running.process.stderr is not None
        line = running.process.stderr.readline().decode()
        assert line.startswith("sbus: answering requests at "), line
        yield running


def test_request_and_reply(shared: Bus) -> None:
    """Each request runs the command with its payload and its key; the output comes back byte for byte."""
    script = 'printf "%s:" "$SBUS_KEY"; cat'
    with replying(shared, "--count=3", "ask/*", "--", "sh", "-c", script) as running:
        assert sbus(shared, "request", "ask/one", b"a\xff\n") == (b"ask/one:a\xff\n", "")
        assert sbus(shared, "request", "ask/two", "-", stdin=b"from stdin") == (b"ask/two:from stdin", "")
        assert sbus(shared, "request", "ask/three", "-3.5") == (b"ask/three:-3.5", "")
        assert running.end() == (0, b"", "")


def test_replies_of_commands_that_fail(shared: Bus) -> None:
    """A command that fails or takes too long fails the request with a reason, and the next one is answered."""
    script = 'read word; case "$word" in bad) echo trouble >&2; exit 3;; slow) exec sleep 60;; *) echo fine;; esac'
    with replying(shared, "--count=3", "--timeout=1", "job", "--", "sh", "-c", script) as running:
        assert failure(shared, "request", "job", "bad") == "sbus: the command failed with status 3"
        assert failure(shared, "request", "job", "slow") == "sbus: the command took longer than 1 seconds"
        assert sbus(shared, "request", "job", "good") == (b"fine\n", "")
        assert running.end() == (0, b"", "trouble\n")


def test_a_request_for_which_no_command_starts(shared: Bus, tmp_path: Path) -> None:
    """The requester hears why, the responder writes no traceback, and goes on."""
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\ncat\n")
    script.chmod(0o755)
    with (
        replying(shared, "start/", "--", str(script)) as running,
        package.connect(shared.address) as client,
    ):
        with pytest.raises(RequestFailed, match="a key of 140,006 bytes does not fit into the environment"):
            client.request(b"start/" + b"k" * 140_000, b"", timeout=TIMEOUT)
        assert client.request("start/it", b"1", timeout=TIMEOUT) == b"1"
        script.unlink()
        with pytest.raises(RequestFailed, match="the command cannot be started: No such file or directory"):
            client.request("start/it", b"", timeout=TIMEOUT)
        assert running.end(signal.SIGINT) == (-signal.SIGINT, b"", "")


def test_reply_by_lines(shared: Bus) -> None:
    """With --lines one process answers all requests, a line each; it ends with ``sbus reply``."""
    script = 'n=0; while read line; do n=$((n + 1)); echo "$n $line"; done'
    with replying(shared, "--lines", "--count=3", "count", "--", "sh", "-c", script) as running:
        assert sbus(shared, "request", "count", "a") == (b"1 a", "")
        assert failure(shared, "request", "count", "two\nlines") == "sbus: this responder takes requests of one line"
        assert sbus(shared, "request", "count", "b") == (b"2 b", "")
        assert running.end() == (0, b"", "")
    with replying(shared, "--lines", "--count=1", "gone", "--", "true"):
        assert failure(shared, "request", "gone", "a") == "sbus: the command has ended"


def test_request_without_a_responder(shared: Bus) -> None:
    """A request to nobody fails at once, with status 3; one that a subscriber does not answer times out."""
    assert "nobody subscribes to 'nobody'" in failure(shared, "request", "nobody", status=3)
    with Client(shared.address) as silent:
        silent.sub(b"silent")
        silent.sync()
        assert "no answer within 0.3 s" in failure(shared, "request", "--timeout=0.3", "silent", status=124)


@pytest.mark.parametrize("options", [[], ["--lines"]])
def test_reply_needs_a_command(shared: Bus, options: list[str]) -> None:
    """A command that does not exist is an error at the start."""
    assert "cannot run /no/such/command" in failure(shared, "reply", *options, "a", "--", "/no/such/command")
    assert "Missing argument" in misuse("reply", "a")


def test_json_lines(shared: Bus) -> None:
    """What ``sub --json`` prints, ``pub --json-lines`` publishes again, byte for byte."""
    with Sbus(shared, "sub", "-v", "--json", "--count=3", "t/").wait_subscribed() as running:
        with Client(shared.address) as publisher:
            for packet in (b"MSG t/\xff\0text", b"MSG t/b\0\0\xff", "MSG t/ö\0ü".encode()):
                publisher.send(packet)
            publisher.sync()
        _, lines, _ = running.end()
    with Client(shared.address) as subscriber:
        subscriber.sub(b"t/")
        subscriber.sync()
        assert sbus(shared, "pub", "--json-lines", stdin=lines) == (b"", "")
        assert subscriber.receive(3) == [b"MSG t/\xff\0text", b"MSG t/b\0\0\xff", "MSG t/ö\0ü".encode()]


@pytest.mark.parametrize("line", ["x", "[]", "{}", '{"key": 1, "payload": ""}', '{"key": "a"}', "null"])
def test_wrong_json_lines(shared: Bus, line: str) -> None:
    """A line that is no message is named by its number; the lines before it were published."""
    good = b'{"key": "t/a", "payload": "x"}\n'
    error = failure(shared, "pub", "--json-lines", stdin=good + line.encode() + b"\n", status=2)
    assert "line 2 of standard input is no message" in error
    assert "leave out KEY" in misuse("pub", "--json-lines", "key")
    assert "Missing argument 'KEY'" in misuse("pub")


def test_impossible_patterns_are_reported(shared: Bus) -> None:
    """A pattern that no key can match is reported, and subscribed to all the same."""
    _, errors = sbus(shared, "sub", "--timeout=0.2", "a/*b/c", "t/*", status=124)
    assert errors.startswith("sbus: the pattern a/*b/c: it can never match: '*' takes everything up to the next '/'")
    assert "t/*" not in errors
    _, errors = sbus(shared, "get", "a/*b", status=3)
    assert errors.startswith("sbus: the pattern a/*b: it can never match: ")
    path = f"--admin={shared.address}.none"
    _, errors = sbus(shared, "monitor", path, "a/*b", status=1)
    assert errors.startswith("sbus: the pattern a/*b: it can never match: ")
    assert "pattern a/!/b is not allowed: '!' is reserved" in failure(shared, "monitor", path, "a/!/b", status=2)


def test_serve(directory: Path) -> None:
    """``sbus serve`` runs a bus where clients find it, with options of ``twistd sbus``; Ctrl-C stops it."""
    env = {"SBUS_SOCKET": str(directory / "bus")}
    with Sbus(None, "serve", "--max-clients=7", "--mode=0750", env=env) as running:
        deadline = time.monotonic() + TIMEOUT
        while True:
            try:
                with package.connect(directory / "bus") as bus:
                    bus.fence(TIMEOUT)
                    break
            except (package.ConnectError, OSError):
                assert time.monotonic() < deadline
                time.sleep(0.02)
        assert (directory / "bus").stat().st_mode & 0o777 == 0o750
        status, output, _ = running.end(signal.SIGINT)
    assert status == 0
    assert b"7 clients" in output
    assert os.listdir(directory) == []


def test_record(shared: Bus, directory: Path) -> None:
    """``sbus record`` records a bus into a journal, and makes no other file; Ctrl-C stops it in good order."""
    pytest.importorskip("pyarrow")
    with Sbus(shared, "record", f"--journal={directory}/journal", "--pattern=recorded/") as running:
        assert running.process.stdout is not None
        assert any(b"recording " in line for line in running.process.stdout)
        sbus(shared, "pub", "recorded/here", "x")
        status, output, _ = running.end(signal.SIGINT)
    assert status == 0
    assert b"recorded 1 messages" in output
    assert os.listdir(directory) == ["journal"]
