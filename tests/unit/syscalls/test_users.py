"""The users whom a process trusts as itself, in user namespaces of the kernel."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from sbus.admin.access import Access
from sbus.syscalls import users
from sbus.syscalls.sockets import overflow_ids
from sbus.syscalls.users import has_own_user, is_own_user, is_owner

_CLONE_NEWUSER = 0x10000000
_SOME, _ALL = "0 100000 65536\n", "0 0 4294967295\n"
OVERFLOW = overflow_ids()[0]


def in_namespace(mapping: str, uid: int, call: Callable[[], bool], meanwhile: Callable[[], object] = int) -> bool:
    """Return what a call returns in a new user namespace, as one of its users.

    :param meanwhile: called in this process once that user is there.
    """
    (is_there, tell), (may_go_on, let) = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        code = 3
        try:
            if ctypes.CDLL(None).unshare(_CLONE_NEWUSER):
                code = 2
            else:
                os.write(tell, b"1")
                os.read(may_go_on, 1)
                os.setresuid(uid, uid, uid)
                users._shared_uid.cache_clear()
                os.write(tell, b"2")
                code = int(call())
        finally:
            os._exit(code)
    os.close(tell)
    if os.read(is_there, 1):
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{pid}/{name}").write_text(mapping)
        os.write(let, b"1")
        if os.read(is_there, 1):
            meanwhile()
    for descriptor in (is_there, may_go_on, let):
        os.close(descriptor)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == 2:
        pytest.skip("no user namespace can be made here")
    assert code in (0, 1)
    return bool(code)


def test_own_user() -> None:
    """Root and the process's own user are the owners, and nobody else is."""
    me = os.geteuid()
    assert has_own_user()
    assert is_own_user(me)
    assert is_owner(0)
    assert is_owner(me)
    assert not is_own_user(me + 1)
    assert not is_owner(me + 1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may map any users")
@pytest.mark.parametrize(
    ("mapping", "uid", "expected"), [(_SOME, 1000, True), (_ALL, OVERFLOW, True), (_SOME, OVERFLOW, False)]
)
def test_the_overflow_uid_proves_nothing_where_it_is_shared(mapping: str, uid: int, expected: bool) -> None:
    """A process that runs as it has an own user only in a namespace in which every user has a name."""
    assert in_namespace(mapping, uid, has_own_user) is expected
    assert in_namespace(mapping, uid, lambda: is_owner(uid)) is expected
    assert in_namespace(mapping, uid, lambda: is_owner(0))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may map any users")
def test_a_stranger_is_no_owner_of_a_server_with_the_overflow_uid() -> None:
    """The kernel reports the server's own UID for a user without a mapping, who may ask the admin socket nothing."""
    name = f"\0sbus-test-users-{os.getpid()}"
    server = socket.socket(socket.AF_UNIX)
    with server, socket.socket(socket.AF_UNIX) as client:

        def is_owner_there() -> bool:
            server.bind(name)
            server.listen()
            os.write(writing, b"1")
            accepted, _ = server.accept()
            with accepted:
                found = Access(metrics=12_345).authority(accepted)
            assert found.peer.uid == os.geteuid()
            return found.is_owner or found.is_admin or found.may_read

        def connect() -> None:
            os.close(writing)
            os.read(reading, 1)
            os.close(reading)
            client.connect(name)

        reading, writing = os.pipe()
        assert in_namespace(_SOME, OVERFLOW, is_owner_there, connect) is False
