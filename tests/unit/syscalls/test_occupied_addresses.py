"""Addresses where something is already, or cannot be: each failure names its remedy."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import socket
import time

import pytest

from sbus.errors import ListenError
from sbus.syscalls import listening
from sbus.syscalls.addresses import parse
from sbus.syscalls.listening import listen
from tests.unit.syscalls.addressing import NOBODY, as_user, fill_backlog, needs_root, on, stale, talk

pytestmark = pytest.mark.usefixtures("no_leaks")


# --- what stands in the way -----------------------------------------------------------------------


def test_live_socket(path):
    """A path on which a server listens is never replaced, not even with reuse; that server is not disturbed."""
    with on(path) as bound:
        inode = os.lstat(path).st_ino
        for reuse in (True, False):
            with pytest.raises(ListenError, match="in use by a server that is running: stop that one"):
                listen(parse(str(path)), reuse=reuse)
        assert os.lstat(path).st_ino == inode
        assert talk(bound.address)


def test_live_socket_with_a_full_backlog(path):
    """A server that does not accept in time is alive."""
    with on(path, backlog=0) as bound, contextlib.ExitStack() as stack:
        fill_backlog(bound, stack)
        with pytest.raises(ListenError, match="in use by a server that is running"):
            listen(parse(str(path)), reuse=True)
        assert path.exists()


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_live_socket_of_another_kind(path, kind):
    """A server of another kind is alive as well."""
    with socket.socket(socket.AF_UNIX, kind) as sock:
        sock.bind(str(path))
        if kind == socket.SOCK_STREAM:
            sock.listen()
        with pytest.raises(ListenError, match="in use by a server that is running"):
            listen(parse(str(path)), reuse=True)
        assert path.exists()


def test_stale_socket(path):
    """A path that a dead server left is replaced on request; otherwise the error says how to request it."""
    inode = stale(path)
    with pytest.raises(ListenError, match="left over from a server that is gone: start with --reuse"):
        listen(parse(str(path)))
    assert os.lstat(path).st_ino == inode
    with on(path, reuse=True) as bound:
        assert talk(bound.address)
    assert not os.path.lexists(path)


def test_reuse_of_nothing(path):
    """Requesting reuse if nothing is in the way is not an error."""
    with on(path, reuse=True) as bound:
        assert talk(bound.address)


@pytest.mark.parametrize(
    "kind", ["file", "empty", "directory", "fifo", "link to a file", "link to a socket", "dangling"]
)
def test_not_a_socket(directory, path, kind):
    """Nothing but a socket is ever replaced, and no link is followed."""
    other = directory / "other"
    if kind == "file":
        path.write_text("precious")
    elif kind == "empty":
        path.touch()
    elif kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        if kind == "link to a file":
            other.write_text("precious")
        elif kind == "link to a socket":
            stale(other)
        path.symlink_to(other)
    before = os.lstat(path), sorted(os.listdir(directory))
    with pytest.raises(ListenError, match="exists and is not a socket: remove it yourself"):
        listen(parse(str(path)), reuse=True)
    assert (os.lstat(path), sorted(os.listdir(directory))) == before


def test_replace_empty(path):
    """An empty file is replaced on request; a file with content, or a stale socket, is not."""
    path.touch()
    with on(path, replace_empty=True) as bound:
        assert talk(bound.address)
    path.write_text("precious")
    with pytest.raises(ListenError, match="not a socket"):
        listen(parse(str(path)), replace_empty=True)
    path.unlink()
    stale(path)
    with pytest.raises(ListenError, match="start with --reuse"):
        listen(parse(str(path)), replace_empty=True)


def test_close_leaves_what_is_not_ours(path):
    """If another file was put at the path meanwhile, it is not removed."""
    bound = listen(parse(str(path)))
    path.unlink()
    with on(path) as other:
        bound.close()
        assert talk(other.address)
    bound = listen(parse(str(path)))
    path.unlink()
    path.write_text("precious")
    bound.close()
    assert path.read_text() == "precious"
    path.unlink()
    bound = listen(parse(str(path)))
    path.unlink()
    bound.close()


def test_two_servers_at_once(directory, path, monkeypatch):
    """The directory is locked until the socket listens, as before that it looks like a stale one."""
    real_lock = listening._directory_lock
    locked = []

    @contextlib.contextmanager
    def lock(name):
        with real_lock(name):
            assert os.fsdecode(name) == str(directory)
            yield
            fd = os.open(directory, os.O_RDONLY)
            try:
                with pytest.raises(BlockingIOError):
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            finally:
                os.close(fd)
            locked.append(talk(parse(str(path))))

    monkeypatch.setattr(listening, "_directory_lock", lock)
    with on(path, reuse=True):
        assert locked == [True]
        fd = os.open(directory, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(fd)


def test_a_lock_that_is_given_back(directory, path, monkeypatch):
    """While another server starts in the directory, listen waits and tries again."""
    fd = os.open(directory, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    naps = []

    def sleep(seconds):
        assert not path.exists()
        naps.append(seconds)
        if len(naps) == 3:
            os.close(fd)

    monkeypatch.setattr(time, "sleep", sleep)
    with on(path) as bound:
        assert talk(bound.address)
    assert len(naps) == 3
    assert max(naps) < 0.1


def test_a_lock_that_is_not_given_back(directory, path, monkeypatch):
    """A process that never gives back the directory's lock does not keep a server from listening."""
    now = 0.0

    def sleep(seconds):
        nonlocal now
        now += seconds

    fd = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        with monkeypatch.context() as patch:
            patch.setattr(time, "monotonic", lambda: now)
            patch.setattr(time, "sleep", sleep)
            bound = listen(parse(str(path)))
        with contextlib.closing(bound):
            assert talk(bound.address)
        assert 1 <= now < 1.1
    finally:
        os.close(fd)


# --- what else can be wrong -----------------------------------------------------------------------


def test_missing_directory(directory):
    """A directory that is not there is named."""
    with pytest.raises(ListenError, match=f"make the directory {directory}/missing first, or choose another --socket"):
        listen(parse(str(directory / "missing/socket")))


def test_directory_that_is_none(directory, path):
    """A file where a directory should be is named."""
    path.touch()
    with pytest.raises(ListenError, match=f"{path} is not a directory: choose another --socket"):
        listen(parse(f"{path}/socket"))


@pytest.mark.parametrize("directory_mode", [0o555, 0o600, 0o000])
def test_no_permission(directory, path, directory_mode):
    """A directory without write permission is named."""
    directory.chmod(directory_mode)
    user = as_user(NOBODY) if os.geteuid() == 0 else contextlib.nullcontext()
    with user, pytest.raises(ListenError, match=f"you may not make a socket in {directory}: choose another --socket"):
        listen(parse(str(path)))
    directory.chmod(0o755)


@needs_root
def test_directory_that_cannot_be_read(directory, path):
    """A directory with write but without read permission serves as well."""
    directory.chmod(0o733)
    with as_user(NOBODY), on(path) as bound:
        assert talk(bound.address)
    assert os.listdir(directory) == []


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (errno.EROFS, "is read-only: choose another --socket"),
        (errno.ENOSPC, "is full: make room, or choose another --socket"),
        (errno.EIO, "Input/output error: choose another --socket"),
    ],
)
def test_other_errors(directory, path, monkeypatch, error, remedy):
    """Any other error of the system is reported with a remedy, and nothing is left behind."""

    def chmod(*args):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "chmod", chmod)
    with pytest.raises(ListenError, match=remedy) as caught:
        listen(parse(str(path)))
    assert os.strerror(error) in str(caught.value)
    assert "\n" not in str(caught.value)
    monkeypatch.undo()
    assert os.listdir(directory) == []


def test_no_descriptors_left(path):
    """Without a free descriptor for the socket the error says what to raise."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        with contextlib.suppress(OSError):
            while True:
                stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        with pytest.raises(ListenError, match=r"raise the limit of open files \(ulimit -n\)"):
            listen(parse(str(path)))
    assert not os.path.lexists(path)
