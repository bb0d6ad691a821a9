"""Who published a message, on the command line: against a scripted server and a real one."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from tests.integration.cli.test_cli import Sbus, fake_server, hear, misuse

WHOAMI = b"CMSG !/cred/whoami"
PACKETS = [
    b"CMSG sender/on\0",
    WHOAMI + b"\0!/cred/1/2/3",
    b"CMSG sender\x007 !/cred/0/0/9/!/cred/100/1000/42",
    b"MSG a\0one",
    b"CMSG sender\x000 -",
    b"MSG a\0two",
]


def answer(listener: socket.socket) -> socket.socket:
    """Accept a client that asks for senders, and send it two messages."""
    peer = listener.accept()[0]
    assert [hear(peer) for _ in range(3)] == [b"CMSG sender/on", WHOAMI, b"SUB a"]
    for packet in PACKETS:
        peer.send(packet)
    return peer


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], "!/cred/0/0/9/!/cred/100/1000/42 a one\n- a two\n"),
        (["--format=%f %u %k"], "!/cred/0/0/9/!/cred/100/1000/42 1000 a\n- - a\n"),
    ],
)
def test_sub_sender(options: list[str], expected: str) -> None:
    """The name of the publisher stands before the key, or where a format has it."""
    with (
        fake_server() as (address, listener),
        Sbus(None, "-s", address, "sub", "--sender", "--count=2", *options, "a") as running,
        answer(listener),
    ):
        assert running.end() == (0, expected.encode(), "")


def test_sub_sender_as_json() -> None:
    """With --json the sender is an object with five fields."""
    with (
        fake_server() as (address, listener),
        Sbus(None, "-s", address, "sub", "--sender", "--count=2", "--json", "a") as running,
        answer(listener),
    ):
        status, output, errors = running.end()
    assert (status, errors) == (0, "")
    senders: list[Any] = [json.loads(line)["sender"] for line in output.splitlines()]
    assert senders == [
        {"number": 7, "gid": 100, "uid": 1000, "pid": 42, "chain": "!/cred/0/0/9"},
        {"number": 0, "gid": None, "uid": None, "pid": None, "chain": ""},
    ]


def test_sub_sender_of_a_server_that_does_not_say() -> None:
    """The command ends with the reason, also with --reconnect: another attempt would end alike."""
    with (
        fake_server() as (address, listener),
        Sbus(None, "-s", address, "sub", "--sender", "--reconnect", "a") as running,
        listener.accept()[0] as peer,
    ):
        assert [hear(peer) for _ in range(3)] == [b"CMSG sender/on", WHOAMI, b"SUB a"]
        peer.send(WHOAMI + b"\0!/cred/1/2/3")
        status, output, errors = running.end()
    assert (status, output) == (2, b"")
    assert errors == (
        "sbus: this server does not say who sends a message: it is an older one, or runs with --no-sender; update it, "
        "or do without sender=True (--sender)\n"
    )


def test_sub_sender_misused() -> None:
    """Payloads alone have no place for a sender; the early dialect has no senders."""
    assert "--sender is not for --raw" in misuse("sub", "--sender", "--raw", "a")
    assert "early dialect" in misuse("sub", "--sender", "--dialect=early", "a")
