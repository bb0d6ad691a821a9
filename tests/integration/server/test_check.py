"""``twistd sbus --check``: it says what the bus would do, or what keeps it from starting, and leaves nothing behind."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.harness import Bus, run, twistd


def check(
    directory: Path, *options: str, own: tuple[str, ...] = (), env: Mapping[str, str | None] | None = None
) -> tuple[int, str, str]:
    """Run the check in a directory; return its status, and what it printed on standard output and standard error.

    :param own: options of ``twistd`` itself.
    :param env: changes of the environment.
    """
    done = run([*twistd(), *own, "sbus", "--check", *options], directory, env=env)
    return done.returncode, done.stdout, done.stderr


def test_what_the_bus_would_do(directory: Path):
    """A line for each socket, the sidecars and the limits; status 0; no file, no socket, no process."""
    pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'sbusd[recorder]'")
    status, said, errors = check(
        directory,
        f"--socket={directory}/bus",
        "--mode=0770",
        f"--listen=app1={directory}/app1",
        f"--stream=node={directory}/node,mode=0666",
        "--admin=auto",
        f"--record={directory}/new/journal",
        "--record-options=--keep-days=7",
        f"--upstream={directory}/master",
        "--upstream-out=sensors/",
        own=(f"--pidfile={directory}/pid", f"--logfile={directory}/log"),
    )
    lines = said.splitlines()
    assert (status, errors) == (0, "")
    assert lines[:7] == [
        f"socket main: {directory}/bus, mode 0770",
        f"socket app1: {directory}/app1, mode 0700",
        f"stream socket node: {directory}/node, mode 0666",
        f"admin socket: {directory}/bus.admin",
        f"recorder: writes to {directory}/new/journal",
        f"link: to {directory}/master (no server listens there now; the link waits for one)",
        "credentials: kernel",
    ]
    assert lines[7].startswith("limits: 16384 clients, 256 of one user; memory ")
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--mode=99"], "--mode=99: give three octal digits"),
        (["--socket={}/none/bus"], "make the directory {}/none first, or choose another --socket"),
        (["--socket={}/file"], "{}/file exists and is not a socket: remove it yourself"),
        (["--socket={}/file/bus"], "{}/file is not a directory: choose another --socket"),
        (["--group=no-such-group"], "there is no group 'no-such-group'"),
        (["--listen=a={}/a", "--listen=b={}/a"], "the sockets 'a' and 'b' have one address"),
        (["--listen=a={}/none/a"], "--listen=a={}/none/a: cannot listen"),
        (["--admin={}/none/admin"], "--admin: cannot listen on {}/none/admin"),
        (["--socket=systemd"], "systemd passed no socket at all"),
        (["--credentials=nobody"], "there is no credentials policy 'nobody'"),
        (["--user-memory=1"], "--user-memory"),
        (["--upstream={}/master", "--upstream-out=!/"], "--upstream-out=!/"),
        (["--nodaemon"], "twistd's own and stands before the service, as in twistd --nodaemon sbus ("),
    ],
)
def test_what_keeps_it_from_starting(directory: Path, options: list[str], error: str):
    """The first error, with its remedy, in one line; status 1."""
    (directory / "file").write_text("x")
    words = [word.format(directory) for word in options]
    if not any(word.startswith("--socket") for word in words):
        words.append(f"--socket={directory}/bus")
    status, _, errors = check(directory, *words)
    assert status == 1
    assert errors.startswith("sbus: ")
    assert error.format(directory) in errors
    assert len(errors.splitlines()) == 1
    assert [path.name for path in directory.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--record={}/file/journal"], "--record={}/file/journal: {}/file is not a directory"),
        (["--record={}/j", "--record-options=--keep-day=x"], "sbus-recorder: --keep-days=x"),
        (["--record={}/j", "--record-options=--kept-days=7"], "option --kept-days not recognized"),
        (["--record={}/j", "--record-options=--force"], "--force has no effect without a limit"),
    ],
)
def test_the_recorder_is_checked(directory: Path, options: list[str], error: str):
    """The recorder would fail over and over; the check parses its options as the recorder does."""
    pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'sbusd[recorder]'")
    (directory / "file").write_text("x")
    status, _, errors = check(directory, f"--socket={directory}/bus", *(word.format(directory) for word in options))
    assert status == 1
    assert error.format(directory, directory) in errors
    assert not (directory / "j").exists()


def test_the_policy_is_checked(directory: Path):
    """The policy is loaded, with the labels of the sockets; a mistake in it has its file and line."""
    policy = directory / "policy.toml"
    policy.write_text('version = 1\n[[rule]]\nname = "app"\nlisteners = ["app1"]\npublish = ["app1/"]\n')
    options = (f"--socket={directory}/bus", f"--policy={policy}", f"--listen=app1={directory}/app1")
    status, said, errors = check(directory, *options)
    assert (status, errors) == (0, "")
    assert f"policy: {policy}: 1 rule, default allow" in said.splitlines()
    status, _, errors = check(directory, *options[:2])
    assert status == 1
    assert f"{policy}:4: " in errors


def test_a_plugin_that_fails(directory: Path):
    """A credentials plug-in is made, as at a start; what it raises is the error."""
    plugins = directory / "packages" / "twisted" / "plugins"
    plugins.mkdir(parents=True)
    (plugins / "third.py").write_text(
        "from twisted.plugin import IPlugin\nfrom zope.interface import implementer\n"
        "from sbus.interfaces import ICredentialsPolicy\n"
        "@implementer(IPlugin, ICredentialsPolicy)\nclass Third:\n"
        "    name = 'third'\n    description = 'fails'\n"
        "    def make(self, access):\n        raise RuntimeError('no database')\n"
        "third = Third()\n"
    )
    path = os.pathsep.join([str(directory / "packages"), os.environ.get("PYTHONPATH", "")])
    env = {"PYTHONPATH": path.rstrip(os.pathsep), "PYTHONDONTWRITEBYTECODE": "1"}
    status, _, errors = check(directory, f"--socket={directory}/bus", "--credentials=third", env=env)
    assert status == 1
    assert "sbus: --credentials=third: the plug-in failed with RuntimeError('no database')" in errors


def test_a_bus_that_runs(directory: Path, spawn):
    """A running bus is no error: the operator checks options before a restart. The bus notices nothing."""
    bus = spawn(Bus, directory).wait_started()
    status, said, errors = check(directory, f"--socket={directory}/bus")
    assert (status, errors) == (0, "")
    assert said.splitlines()[0].endswith("(a server listens there now; stop it before this one starts)")
    bus.client().echo()


def test_a_process_of_the_pid_file_that_runs(directory: Path):
    """The pid file of a bus that runs is no error either, and stays as it is; one in no directory is an error."""
    file = directory / "pid"
    file.write_text(f"{os.getpid()}\n")
    assert check(directory, f"--socket={directory}/bus", own=(f"--pidfile={file}",))[0] == 0
    assert file.read_text() == f"{os.getpid()}\n"
    status, _, errors = check(directory, f"--socket={directory}/bus", own=(f"--pidfile={directory}/none/pid",))
    assert status == 1
    assert "cannot write the pid file" in errors


def test_a_log_without_a_directory(directory: Path):
    """twistd would fail with a traceback at a log file whose directory is missing."""
    own = (f"--logfile={directory}/none/log",)
    status, _, errors = check(directory, f"--socket={directory}/bus", own=own)
    assert status == 1
    assert errors == f"sbus: {own[0]}: there is no directory {directory}/none: make it first\n"


def test_an_abstract_address_in_use(directory: Path):
    """A server at an abstract address is found, too; a random address is not named, as the next one is another."""
    name = f"@{directory.name}-check"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.bind("\0" + name[1:])
        sock.listen()
        assert "a server listens there now" in check(directory, f"--socket={name}")[1]
    assert check(directory, f"--socket={name}")[1].splitlines()[0] == f"socket main: {name}"
    assert "socket main: a random abstract address\n" in check(directory, "--socket=/dev/unix/abstract")[1]
