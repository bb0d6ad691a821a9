"""Refusals on the command line: a status of their own, the rule, and what to do; against a real server."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.integration.cli.commands import Sbus, failure, fake_server, follow, hear, sbus
from tests.integration.cli.test_web import events, web
from tests.support.harness import Bus
from tests.support.servers import StartBus

POLICY = """
version = 1

[[rule]]
name = "no.writing"
deny_publish = ["locked/"]

[[rule]]
name = "no.reading"
deny_subscribe = ["hidden/"]
"""
ASK = f"ask the administrator of the bus: sbus policy explain --user {os.geteuid()}"


def lines(verb: str, key: str, rule: str) -> str:
    """Return what a command prints."""
    what = "subscribe to" if verb == "subscribe" else verb
    return (
        f"sbus: this client may not {what} '{key}': the policy of the bus forbids it (rule: {rule}); "
        f"{ASK} {verb} '{key}'"
    )


@pytest.fixture(scope="module")
def strict(module_bus: StartBus, tmp_path_factory: pytest.TempPathFactory) -> Bus:
    """A bus with a policy and last values."""
    policy = tmp_path_factory.mktemp("policy") / "policy.toml"
    policy.write_text(POLICY)
    return module_bus(f"--policy={policy}", "--last-value=hidden/")


@pytest.mark.parametrize(
    ("arguments", "stdin"),
    [
        (["pub", "locked/k", "x"], b""),
        (["pub", "--", "locked/k", "x"], b""),
        (["pub", "--repeat=0", "locked/k", "x"], b""),
        (["pub", "--repeat=0", "--rate=100", "locked/k", "x"], b""),
        (["pub", "--json-lines"], b'{"key": "locked/k", "payload": ""}\n'),
        (["request", "locked/k", "x"], b""),
        (["request", "--timeout=60", "locked/k"], b""),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_refused_messages(strict: Bus, arguments: list[str], stdin: bytes) -> None:
    """The command fails at once, with status 4."""
    assert failure(strict, *arguments, stdin=stdin, status=4) == lines("publish", "locked/k", "no.writing")


@pytest.mark.parametrize(
    "arguments",
    [
        ["sub", "hidden/k"],
        ["sub", "open/", "hidden/k"],
        ["sub", "--reconnect", "hidden/k"],
        ["sub", "--last", "--json", "hidden/k"],
        ["sub", "--verbose", "hidden/k"],
        ["get", "hidden/k"],
        ["reply", "hidden/k", "--", "true"],
    ],
    ids=" ".join,
)
def test_refused_subscriptions(strict: Bus, arguments: list[str]) -> None:
    """A command that would wait for ever fails, with status 4, also if it has other patterns."""
    output, errors = sbus(strict, *arguments, status=4)
    assert output == b""
    assert errors.splitlines() == [lines("subscribe", "hidden/k", "no.reading")]


def test_lines_that_come_slowly(strict: Bus) -> None:
    """``pub --lines`` learns of a refusal before its input has ended."""
    reader, writer = os.pipe()
    with Sbus(strict, "pub", "--lines", "locked/k", stdin=reader) as running:
        os.close(reader)
        try:
            while running.process.poll() is None:
                os.write(writer, b"line\n")
        except BrokenPipeError:
            pass
        os.close(writer)
        status, _, errors = running.end()
    assert (status, errors.rstrip()) == (4, lines("publish", "locked/k", "no.writing"))


def test_secret_keys_of_others(shared: Bus) -> None:
    """Without a policy too, a subscription to another client's secret key has the status of a refusal."""
    line = failure(shared, "sub", "!/cred/1/2/3/x", status=4)
    assert line == (
        "sbus: this client may not subscribe to '!/cred/1/2/3/x': only the client with that name may, and no policy "
        "changes that (rule: secret); see whoami"
    )


def test_probe_tells_nothing(strict: Bus) -> None:
    """Whether anybody subscribes to a key that one may not publish stays a secret: the answer is always yes."""
    assert sbus(strict, "probe", "locked/k")[0] == b"somebody subscribes to locked/k\n"


def test_a_policy_that_revokes(bus: StartBus, directory: Path) -> None:
    """A command that follows a pattern ends when a new policy forbids it."""
    policy = directory / "policy.toml"
    policy.write_text(POLICY)
    started = bus(f"--policy={policy}")
    with follow(started, "news/") as running:
        policy.write_text(POLICY.replace("hidden/", "news/"))
        started.kill(signal.SIGHUP)
        assert running.end() == (4, b"", lines("subscribe", "news/", "no.reading") + "\n")


def test_a_reply_that_is_refused() -> None:
    """The requester chooses where a reply goes, so a refused one is a line on standard error, once, and no end."""
    asking = b"MSG k\0!/cred/1/2/3/sbus/reply/x\0"
    with (
        fake_server() as (address, listener),
        Sbus(None, "-s", address, "reply", "--count=2", "k", "--", "true") as running,
        listener.accept()[0] as peer,
    ):
        while hear(peer) != b"CMSG !/cred/whoami":
            pass
        peer.send(b"CMSG !/cred/whoami\0!/cred/1/2/4")
        for _ in range(2):
            peer.send(asking)
            assert hear(peer) == b"MSG !/cred/1/2/3/sbus/reply/x\0+"
            peer.send(b"CMSG denied\0MSG !/cred/1/2/3/sbus/reply/x r")
        assert hear(peer) == b"CMSG !/cred/whoami"
        peer.send(b"CMSG !/cred/whoami\0!/cred/1/2/4")
        status, _, errors = running.end()
    assert status == 0
    assert errors.count("\n") == 1
    assert "may not publish '!/cred/1/2/3/sbus/reply/x'" in errors


def test_the_page_says_what_the_bus_refuses(bus: StartBus, directory: Path) -> None:
    """A page that may not see all keys says why, and so does the answer to what it publishes."""
    policy = directory / "policy.toml"
    policy.write_text(POLICY)
    started = bus(f"--policy={policy}", f"--admin={directory}/bus.admin")
    with web(started) as (_, stream, ask):
        problems = (value["problem"] for name, value in events(stream) if name == "bus" and value["problem"])
        assert "(rule: no.reading)" in next(problems)
        for key, status, word in (
            ("locked/k", 403, b"(rule: no.writing)"),
            ("open/k", 200, b"published"),
            ("!", 400, b"is not allowed"),
        ):
            answer = ask("POST", "/api/publish", json.dumps({"key": key, "payload": "x"}))
            assert answer.status == status
            assert word in answer.read()
