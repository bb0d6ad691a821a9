"""Losses, subscribers and last values on the command line, against a real server and a scripted one."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from tests.integration.cli.commands import Sbus, failure, fake_server, follow, hear, misuse, sbus
from tests.support.harness import Bus
from tests.support.servers import StartBus
from tests.support.waiting import paused


def test_get(keeping: Bus) -> None:
    """`get` prints the last value of each key once, however many patterns match, and exits."""
    for key, payload in (("state/door", "open"), ("state/lamp", "on"), ("state/door", "closed"), ("other", "x")):
        sbus(keeping, "pub", key, payload)
    assert sbus(keeping, "get", "state/", "state/door")[0] == b"state/lamp on\nstate/door closed\n"
    assert sbus(keeping, "get", "--raw", "state/lamp")[0] == b"on"
    (line,) = sbus(keeping, "get", "--json", "state/lamp")[0].splitlines()
    assert json.loads(line) | {"time": 0} == {
        "time": 0,
        "key": "state/lamp",
        "payload": "on",
        "encoding": "text",
        "last": True,
    }
    assert failure(keeping, "get", "state/none", "other", status=3) == (
        "sbus: no last value matches state/none other: see --last-value of the server"
    )


def test_get_from_a_server_without_last_values() -> None:
    """With a server that does not know the question, `get` says so."""
    with (
        fake_server() as (address, listener),
        Sbus(None, "-s", address, "get", "a") as running,
        listener.accept()[0] as peer,
    ):
        assert [hear(peer) for _ in range(4)] == [b"CMSG last\0a", b"SUB a", *[b"CMSG !/cred/whoami"] * 2]
        for packet in (b"MSG a\0live", *[b"CMSG !/cred/whoami\0!/cred/1/2/3"] * 2):
            peer.send(packet)
        status, output, errors = running.end()
    assert (status, output) == (2, b"")
    assert "has no last values: it is older than this command" in errors


def test_sub_last(keeping: Bus) -> None:
    """``sub --last`` begins with the last values; --json marks them."""
    sbus(keeping, "pub", "state/sub", "1")
    with follow(keeping, "--last", "--json", "--count=2", "state/sub") as running:
        assert json.loads(running.line())["last"] is True
        sbus(keeping, "pub", "state/sub", "2")
        live = json.loads(running.line())
        assert (live["payload"], "last" in live) == ("2", False)
        assert running.end()[0] == 0


PACKETS = [
    b"MSG a\x001",
    b"CMSG lost\x003 300 3 queue-full",
    b"MSG a\x002",
    b"CMSG lost\x001 10 4 discard",
    b"CMSG lost\0? ? ? restart",
    b"MSG a\x003",
]


@pytest.mark.parametrize(
    ("option", "expected", "reported"),
    [
        (
            [],
            "a 1\n# lost 3 messages, 300 bytes (3 in all): queue-full\na 2\n"
            "# lost 1 message, 10 bytes (4 in all): discard\n# lost messages: restart\na 3\n",
            "",
        ),
        (
            ["--raw"],
            "123",
            "sbus: lost 3 messages, 300 bytes (3 in all): queue-full\n"
            "sbus: lost 1 message, 10 bytes (4 in all): discard\nsbus: lost messages: restart\n",
        ),
    ],
)
def test_sub_receipts(option: list[str], expected: str, reported: str) -> None:
    """Losses are lines of their own, in their place; where output has another format, they go to standard error."""
    with (
        fake_server() as (address, listener),
        Sbus(None, "-s", address, "sub", "--receipts", "--count=3", *option, "a") as running,
        listener.accept()[0] as peer,
    ):
        assert [hear(peer) for _ in range(4)] == [
            b"CMSG receipts/on",
            b"CMSG payload/on",
            b"CMSG !/cred/whoami",
            b"SUB a",
        ]
        for packet in PACKETS:
            peer.send(packet)
        assert running.end() == (0, expected.encode(), reported)


def test_sub_receipts_as_json() -> None:
    """With --json a loss is an object with its numbers; null is a number that nobody knows."""
    with (
        fake_server() as (address, listener),
        Sbus(None, "-s", address, "sub", "--receipts", "--json", "--count=3", "a") as running,
        listener.accept()[0] as peer,
    ):
        for packet in PACKETS:
            peer.send(packet)
        status, output, _ = running.end()
    lines = [json.loads(line) for line in output.splitlines()]
    assert status == 0
    assert ["lost" in line for line in lines] == [False, True, False, True, True, False]
    assert all(isinstance(line.pop("time"), float) for line in lines)
    assert lines[1] == {"lost": 3, "bytes": 300, "total": 3, "why": "queue-full"}
    assert lines[4] == {"lost": None, "bytes": None, "total": None, "why": "restart"}


def test_every_message_is_printed_or_reported(shared: Bus) -> None:
    """A stopped ``sub --receipts`` finds each message of a flood, or its loss, when it goes on."""
    count, payload = 3000, "x" * 500
    with follow(shared, "--receipts", "--soft=discard", "--json", "flood") as running:
        with paused(running.process.pid):
            sbus(shared, "pub", f"--repeat={count}", "flood", payload)
        lines: list[dict[str, Any]] = []
        while sum(line.get("lost", 1) for line in lines) < count:
            lines.append(json.loads(running.line()))
        lost = [line for line in lines if "lost" in line]
        assert sum(line.get("lost", 1) for line in lines) == count
        assert lost[-1]["total"] == sum(line["lost"] for line in lost) > 0
        assert {line["why"] for line in lost} == {"discard"}


def test_gap_of_a_reconnect_is_a_loss(bus: StartBus) -> None:
    """``sub --last --receipts --reconnect`` reports the gap, and gets the last values again behind it."""
    first = bus("--last-value=state/")
    sbus(first, "pub", "state/door", "open")
    with follow(first, "--last", "--receipts", "--reconnect", "--json", "state/") as running:
        assert json.loads(running.line())["payload"] == "open"
        first.stop(signal.SIGTERM)
        second = bus("--last-value=state/")
        gap = json.loads(running.line())
        assert {name: gap[name] for name in ("lost", "bytes", "total", "why")} == {
            "lost": None,
            "bytes": None,
            "total": None,
            "why": "reconnect",
        }
        sbus(second, "pub", "state/door", "closed")
        assert json.loads(running.line())["payload"] == "closed"


def test_reason_is_printed() -> None:
    """The server's reason stands in the error, without advice to look for it elsewhere."""
    with fake_server() as (address, listener), Sbus(None, "-s", address, "sub", "a") as running:
        with listener.accept()[0] as peer:
            peer.send(b"CMSG bye\0queue-full its queue was full")
        assert running.end() == (1, b"", f"sbus: the server disconnected this client: its queue was full ({address})\n")


def test_probe(shared: Bus) -> None:
    """`probe` has status 0 if anybody subscribes, and 3 if nobody does."""
    assert failure(shared, "probe", "a/b", status=3) == "sbus: nobody subscribes to a/b"
    with follow(shared, "a/"):
        assert sbus(shared, "probe", "a/b") == (b"somebody subscribes to a/b\n", "")
    assert sbus(shared, "probe", "!/cred////x")[0] == b"somebody subscribes to !/cred////x\n"


def test_pub_if_subscribed(shared: Bus) -> None:
    """``pub --if-subscribed`` publishes nothing to nobody, with status 3."""
    said = failure(shared, "pub", "--if-subscribed", "if/sub", "x", status=3)
    assert said == "sbus: nothing was published: nobody subscribes to if/sub"
    with follow(shared, "--count=1", "if/") as running:
        sbus(shared, "pub", "--if-subscribed", "if/sub", "x")
        assert running.end() == (0, b"if/sub x\n", "")
    assert "exclude each other" in misuse("pub", "--if-subscribed", "--wait", "k")


def test_pub_wait(shared: Bus) -> None:
    """``pub --wait`` says that it waits, and publishes once somebody subscribes, or gives up in time."""
    waits = "sbus: waiting for a subscriber of wait/for; recorders and other observers do not count\n"
    late = "sbus: timed out: waiting for a subscriber of wait/for did not finish within 0.3 s\n"
    output, errors = b"", late
    while (output, errors) == (b"", late):  # the server took all of the time to say that nobody subscribes
        output, errors = sbus(shared, "pub", "--wait", "--timeout=0.3", "wait/for", "x", status=124)
    assert (output, errors) == (b"", waits + late)
    with Sbus(shared, "pub", "--wait", "wait/for", "x") as waiting:
        assert waiting.process.stderr is not None
        assert waiting.process.stderr.readline().decode() == waits
        with follow(shared, "--count=1", "wait/") as running:
            assert running.end() == (0, b"wait/for x\n", "")
        assert waiting.end() == (0, b"", "")


def test_server_without_interest() -> None:
    """With a server that does not say who subscribes, `probe` and ``pub --if-subscribed`` end with status 2."""
    for arguments in (["probe", "k"], ["pub", "--if-subscribed", "k", "x"], ["pub", "--wait", "k", "x"]):
        with (
            fake_server() as (address, listener),
            Sbus(None, "-s", address, *arguments) as running,
            listener.accept()[0] as peer,
        ):
            assert [hear(peer)[:4] for _ in range(2)] == [b"CMSG"] * 2
            peer.send(b"CMSG !/cred/whoami\0!/cred/1/2/3")
            status, output, errors = running.end()
            assert (status, output) == (2, b"")
            assert "the server does not say whether anybody subscribes" in errors
