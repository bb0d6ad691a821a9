"""The README, and the pages of the protocol and of the design, say what holds."""

from __future__ import annotations

import ast
import functools
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sbus.flood import HARD_STRATEGIES, ORDERS, SOFT_STRATEGIES
from sbus.protocol import controls
from sbus.protocol.keys import CURRENT, PeerCredentials, matches
from tests.integration.docs.pages import DOCS, EXAMPLES, Script, all_code, literals, page, rows
from tests.support import ROOT
from tests.support.harness import TIMEOUT, Bus, run, twistd


@functools.cache
def defined_names() -> set[str]:
    """Return the names of modules, functions, classes, variables and attributes."""
    modules = {path.stem for path in (ROOT / "sbus").rglob("*.py")} | {path.name for path in (ROOT / "sbus").iterdir()}
    return modules | set(re.findall(r"\b(?:def|class) (\w+)", all_code())) | set(re.findall(r"\b(\w+) =", all_code()))


# --- README ---------------------------------------------------------------------------------------


def readme_command(name: str) -> str:
    """Return a command of the README, ready for a shell."""
    text = (ROOT / "README.rst").read_text()
    block = re.search(rf"^\.\. code-block:: sh\n   :name: {name}\n\n((?:   .*\n|\n)+)", text, re.MULTILINE)
    assert block, name
    return re.sub("^   ", "", block[1], flags=re.MULTILINE).rstrip() + "\n"


@pytest.fixture
def tree(directory: Path) -> Path:
    """A checkout after its set-up, reduced to what ``make run`` needs."""
    tree = directory / "sbus"
    (tree / "tools").mkdir(parents=True)
    shutil.copy(ROOT / "tools" / "run-bus", tree / "tools")
    binaries = tree / ".venv" / "bin"
    binaries.mkdir(parents=True)
    command = " ".join(f"'{part}'" for part in twistd())
    (binaries / "twistd").write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    (binaries / "twistd").chmod(0o755)
    return tree


@pytest.mark.parametrize(
    "runtime", [pytest.param("run", marks=pytest.mark.slow), None], ids=["XDG_RUNTIME_DIR", "without"]
)
def test_first_message(tree: Path, directory: Path, spawn: Callable[..., Any], runtime: str | None) -> None:
    """The README's two commands pass a message on the bus of ``make run``, with either place of its socket."""
    env: dict[str, str | None] = {"XDG_RUNTIME_DIR": None}
    if runtime:
        (directory / runtime).mkdir()
        env["XDG_RUNTIME_DIR"] = str(directory / runtime)
    bus = spawn(Script, tree, "tools/run-bus", "", env=env)
    bus.wait_log("sbus listens on")
    environment = {**os.environ, **{name: value for name, value in env.items() if value}}
    if not runtime:
        environment.pop("XDG_RUNTIME_DIR", None)

    def run(name: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["sh", "-c", readme_command(name)], cwd=tree, env=environment, stdout=subprocess.PIPE, text=True
        )

    # The subscription is not visible from outside, so publish until the receiver has a message.
    output = None
    with run("first-receive") as receiver:
        try:
            for _ in range(100):
                with run("first-publish") as publisher:
                    assert publisher.wait(TIMEOUT) == 0
                try:
                    output = receiver.communicate(timeout=0.05)[0]
                    break
                except subprocess.TimeoutExpired:
                    continue
        finally:
            receiver.kill()
    assert output == "b'MSG greetings/world\\x00hello'\n"
    assert output.strip() in (ROOT / "README.rst").read_text()
    assert bus.stop(signal.SIGINT) == 0


def test_other_languages_can_be_clients(bus: Callable[..., Bus]) -> None:
    """The README's claim about other languages holds for one that is installed nearly everywhere: Perl."""
    program = (
        "socket(S, AF_UNIX, SOCK_SEQPACKET, 0) and connect(S, pack_sockaddr_un($ARGV[0])) or die $!;"
        r'send(S, "SUB t/", 0); send(S, "MSG t/x\0hello", 0); recv(S, $m, 409600, 0); print $m'
    )
    if not shutil.which("perl"):
        pytest.skip("perl is not installed")
    command = ["perl", "-MSocket", "-e", program, str(bus().address)]
    done = subprocess.run(command, capture_output=True, timeout=TIMEOUT)
    assert done.stdout == b"MSG t/x\0hello", done.stderr


def test_getting_started(directory: Path) -> None:
    """The commands and the program of the page work as it says, one after the other."""
    shell = dict(os.environ, SBUS_SOCKET=str(directory / "bus"), PYTHONUNBUFFERED="1")
    shell["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), shell["PATH"]])
    lines = re.findall(r"^   (sbus .*)$", page("getting-started.rst"), re.MULTILINE)
    assert [line.split()[1] for line in lines] == ["serve", "sub", "pub"]
    serve, subscribe, publish = (f"exec {line}" for line in lines)
    with subprocess.Popen(["sh", "-c", serve], env=shell, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            while "sbus listens on" not in server.stdout.readline():
                assert server.poll() is None
            command = ["sh", "-c", f"{subscribe} -v --count=1"]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            with subprocess.Popen(command, env=shell, **pipes) as subscriber:  # type: ignore[call-overload]
                try:
                    subscriber.stderr.readline()  # it has subscribed
                    subprocess.run(["sh", "-c", publish], env=shell, check=True, timeout=TIMEOUT)
                    assert subscriber.communicate(timeout=TIMEOUT)[0] == "greetings/world hello\n"
                finally:
                    subscriber.kill()
            command = [sys.executable, str(EXAMPLES / "first.py")]
            done = subprocess.run(command, env=shell, capture_output=True, text=True, timeout=TIMEOUT)
            assert done.stdout == "greetings/world hello\n", done.stderr
        finally:
            server.terminate()


def test_readme_links() -> None:
    """Every file that the README links to exists."""
    targets = re.findall(r"`[^`<\n]+ <([^>\n]+)>`_", (ROOT / "README.rst").read_text())
    assert targets
    assert [target for target in targets if "://" not in target and not (ROOT / target).exists()] == []


def test_examples_import_public_names_only() -> None:
    """What an example imports is in a module that the reference lists as public, and in that module's ``__all__``."""
    table = (DOCS / "api.rst").read_text().partition("Internal modules")[0].partition("Besides these modules")[0]
    public = {"sbus.client", *re.findall(r"(?::mod:`|``)(sbus[\w.]*)`", table)}
    for path in EXAMPLES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sbus"):
                assert node.module in public, path
                module = importlib.import_module(str(node.module))
                names = {alias.name for alias in node.names}
                assert node.module == "sbus.client" or names <= set(module.__all__), (path, node.module)


def test_every_example_is_on_a_page() -> None:
    """Each file of docs/examples is shown on a page, or offered there."""
    shown = {
        target
        for path in DOCS.rglob("*.rst")
        for target in re.findall(r"(?:literalinclude:: |:download:`[^`<]*<)/?examples/([^\s>]+)", path.read_text())
    }
    there = {
        str(path.relative_to(EXAMPLES))
        for path in EXAMPLES.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.name != "dropin.cache"
    }
    assert there == shown


# --- the protocol ---------------------------------------------------------------------------------


@pytest.mark.parametrize("row", rows(page("protocol.rst"), ":name: matching")[1:], ids=lambda row: row[0])
def test_examples_of_matching(row: list[str]) -> None:
    """Each pattern of the table matches exactly the keys that the table says."""
    [pattern], hits, misses = map(literals, row)
    assert hits or misses
    for key in hits + misses:
        assert matches(pattern.encode(), key.encode()) is (key in hits), key


@pytest.mark.parametrize("row", rows(page("protocol.rst"), ":name: secrets")[1:], ids=lambda row: row[0])
def test_examples_of_secret_keys(row: list[str]) -> None:
    """Each secret pattern of the table receives exactly what the table says."""
    [pattern], hits, misses = map(literals, row)
    assert hits
    assert misses
    client = PeerCredentials(pid=4711, uid=1000, gid=100)
    for key in hits + misses:
        assert matches(pattern.encode(), key.encode(), CURRENT, client) is (key in hits), key


def test_every_control_message_is_described() -> None:
    """The page on the protocol has every control message of the built-in strategies and orders, and no other."""
    described = set(re.findall(r"CMSG ((?:blocking|order)/[a-z/]+)``", page("protocol.rst")))
    assert described == {c.selector.decode() for c in (*SOFT_STRATEGIES, *HARD_STRATEGIES, *ORDERS)}


def test_the_complete_client(bus: Callable[..., Bus], spawn: Callable[..., Any], directory: Path) -> None:
    """The complete client of the protocol page answers each question to a key that only the asking client can read."""
    started = bus()
    spy = started.client(b"", b"!/cred////")
    clock = spawn(Script, directory, sys.executable, EXAMPLES / "clock.py", "serve", started.address)
    clock.wait_log("the clock runs")
    asked = run([sys.executable, EXAMPLES / "clock.py", "ask", started.address])
    assert re.fullmatch(r"\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4}\n", asked.stdout), asked
    [question] = spy.sync()
    assert question.startswith(b"MSG clock/ask\0!/cred/")
    assert started.stop() == 0
    assert clock.wait() == 1
    assert "the bus has closed the connection" in clock.log


def test_the_table_of_control_messages_is_complete() -> None:
    """The table in the protocol's specification has a row for each choice, generated from its entry in the code."""
    sys.path.insert(0, str(DOCS / "_ext"))
    try:
        extension = importlib.import_module("sbusdocs")
    except ImportError:
        pytest.skip("Sphinx is not installed: run make docs")
    finally:
        sys.path.pop(0)
    table = "\n".join(extension.control_table(controls))
    for row, control in zip(rows(table, ".. list-table::")[1:], controls.CONTROLS, strict=True):
        assert literals(row[0]) == [f"CMSG {control.key.decode()}"]
        assert row[1] == control.meaning
        assert row[2] == ("yes" if control.default else "")
    assert ".. controlmessages::" in page("protocol.rst")


# --- the design -----------------------------------------------------------------------------------


@pytest.mark.parametrize("row", rows(page("design.rst"), "Where each promise is kept")[1:], ids=lambda row: row[0])
def test_promises_are_kept_where_the_page_says(row: list[str]) -> None:
    """Every name in the table of promises is one that the code defines."""
    for name in literals(row[1]):
        assert defined_names().issuperset(name.split(".")), name
