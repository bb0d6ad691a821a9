"""The pages of the server: options, reasons, counters, errors, units and logs."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sbus import errors
from sbus.server.bus.registry import Counters
from sbus.server.core.limits import Limits
from sbus.server.run.twistd import Options, makeService
from tests.integration.docs.pages import EXAMPLES, all_code, literals, page, rows
from tests.support.harness import Bus, Client, Process


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
