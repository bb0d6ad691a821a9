"""The examples of the page on large messages, run with a real server."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.docs.pages import EXAMPLES, Script
from tests.integration.docs.programs import COMPILER, COOKBOOK
from tests.support.harness import TIMEOUT, run
from tests.support.servers import StartBus

FRAMES = "".join(f"(1080, 1920, 3) {number}.0 False\n" for number in range(3))
TABLES = "tables/hours 24 23\ntables/readings 100000 99999\ncopied: False\n"
ROLES = {
    "camera": ("numpy", ("watch", "film"), ("3",), f"watching\n{FRAMES}"),
    "tables": ("pyarrow", ("receive", "send"), (), f"waiting\n{TABLES}"),
    "tensors": ("torch", ("receive", "send"), (), "waiting\ntorch.Size([100000]) 4999950336.0\n"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "tables" else []) for name in ROLES]
)
def test_example(bus: StartBus, spawn: Callable[..., Any], directory: Path, name: str) -> None:
    """One process sends, another receives in place; without the library the example is for, it is skipped."""
    library, (receive, send), arguments, printed = ROLES[name]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    address = str(bus().address)
    command = [sys.executable, str(EXAMPLES / "payloads" / f"{name}.py")]
    receiver = spawn(Script, directory, *command, receive, address, *arguments)
    receiver.wait_log(printed.partition("\n")[0])
    sent = run([*command, send, address, *arguments])
    assert (sent.returncode, sent.stdout, sent.stderr) == (0, "", "")
    assert receiver.wait() == 0
    assert receiver.log == printed
    unused = run(command)
    assert (unused.returncode, unused.stderr.count("\n")) == (1, 1), "without arguments it says how to run it"


@pytest.mark.skipif(not COMPILER, reason="there is no C compiler")
def test_c_program_passes_a_large_file(bus: StartBus, spawn: Callable[..., Any], directory: Path) -> None:
    """The program in C publishes a file that fits no packet, and prints it."""
    assert COMPILER
    program, data = directory / "client", b"0123456789" * 300_000
    subprocess.run([COMPILER, "-std=c11", "-o", program, COOKBOOK / "client.c"], check=True)
    (directory / "large").write_bytes(data)
    address = str(bus().address)
    receiver = spawn(Script, directory, program, "sub", address, "camera/", "1")
    receiver.wait_log("^subscribed as ")
    subprocess.run([program, "file", address, "camera/1", directory / "large"], check=True, timeout=TIMEOUT)
    assert receiver.wait() == 0
    assert receiver.log.endswith(f"\ncamera/1: {data.decode()}\n")


@pytest.mark.skipif(not COMPILER, reason="there is no C compiler")
def test_c_program_reports_a_refused_file(bus: StartBus, directory: Path) -> None:
    """The program in C fails if the bus refuses the file, here an empty one."""
    assert COMPILER
    program, empty = directory / "client", directory / "empty"
    subprocess.run([COMPILER, "-std=c11", "-o", program, COOKBOOK / "client.c"], check=True)
    empty.touch()
    command = [str(program), "file", str(bus().address), "camera/1", str(empty)]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert (refused.returncode, refused.stderr) == (1, "the bus has closed the connection; its log says why\n")
