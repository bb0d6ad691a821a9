"""Who published a message, on the command line: against a scripted server and a real one."""

from __future__ import annotations

import json
import os
import socket
from typing import Any

import pytest

from tests.integration.cli.commands import Sbus, fake_server, follow, hear, misuse, sbus
from tests.support.harness import OTHER_USER, Bus, run, script
from tests.support.servers import StartBus

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
    assert [hear(peer) for _ in range(5)] == [b"CMSG sender/on", b"CMSG payload/on", WHOAMI, WHOAMI, b"SUB a"]
    for packet in PACKETS:
        peer.send(packet)
    return peer


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--sender"], "!/cred/0/0/9/!/cred/100/1000/42 a one\n- a two\n"),
        (["--format=%f %u %k"], "!/cred/0/0/9/!/cred/100/1000/42 1000 a\n- - a\n"),
    ],
)
def test_sub_sender(options: list[str], expected: str) -> None:
    """The name of the publisher stands before the key, or where a format has it, which asks for it."""
    with (
        fake_server() as (address, listener),
        Sbus(None, "-s", address, "sub", "--count=2", *options, "a") as running,
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
        {"number": 0, "gid": None, "uid": None, "pid": None, "chain": None},
    ]


def test_sub_sender_of_a_server_that_does_not_say() -> None:
    """The command ends with the reason, also with --reconnect: another attempt would end alike."""
    with (
        fake_server() as (address, listener),
        Sbus(None, "-s", address, "sub", "--sender", "--reconnect", "a") as running,
        listener.accept()[0] as peer,
    ):
        assert [hear(peer) for _ in range(5)] == [b"CMSG sender/on", b"CMSG payload/on", WHOAMI, WHOAMI, b"SUB a"]
        peer.send(WHOAMI + b"\0!/cred/1/2/3")
        status, output, errors = running.end()
    assert (status, output) == (2, b"")
    assert errors == (
        "sbus: this server does not say who sends a message: it is an older one, or runs with --no-sender; update it, "
        "ask as root or as the bus's own user, or do without sender=True (--sender)\n"
    )


def test_sub_sender_misused() -> None:
    """Payloads alone have no place for a sender; the early dialect has no senders."""
    for command in ("sub", "get"):
        assert "--sender is not for --raw" in misuse(command, "--sender", "--raw", "a")
    assert "early dialect" in misuse("sub", "--sender", "--dialect=early", "a")


def test_senders_of_a_bus(shared: Bus) -> None:
    """Each ``sbus pub`` is a publisher of its own."""
    with follow(shared, "--sender", "--json", "--count=2", "senders/") as running:
        for payload in ("1", "2"):
            sbus(shared, "pub", "senders/a", payload)
        first, second = (json.loads(line)["sender"] for line in running.end()[1].splitlines())
    assert first["number"] < second["number"]
    assert first["pid"] != second["pid"]
    assert (first["uid"], first["gid"], first["chain"]) == (os.geteuid(), os.getegid(), None)


def test_sender_of_a_last_value(bus: StartBus) -> None:
    """``get --sender`` says who has set a value, also when that one has left."""
    started = bus("--last-value=state/")
    sbus(started, "pub", "state/door", "open")
    (line,) = sbus(started, "get", "--sender", "--json", "state/")[0].splitlines()
    assert json.loads(line)["sender"]["uid"] == os.geteuid()
    assert sbus(started, "get", "--sender", "--format=%u %p", "state/")[0] == b"%d open\n" % os.geteuid()


def test_senders_of_several_users(bus: StartBus, become: list[str]) -> None:
    """A message of another user has that user's IDs; with ``--no-sender`` that user is not told of others."""
    started = bus("--mode=0777", "--no-sender")
    command = [*script("sbus"), "-s", started.address]
    with follow(started, "--sender", "--format=%u %p", "--count=1", "a") as running:
        assert run([*command, "pub", "a", "hello"], before=become).returncode == 0
        assert running.end()[:2] == (0, b"%d hello\n" % OTHER_USER[0])
    done = run([*command, "sub", "--sender", "a"], before=become)
    assert (done.returncode, done.stdout) == (2, "")
    assert "this server does not say who sends a message" in done.stderr
