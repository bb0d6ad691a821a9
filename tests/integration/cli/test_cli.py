"""The command ``sbus`` as a process, with pipes and a terminal, against a real server; and its page of the docs."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from sbus.syscalls.polling import is_readable
from tests.integration.cli.commands import (
    Sbus,
    Terminal,
    command,
    complaints,
    environment,
    failure,
    fake_server,
    follow,
    hear,
    sbus,
)
from tests.support import ROOT
from tests.support.harness import (
    OTHER_USER,
    TIMEOUT,
    WHOAMI,
    Bus,
    run,
    script,
    wait_end,
)
from tests.support.servers import StartBus

DOCS = ROOT / "docs"

# --- where the bus is, and what can go wrong there ------------------------------------------------


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
        assert process.communicate(timeout=TIMEOUT)[0] == b""  # once no process has the pipe open


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
