"""The page on containers: what a server sees across namespaces, made with unshare(1)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import sbus
from sbus.errors import InvalidKey, ViolationReason
from tests.integration.cli.commands import command, environment
from tests.support import ROOT
from tests.support.harness import TIMEOUT, Bus
from tests.support.servers import StartBus

PID = ("unshare", "--pid", "--fork", "--kill-child")
USER = ("unshare", "--user")
MOUNT = ("unshare", "--mount")


def need(namespace: Sequence[str]) -> None:
    if not shutil.which("unshare") or subprocess.run([*namespace, "true"], capture_output=True).returncode:
        pytest.skip(f"{' '.join(namespace)}: not permitted here")


def whoami(bus: Bus, *before: str) -> tuple[str, str]:
    """Run ``sbus whoami``; return both outputs."""
    done = subprocess.run(
        [*before, *command("sbus"), "whoami"], env=environment(bus), capture_output=True, text=True, timeout=TIMEOUT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


def test_server_on_the_host_sees_into_containers(bus: StartBus) -> None:
    """A client in a PID namespace below the server's has a name of its own, and answers requests."""
    need(PID)
    name, errors = whoami(bus(), *PID)
    assert errors == ""
    assert re.fullmatch(rf"!/cred/{os.getegid()}/{os.geteuid()}/[1-9]\d*", name)


def test_server_in_a_container_sees_nobody_outside(bus: StartBus) -> None:
    """A client outside of the server's PID namespace has PID 0: it can use open keys, and the rest is explained."""
    need(PID)
    started = bus(before=list(PID))
    name, errors = whoami(started)
    assert name.endswith("/0")
    assert errors.startswith("sbus: this name is not yours alone, so secret keys are refused: the server knows this ")
    assert "--pid=host" in errors
    with sbus.connect(str(started.address)) as client:
        own = client.subscribe("open")
        client.publish("open", b"x")
        assert own.get(TIMEOUT).payload == b"x"
        for call in (lambda: client.request("open"), lambda: client.inbox("x"), client.answer_proofs):
            with pytest.raises(InvalidKey, match=r"PID namespace.*--pid=host") as caught:
                call()
            assert caught.value.reason is ViolationReason.UNPROVEN_IDENTITY
        client.fence()  # the server has no reason to disconnect it


def test_server_in_a_user_namespace_without_a_mapping(bus: StartBus) -> None:
    """A server whose user namespace has no ID for the client's user sees the overflow UID."""
    need(USER)
    name, errors = whoami(bus("--mode=0777", before=[*USER]))
    assert re.fullmatch(r"!/cred/65534/65534/\d+", name)
    assert "--userns=host" in errors


def mount(kind: str, directory: Path) -> str:
    """Return a command for a shell that waits, in a mount namespace of its own, with something of ours mounted."""
    return f"mount --bind {directory}/shared{kind} {directory}/inside{kind} && echo ready && read line && "


@pytest.mark.parametrize(("kind", "expected"), [("", "!/cred/"), ("/bus", "Connection refused")])
def test_a_mounted_directory_outlives_the_server(
    directory: Path, spawn: Callable[..., Any], as_root: None, kind: str, expected: str
) -> None:
    """With the directory mounted, a container reaches the next server; with the socket, it does not."""
    need(MOUNT)
    (directory / "shared").mkdir()
    (directory / "inside").mkdir()
    if kind:
        (directory / "inside" / "bus").touch()
    first = spawn(Bus, directory / "shared").wait_started()
    script = mount(kind, directory) + f"exec {' '.join(command('sbus'))} -s {directory}/inside/bus whoami"
    with subprocess.Popen(
        [*MOUNT, "sh", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
    ) as container:
        assert container.stdout is not None
        line = container.stdout.readline()
        if line != "ready\n":
            container.kill()
            pytest.skip(f"mount(8) is not permitted here: {line}")
        first.stop()
        spawn(Bus, directory / "shared").wait_started()
        output, _ = container.communicate("go\n", timeout=TIMEOUT)
    assert expected in output


def test_the_page_has_the_words() -> None:
    """The page shows the explanation that users see."""
    text = " ".join((ROOT / "docs" / "containers.rst").read_text().split())
    assert "this name is not yours alone, so secret keys are refused: the server knows this process as" in text
