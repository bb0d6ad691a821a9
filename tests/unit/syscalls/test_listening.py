"""A listening socket in a hostile directory: whatever takes the path's place stays as it is."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading

import pytest

from sbus.errors import ListenError
from sbus.syscalls import addresses, listening
from tests.support.harness import OTHER_USER


@pytest.fixture
def victim(tmp_path):
    """A file of the server's user that a hostile link leads to."""
    path = tmp_path / "victim"
    path.write_text("secret")
    path.chmod(0o600)
    return path


def state(path):
    found = os.stat(path)
    return stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid


def swap(path, victim, aside):
    """Put a link to the victim in the place of the path."""
    os.rename(path, aside)
    os.symlink(victim, path)


def test_link_after_bind(monkeypatch, tmp_path, victim):
    """A link that replaces the socket as soon as it is bound is refused, and its target stays as it was."""
    path = tmp_path / "bus"

    class Socket(socket.socket):
        def bind(self, address):
            super().bind(address)
            swap(path, victim, tmp_path / "aside")

    before = state(victim)
    monkeypatch.setattr(socket, "socket", Socket)
    with pytest.raises(ListenError, match="replaced by another process"):
        listening.listen(addresses.parse(str(path)), mode=0o777)
    assert state(victim) == before
    assert path.is_symlink()  # what another process has put there is not removed


def test_link_after_check(monkeypatch, tmp_path, victim):
    """A link that replaces the socket after the check changes nothing: the socket itself gets its group and mode."""
    path, aside = tmp_path / "bus", tmp_path / "aside"

    def gid(group):
        swap(path, victim, aside)
        return group

    before = state(victim)
    monkeypatch.setattr(listening, "_gid", gid)
    bound = listening.listen(addresses.parse(str(path)), mode=0o770, group=os.getgid())
    assert state(victim) == before
    assert state(aside)[0] == 0o770
    bound.close()
    assert path.is_symlink()


def test_owner_of_a_replaced_path(tmp_path, victim):
    """The owner is changed of the socket that was bound, and of nothing else."""
    path = tmp_path / "bus"
    bound = listening.listen(addresses.parse(str(path)))
    bound.give_to(os.getuid())
    swap(path, victim, tmp_path / "aside")
    with pytest.raises(ListenError, match="replaced by another process"):
        bound.give_to(os.getuid())
    bound.close()


def test_directory_of_another_user(as_root, tmp_path, victim):
    """The owner of the directory swaps the path all the time; no file of the server's ever changes."""
    directory = tmp_path / "hostile"
    directory.mkdir()
    os.chown(directory, *OTHER_USER)
    path, aside = directory / "bus", directory / "aside"
    before = state(victim)
    is_over = threading.Event()

    def attack():
        while not is_over.is_set():
            with contextlib.suppress(OSError):
                swap(path, victim, aside)
            with contextlib.suppress(OSError):
                os.unlink(path)

    attacker = threading.Thread(target=attack)
    attacker.start()
    try:
        for _ in range(500):
            with contextlib.suppress(ListenError):
                listening.listen(addresses.parse(str(path)), mode=0o777, group=OTHER_USER[1], reuse=True).close()
            assert state(victim) == before
    finally:
        is_over.set()
        attacker.join()
