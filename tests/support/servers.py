"""Fixtures that start the real twistd, stop it by its PID, and show its log if a test fails."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import pytest

from sbus.daemon.launcher import ServerProcess, twistd_command
from sbus.syscalls.socket_directory import new_socket_directory
from tests.support import nursery
from tests.support.harness import OTHER_USER, Bus, Process, can_fork, environment_with, twistd

StartBus = Callable[..., Bus]

_SHOWN = 4_000
_started: list[Process] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: Any = yield
    if report.failed:
        for process in _started:
            report.sections.append((f"end of the output of {' '.join(process.command[1:])}", process.log[-_SHOWN:]))
    return report


def _new_directory() -> Path:
    """A directory with a short name (a socket's path has at most 107 bytes) that other users can enter."""
    directory = Path(new_socket_directory())
    directory.chmod(0o755)
    return directory


class _ForkedServer(ServerProcess):
    """A server that is a fork where it may be."""

    def __init__(self, name: str, command: Sequence[str], output: IO[bytes], *, new_session: bool = False) -> None:
        arguments = command[len(twistd_command("")) - 1 :]
        if not can_fork() or new_session or twistd_command(*arguments) != command:
            super().__init__(name, command, output, new_session=new_session)
            return
        self._name, self._output = name, output
        words = [*twistd()[1:], "--nodaemon", *arguments]
        self._process: Any = nursery.Piped(
            words, ".", environment_with({}), stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )


@pytest.fixture(scope="module", autouse=True)
def forked_servers() -> Iterator[None]:
    """Have forks in the place of the servers that `sbus.testing` starts, but for its own tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sbus.testing.servers.ServerProcess", _ForkedServer)
        yield


@pytest.fixture
def directory() -> Iterator[Path]:
    """An empty directory for a test that other users can enter."""
    directory = _new_directory()
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def spawn() -> Iterator[Callable[..., Any]]:
    """Start a `Process`, or one of its kinds: ``spawn(Bus, directory, '--reuse')``."""
    mine: list[Process] = []

    def start(kind: type[Process], *args: Any, **kwargs: Any) -> Process:
        process = kind(*args, **kwargs)
        mine.append(process)
        _started.append(process)
        return process

    yield start
    for process in mine:
        process.ensure_gone()
        _started.remove(process)


@pytest.fixture
def bus(spawn: Callable[..., Any], directory: Path) -> StartBus:
    """Start a bus and wait until it serves: ``bus('--dialect=early')``; see `Bus`."""

    def start(*options: str, **kwargs: Any) -> Bus:
        started: Bus = spawn(Bus, directory, *options, **kwargs)
        return started.wait_started()

    return start


@pytest.fixture(scope="module")
def module_bus() -> Iterator[StartBus]:
    """Like `bus`, for buses that the tests of a module share. Every test must leave them running."""
    mine: list[tuple[Bus, Path]] = []

    def start(*options: str, **kwargs: Any) -> Bus:
        directory = _new_directory()
        started = Bus(directory, *options, **kwargs)
        mine.append((started, directory))
        _started.append(started)
        return started.wait_started()

    try:
        yield start
        assert all(started.is_running() for started, _ in mine)
    finally:
        for started, directory in mine:
            started.ensure_gone()
            _started.remove(started)
            shutil.rmtree(directory)


@pytest.fixture(scope="module")
def _leased(module_bus: StartBus) -> StartBus:
    buses: dict[Any, Bus] = {}

    def start(*options: str, pure: bool = False) -> Bus:
        if (options, pure) not in buses:
            buses[options, pure] = module_bus(*options, env={"SBUS_PURE": "1"} if pure else {})
        return buses[options, pure]

    return start


@pytest.fixture
def lease(_leased: StartBus) -> Iterator[StartBus]:
    """Like `bus`, but the tests of a module use one bus with the same options, one after the other.

    Each finds it without clients, and as if nothing had been logged yet.
    """
    mine: list[Bus] = []

    def start(*options: str, **kwargs: Any) -> Bus:
        mine.append(_leased(*options, **kwargs).lease())
        return mine[-1]

    yield start
    for bus in mine:
        bus.release()


@pytest.fixture(scope="module")
def shared(module_bus: StartBus) -> Bus:
    """A bus with default options that the tests of a module share."""
    return module_bus()


def _may_become_others() -> bool:
    if os.geteuid() != 0:
        return False
    become = (
        "import os, sys; os.setgroups([]); os.setresgid(*[int(sys.argv[2])] * 3); os.setresuid(*[int(sys.argv[1])] * 3)"
    )
    command = [sys.executable, "-I", "-S", "-c", become, *map(str, OTHER_USER)]
    return subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0


@pytest.fixture(scope="session")
def as_root() -> None:
    """Skip the test unless it runs as root, which tests with several users need."""
    if not _may_become_others():
        pytest.skip("only root can play several users")


@pytest.fixture(scope="session")
def become(as_root: None) -> list[str]:
    """Return a command that runs the command behind it as another user, who can run this interpreter.

    The interpreter may lie where only root may read (in root's home directory), so the command keeps
    the capability to read everything; not the one to write.
    """
    user, group = OTHER_USER
    command = ["setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups"]
    reading = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    for prefix in (command, command + reading):
        try:
            if subprocess.run([*prefix, sys.executable, "-c", "import sbus, twisted"]).returncode == 0:
                return prefix
        except FileNotFoundError:
            break
    pytest.skip("another user cannot run this interpreter")
