"""Pid files: which are stale, and that no two daemons have one."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from sbus.daemon.pid_file import PidFile
from sbus.errors import UsageError

LONG_AGO = 1_000_000_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pid"


def test_life(path: Path) -> None:
    """The file has the process's ID while it runs, and is removed then."""
    file = PidFile(str(path))
    file.check()
    assert not path.exists()
    file.write()
    assert path.read_text() == f"{os.getpid()}\n"
    assert stat.S_IMODE(path.stat().st_mode) & 0o022 == 0
    file.remove()
    file.remove()
    assert not path.exists()


@pytest.mark.parametrize("replace", [True, False])
def test_one_at_a_time(path: Path, replace: bool) -> None:
    """A file that is locked is refused, whatever number is in it: it may be that of another PID namespace."""
    with path.open("w") as held:
        held.write("2147483646\n")
        held.flush()
        fcntl.flock(held, fcntl.LOCK_EX)
        file = PidFile(str(path))
        with pytest.raises(UsageError, match="stop"):
            file.write(replace=replace)
        with pytest.raises(UsageError, match="that of process 2147483646, which runs: stop that first"):
            file.check()
    assert path.read_text() == "2147483646\n"


@pytest.mark.parametrize("text", ["", "\n", "2147483646\n", "self", "reused"])
def test_stale(path: Path, text: str) -> None:
    """An empty file is stale, and that of a process that ended, of this one (PID 1 of a container) or a later one."""
    path.write_text({"self": f"{os.getpid()}\n", "reused": f"{os.getppid()}\n"}.get(text, text))
    if text == "reused":
        os.utime(path, (LONG_AGO, LONG_AGO))
    file = PidFile(str(path))
    file.check()
    file.write()
    assert path.read_text() == f"{os.getpid()}\n"
    file.remove()
    assert not path.exists()


def test_a_process_that_does_not_lock(path: Path) -> None:
    """The file of a process that runs, and was started before it was written, is refused, though nobody locks it."""
    path.write_text(f"{os.getppid()}")
    with pytest.raises(UsageError, match=f"process {os.getppid()}, which runs"):
        PidFile(str(path)).check()


def test_a_process_that_nobody_has_reaped(path: Path) -> None:
    """A process that has ended does not run, even if its parent has not noticed."""
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        path.write_text(f"{child.pid}")
        PidFile(str(path)).check()


@pytest.mark.parametrize("kind", ["text", "directory", "pipe", "link"])
def test_other_files(path: Path, kind: str) -> None:
    """What is no pid file is never overwritten."""
    if kind == "text":
        path.write_text("my notes")
    elif kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("elsewhere")
    before = path.lstat()
    for action in (PidFile(str(path)).check, PidFile(str(path)).write):
        with pytest.raises(UsageError, match="pid"):
            action()
    assert path.lstat() == before


@pytest.mark.parametrize("name", ["missing/pid", "file/pid"])
def test_no_place(tmp_path: Path, name: str) -> None:
    """A place where no file can be is named with the remedy, before anything runs."""
    (tmp_path / "file").touch()
    for action in (PidFile(f"{tmp_path}/{name}").check, PidFile(f"{tmp_path}/{name}").write):
        with pytest.raises(UsageError, match=r"cannot write the pid file .*: choose another path \(--pidfile\)"):
            action()


def test_exclusively(path: Path) -> None:
    """Without replacing, a file that exists is refused, stale or not."""
    path.touch()
    with pytest.raises(UsageError, match="exists: stop the process that it names"):
        PidFile(str(path)).write(replace=False)


def test_another_file_in_its_place(path: Path) -> None:
    """A file that has replaced it is not removed."""
    file = PidFile(str(path))
    file.write()
    path.unlink()
    path.write_text("1")
    file.remove()
    assert path.read_text() == "1"


def test_cannot_be_removed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that the process may not remove any more, as without root's rights, is left empty, which is stale."""
    file = PidFile(str(path))
    file.write()

    def refuse(_path: str) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "unlink", refuse)
    file.remove()
    monkeypatch.undo()
    assert path.read_text() == ""
    PidFile(str(path)).check()
