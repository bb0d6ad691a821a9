"""``sbus`` on a terminal, and after Ctrl-C."""

from __future__ import annotations

import os
import re
import signal

import pytest

from tests.integration.cli.commands import (
    Terminal,
    complaints,
    sbus,
)
from tests.support.harness import (
    TIMEOUT,
    Bus,
)


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
