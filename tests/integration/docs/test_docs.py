"""Tests of the README and the pages in docs/: examples, tables, units, error lines."""

from __future__ import annotations

import ast
import functools
import importlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sbus import errors
from sbus.flood import HARD_STRATEGIES, ORDERS, SOFT_STRATEGIES
from sbus.protocol import controls
from sbus.protocol.keys import CURRENT, PeerCredentials, matches
from sbus.server.bus.registry import Counters
from sbus.server.core.credentials import AccessSettings
from sbus.server.core.limits import Limits
from sbus.server.run.twistd import Options, makeService
from tests.support import ROOT
from tests.support.harness import OTHER_USER, TIMEOUT, Bus, Client, Process, numbered, run, twistd

DOCS = ROOT / "docs"
EXAMPLES = DOCS / "examples"
PLUGINS = EXAMPLES / "plugins"


def page(name: str) -> str:
    return (DOCS / name).read_text()


@functools.cache
def all_code() -> str:
    return "".join(path.read_text() for path in (ROOT / "sbus").rglob("*.py"))


@functools.cache
def defined_names() -> set[str]:
    """Return the names of modules, functions, classes, variables and attributes."""
    modules = {path.stem for path in (ROOT / "sbus").rglob("*.py")} | {path.name for path in (ROOT / "sbus").iterdir()}
    return modules | set(re.findall(r"\b(?:def|class) (\w+)", all_code())) | set(re.findall(r"\b(\w+) =", all_code()))


def rows(text: str, start: str) -> list[list[str]]:
    """Return the body of the first list-table behind `start`, as a text for each cell."""
    table = text[text.index(start) :]
    table = table[table.index("   * - ") :]
    lines = []
    for line in table.splitlines():
        if line and not line.startswith("   "):
            break
        lines.append(line)
    found = re.split(r"^   \* - ", "\n".join(lines), flags=re.MULTILINE)[1:]
    return [[" ".join(cell.split()) for cell in re.split(r"^     -(?: |$)", row, flags=re.MULTILINE)] for row in found]


def literals(cell: str) -> list[str]:
    return re.findall(r"``(.+?)``", cell)


# --- README -------------------------------------------------------------------------------------


def readme_command(name: str) -> str:
    """Return a command of the README, ready for a shell."""
    text = (ROOT / "README.rst").read_text()
    block = re.search(rf"^\.\. code-block:: sh\n   :name: {name}\n\n((?:   .*\n|\n)+)", text, re.MULTILINE)
    assert block, name
    return re.sub("^   ", "", block[1], flags=re.MULTILINE).rstrip() + "\n"


class Script(Process):
    """A process of any command, not only of twistd."""

    def __init__(self, directory: Path, *command: str | Path, env: dict[str, str | None] | None = None) -> None:
        self.launcher = [*map(str, command)]
        super().__init__(directory, [], env=env)


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


# --- the protocol -------------------------------------------------------------------------------


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


# --- the design ---------------------------------------------------------------------------------


@pytest.mark.parametrize("row", rows(page("design.rst"), "Where each promise is kept")[1:], ids=lambda row: row[0])
def test_promises_are_kept_where_the_page_says(row: list[str]) -> None:
    """Every name in the table of promises is one that the code defines."""
    for name in literals(row[1]):
        assert defined_names().issuperset(name.split(".")), name


# --- the server ---------------------------------------------------------------------------------


def documented_options() -> dict[str, str]:
    """Return the options on the page on the server, each with its text."""
    parts = re.split(r"^\.\. option:: --([a-z-]+).*\n", page("server.rst"), flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_every_option_is_described() -> None:
    """The page on the server has every option, and no other."""
    options = Options()
    accepted = {name.rstrip("=") for name in options.longOpt if len(name.rstrip("=")) > 1}
    assert set(documented_options()) == accepted - set(options.deprecated)


def test_every_former_option_is_described() -> None:
    """The page on the server says of each option that will be gone what takes its place; no example has one."""
    named = {name for row in rows(page("server.rst"), "Former options") for name in re.findall("``--([a-z-]+)", row[0])}
    assert named == set(Options.deprecated)
    for path in sorted(EXAMPLES.rglob("*")):
        if path.is_file():
            assert not [option for option in Options.deprecated if f"--{option}".encode() in path.read_bytes()], path


def test_defaults_of_repeatable_options() -> None:
    """The page and the help have the default of the limit of a user's clients."""
    default = Limits().user_clients
    assert f"Default: {default} clients." in " ".join(documented_options()["user-clients"].split())
    assert f"[default: {default}]" in str(Options.opt_user_clients.__doc__)


PARAMETERS: Any = Options.optParameters
OPTIONS = [row for row in PARAMETERS if row[2] is not None]


@pytest.mark.parametrize("row", OPTIONS, ids=lambda row: row[0])
def test_defaults_of_options(row: list[Any]) -> None:
    """The page on the server states the default of each option, with the unit where there is one."""
    option, default = row[0], row[2]
    unit = ""
    if option.replace("-", "_") in Limits.__dataclass_fields__:
        unit = {"block-timeout": " seconds", "max-packet": " bytes", "max-payload": " bytes"}.get(
            option, " " + option.rpartition("-")[2]
        )
    text = " ".join(documented_options()[option].split())
    assert re.search(rf"Default: (``)?{re.escape(str(default))}(``)?{unit}[,.;]", text), text


@pytest.mark.parametrize("kind", [errors.CloseReason, errors.ViolationReason])
def test_every_reason_is_described(kind: Any) -> None:
    """The page on troubleshooting explains each reason that the log can give, and no other."""
    table = rows(page("troubleshooting.rst"), f"(``sbus.errors.{kind.__name__}``):")
    described = [name for row in table for name in literals(row[0])]
    assert described == [reason.name for reason in kind]


def test_every_counter_is_described() -> None:
    """The page on troubleshooting explains each counter, and no other."""
    table = rows(page("troubleshooting.rst"), "\nCounters\n")
    assert [literals(row[0])[0] for row in table] == list(Counters().as_dict())


@pytest.fixture
def occupied(directory: Path) -> Iterator[Path]:
    """A directory with everything that can be in the way of a new bus."""
    live, left = (socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2))
    live.bind(bytes(directory / "live"))
    live.listen()
    left.bind(bytes(directory / "left"))
    left.close()
    (directory / "file").touch()
    name = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    name.bind(b"\0" + bytes(directory))
    name.listen()
    yield directory
    live.close()
    name.close()


CAN_BE_PROVOKED = {
    "is in use by a server that is running": ["--socket={}/live"],
    "exists and is not a socket": ["--socket={}/file"],
    "make the directory": ["--socket={}/missing/bus"],
    "the path has": ["--socket={}/" + "x" * 108],
    "another server is running there": ["--socket=@{}"],
    "there is no group": ["--socket={}/bus", "--group=no such group"],
    "there is no such user": ["--socket={}/bus", "--allow-user=no such user"],
    "is not an open socket": ["--socket=/dev/fd/0"],
    "systemd passed no socket": ["--socket=systemd"],
    "there is no credentials policy": ["--socket={}/bus", "--credentials=none"],
    "give three octal digits": ["--socket={}/bus", "--mode=888"],
    "give a number of": ["--socket={}/bus", "--max-clients=none"],
    "use disconnect or ignore": ["--socket={}/bus", "--on-violation=perhaps"],
    "option --socket requires argument": ["--socket"],
    "there are only options here": ["--socket={}/bus", "extra"],
}


def test_lines_of_errors_are_described() -> None:
    """The page on troubleshooting lists each line that this module provokes, and quotes only what the code says."""
    quoted = [text for row in rows(page("troubleshooting.rst"), ".. _error-lines:")[1:] for text in literals(row[0])]
    assert set(CAN_BE_PROVOKED) <= set(quoted)
    source = all_code()
    source = re.sub(r'"\n\s+f?"', "", source)
    unsaid = [text for text in quoted if text not in CAN_BE_PROVOKED and text not in source]
    assert unsaid == []


def make(arguments: list[str]) -> None:
    """Do what ``twistd sbus`` does before it starts."""
    options = Options()
    options.parseOptions(arguments)
    makeService(options)


@pytest.mark.parametrize("said", CAN_BE_PROVOKED)
def test_lines_of_errors(said: str, occupied: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A bus that cannot start reports the cause in one line of the page on troubleshooting, with status 1."""
    before = sorted(os.listdir(occupied))
    with pytest.raises(SystemExit) as end:
        make([argument.format(occupied) for argument in CAN_BE_PROVOKED[said]])
    line = str(end.value.code)
    assert line.startswith("sbus: ")
    assert "\n" not in line
    assert said in line
    assert sorted(os.listdir(occupied)) == before
    assert capfd.readouterr() == ("", "")


def unit_options(path: Path) -> list[str]:
    """Return the bus's own arguments in a unit."""
    [command] = re.findall(r"^ExecStart=(.*)$", path.read_text(), re.MULTILINE)
    before, _, after = command.partition(" sbus ")
    assert before.split()[1:] == ["--nodaemon"]
    arguments: list[str] = after.split()
    return arguments


def test_unit_without_activation() -> None:
    """The unit of a bus that makes its own socket has valid options."""
    options = Options()
    options.parseOptions(unit_options(EXAMPLES / "systemd" / "sbus-alone.service"))
    assert (options["socket"], options["mode"], options["group"]) == ("/run/sbus/sbus.sock", 0o770, "bus")


@pytest.mark.skipif(not shutil.which("systemd-socket-activate"), reason="systemd-socket-activate is not installed")
def test_units_with_activation(directory: Path, spawn: Callable[..., Any]) -> None:
    """The bus of sbus.service serves on a socket that systemd passes as sbus.socket specifies."""
    unit = (EXAMPLES / "systemd" / "sbus.socket").read_text()
    settings = dict(re.findall(r"^(\w+)=(.*)$", unit, re.MULTILINE))
    assert settings["ListenSequentialPacket"] == "/run/sbus.sock"
    activate = [
        shutil.which("systemd-socket-activate"),
        "--seqpacket",
        f"--fdname={settings['FileDescriptorName']}",
        f"--listen={directory}/bus",
        *[f"--setenv={name}" for name in ("PATH", "PYTHONPATH", "SBUS_PURE") if name in os.environ],
    ]
    arguments = ["--nodaemon", "sbus", *unit_options(EXAMPLES / "systemd" / "sbus.service")]
    bus = spawn(Process, directory, arguments, before=activate)
    bus.wait_log("Listening on")
    with Client(directory / "bus") as client:
        assert client.sync() == []
    assert bus.stop() == 0


def test_log_for_programs(bus: Callable[..., Bus]) -> None:
    """With the observer of the page on troubleshooting, each log line is a JSON object with client and reason."""
    flags = ["--nodaemon", "--pidfile=", "--logger=json_log.observer"]
    started = bus_of_json_lines(bus, flags)
    with Client(started.address) as client:
        client.send(b"HELLO")
        assert client.has_ended()
    assert started.stop() == 0
    events = [json.loads(line) for line in started.log.splitlines()]
    assert "debug" not in {event["log_level"]["name"] for event in events}
    (listens,) = [event for event in events if "limits" in event]
    assert listens["limits"]["max_packet"] == 409600
    ours = [{name: value for name, value in event.items() if not name.startswith("log_")} for event in events]
    assert "unpersistable" not in json.dumps(ours)
    about = [event for event in events if "reason" in event]
    assert [(e["reason"], e["number"], e["pid"], e["uid"], e["gid"]) for e in about] == [
        (reason, 1, os.getpid(), os.geteuid(), os.getegid()) for reason in ("UNKNOWN_VERB", "VIOLATION")
    ]


def bus_of_json_lines(bus: Callable[..., Bus], flags: list[str]) -> Bus:
    path = os.pathsep.join([str(EXAMPLES), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]).rstrip(os.pathsep)
    return bus(flags=flags, env={"PYTHONPATH": path})


# --- embedding ----------------------------------------------------------------------------------


def test_an_application_with_a_bus_in_it(directory: Path, spawn: Callable[..., Any]) -> None:
    """The application of the page on embedding publishes the load to its clients."""
    application = spawn(Process, directory, ["-n", "--pidfile=", "-y", EXAMPLES / "load.py"])
    application.wait_log("sbus listens on .*/load.sock")
    assert (directory / "load.sock").stat().st_mode & 0o777 == 0o770
    with Client(directory / "load.sock") as client:
        client.sub(b"machine/")
        assert re.fullmatch(rb"MSG machine/load\x00\d+\.\d\d", client.recv())
    application.stop()
    assert not (directory / "load.sock").exists()
    assert "#warn]" not in application.log


def test_two_buses_in_one_process(directory: Path, spawn: Callable[..., Any]) -> None:
    """The outer bus of the page on embedding shows the public keys of the inner one, and nothing else."""
    program = spawn(Script, directory, sys.executable, EXAMPLES / "two_buses.py", "inner", "outer")
    program.wait_log("both buses listen")
    with Client(directory / "outer") as outside, Client(directory / "inner") as inside:
        outside.sub(b"")
        inside.sub(b"")
        assert outside.sync() == inside.sync() == []
        inside.msg(b"private/plan", b"hidden")
        shown = inside.msg(b"public/news", b"shown")
        hidden = outside.msg(b"public/echo", b"not inside")
        assert inside.sync() == [b"MSG private/plan\0hidden", shown]
        assert sorted(outside.sync()) == sorted([shown, hidden])
    program.wait_log(r"^inner: uid \d+ got 4, lost 0: ")
    program.wait_log(r"^outer: uid \d+ got 4, lost 0: ")
    assert program.stop(signal.SIGINT) in (0, -signal.SIGINT)
    assert sorted(os.listdir(directory)) == []


# --- plugins ------------------------------------------------------------------------------------


@pytest.fixture
def with_plugins(directory: Path) -> dict[str, str]:
    """The environment of a process that finds the plugins of the page on plugins."""
    copy = shutil.copytree(PLUGINS, directory / "acme", ignore=shutil.ignore_patterns("__pycache__", "dropin.cache"))
    return {"PYTHONPATH": os.pathsep.join([str(copy), *filter(None, [os.environ.get("PYTHONPATH")])])}


@pytest.fixture
def acme(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module of the page on plugins."""
    monkeypatch.syspath_prepend(str(PLUGINS))
    yield importlib.import_module("acme_bus")
    sys.modules.pop("acme_bus")


def test_help_lists_plugins(with_plugins: dict[str, str]) -> None:
    """The help names the credentials policy, the strategies and the order that plugins bring."""
    command = [*twistd(), "sbus", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env={**os.environ, **with_plugins})
    assert shown.returncode == 0
    for name in ("house-rules: ", "blocking/soft/recent", "blocking/hard/make-room", "order/smallest"):
        assert name in shown.stdout


def test_policy_of_a_plugin(bus: Callable[..., Bus], with_plugins: dict[str, str]) -> None:
    """A bus applies a plugin's policy: it disconnects clients that subscribe to everything, and no others."""
    started = bus("--credentials=house-rules", env=with_plugins)
    listener = started.client(b"news/*", b"system/")
    for pattern in (b"", b"*", b"n*/"):
        with Client(started.address) as greedy:
            greedy.sub(pattern)
            assert greedy.has_ended()
    started.wait_log("violation by client .* the policy of the bus refuses this subscription", 3)
    mine = listener.msg(b"system/status", b"fine")  # by the server's own user
    assert listener.sync() == [mine]
    with Client(started.address) as spy:
        spy.sub(b"!/cred/1/2/3/inbox")
        assert spy.has_ended()
    assert started.stop() == 0


def test_policy_restricts_publishing(bus: Callable[..., Bus], with_plugins: dict[str, str], as_root: None) -> None:
    """A plugin's policy restricts publishing by other users than the server's."""
    started = bus("--credentials=house-rules", "--mode=0777", env=with_plugins)
    listener = started.client(b"news/", b"system/")
    with Client(started.address, user=OTHER_USER) as other:
        allowed = other.msg(b"news/today")
        assert listener.recv() == allowed
        other.msg(b"system/halt")
        assert other.has_ended()
    started.wait_log("the policy of the bus refuses this publication")
    assert listener.sync() == []


def test_policy_with_made_up_peers(acme: ModuleType) -> None:
    """The policy decides about invented peers as the page says."""
    rules = acme.HouseRulesPolicy().make(AccessSettings(allowed_users=frozenset((4242,))))
    system, user = PeerCredentials(pid=1, uid=0, gid=0), PeerCredentials(pid=9, uid=4242, gid=100)
    assert rules.mayPublish(system, b"system/halt")
    assert not rules.mayPublish(user, b"system/halt")
    assert rules.mayPublish(user, b"news/system/")
    assert rules.mayConnect(user)
    assert not rules.mayConnect(PeerCredentials(pid=9, uid=4243, gid=100))
    assert rules.mayBlock(system, user)
    assert not rules.mayBlock(user, system)
    own = CURRENT.check(b"!/cred//4242//x")
    rules.checkSubscription(user, b"!/cred//4242//x", own)
    with pytest.raises(errors.Violation, match="another client's"):
        rules.checkSubscription(system, b"!/cred//4242//x", own)


def read_late(bus: Bus, controls: list[bytes], messages: list[bytes]) -> list[bytes]:
    """Return what a client with these control messages receives if it reads late; the log counts the rest."""
    late = bus.client(b"flood")
    late.cmsg(*controls)
    late.sync()
    publisher = bus.client()
    for message in messages:
        publisher.send(message)
    publisher.sync()
    late.sock.shutdown(socket.SHUT_WR)
    got = late.rest()
    bus.wait_log(r"client 1 disconnected")
    assert len(got) + bus.dropped() == len(messages)
    return got


def in_the_socket(got: list[bytes], messages: list[bytes]) -> int:
    """Return the number of messages that the kernel held: those that came first, in the order of sending."""
    return next((i for i, (one, other) in enumerate(zip(got, messages, strict=False)) if one != other), len(got))


def test_soft_strategy_of_a_plugin(bus: Callable[..., Bus], with_plugins: dict[str, str]) -> None:
    """With the plugin's soft strategy, a late reader receives what its socket held, then the ten newest messages."""
    messages = numbered(b"flood", 3000)
    got = read_late(bus(env=with_plugins), [b"blocking/soft/recent"], messages)
    assert 0 < in_the_socket(got, messages) == len(got) - 10
    assert got[-10:] == messages[-10:]


def test_hard_strategy_of_a_plugin(bus: Callable[..., Bus], with_plugins: dict[str, str]) -> None:
    """With the plugin's hard strategy, a queue at its limit drops its oldest messages for new ones."""
    messages = numbered(b"flood", 3000)
    started = bus("--queue-messages=100", env=with_plugins)
    got = read_late(started, [b"blocking/hard/make-room"], messages)
    assert 0 < in_the_socket(got, messages) == len(got) - 100
    assert got[-100:] == messages[-100:]


def test_hard_strategy_makes_room_for_a_large_message(bus: Callable[..., Bus], with_plugins: dict[str, str]) -> None:
    """For a large message, the plugin's hard strategy drops as many waiting messages as necessary."""
    messages = [*numbered(b"flood", 2000, size=1000), b"MSG flood\0".ljust(8000, b"L")]
    started = bus("--queue-bytes=10000", env=with_plugins)
    got = read_late(started, [b"blocking/hard/make-room"], messages)
    assert got[-3:] == messages[-3:]
    assert in_the_socket(got, messages) == len(got) - 3


def test_order_of_a_plugin(bus: Callable[..., Bus], with_plugins: dict[str, str]) -> None:
    """With the plugin's order, waiting messages are sent by size, and equal sizes in order of arrival."""
    messages = [b"MSG flood\0%d" % i + b"." * (i * 7 % 50) for i in range(2000)]
    got = read_late(bus(env=with_plugins), [b"order/smallest"], messages)
    held = in_the_socket(got, messages)
    assert 0 < held < len(messages)
    # Whether the last packet in the kernel differs from the first in the queue is a matter of luck.
    assert got[held:] == sorted(messages[held:], key=len)
