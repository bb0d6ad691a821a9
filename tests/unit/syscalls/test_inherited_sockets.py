"""Sockets that another program has opened for this one."""

from __future__ import annotations

import contextlib
import os
import socket

import pytest

from sbus.errors import ListenError
from sbus.syscalls.addresses import connect, parse
from sbus.syscalls.listening import adopt, inherited_name, listen
from tests.unit.syscalls.addressing import mode, on, seqpacket, talk

pytestmark = pytest.mark.usefixtures("no_leaks")


@contextlib.contextmanager
def inherited(sock):
    """The address of a socket that another process made; `adopt` closes it."""
    fd = sock.detach()
    os.set_inheritable(fd, True)
    yield parse(f"/dev/fd/{fd}")


@pytest.mark.parametrize("is_listening", [True, False])
def test_adopt(path, is_listening):
    """A bound socket is adopted, listening or not; its path and mode stay with the process that made it."""
    sock = seqpacket()
    sock.bind(str(path))
    path.chmod(0o741)
    if is_listening:
        sock.listen()
    with inherited(sock) as address:
        assert inherited_name(address) == os.fsencode(path)
        bound = listen(address, mode=0o777)
        assert bound.address.text == address.text
        assert bound.address.name == os.fsencode(path)
        assert not bound.sock.getblocking()
        assert not bound.sock.get_inheritable()
        assert talk(parse(str(path)))
        bound.close()
    assert mode(path) == 0o741
    assert not talk(parse(str(path)))


def test_adopt_abstract():
    """The name of an inherited abstract socket is known, so that it can be protected like any other."""
    name = b"\0sbus-test-" + os.urandom(8)
    sock = seqpacket()
    sock.bind(name)
    with inherited(sock) as address:
        assert inherited_name(address) == name
        with contextlib.closing(adopt(address)) as bound:
            assert bound.address.name == name
            assert bound.address.is_abstract


def wrong_sockets():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return [
        (seqpacket(), "is not bound to an address: bind it before passing it"),
        (ours, "is not bound to an address"),
        (theirs, "is not bound to an address"),
        (
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM),
            r"not a Unix socket of type SOCK_SEQPACKET: .*ListenSequentialPacket=",
        ),
        (socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM), "not a Unix socket of type SOCK_SEQPACKET"),
        (socket.socket(socket.AF_INET, socket.SOCK_STREAM), "not a Unix socket of type SOCK_SEQPACKET"),
    ]


def test_adopt_refuses_what_it_cannot_use():
    """Another kind of socket, or an unbound one, is refused with a remedy; its owner keeps it, open."""
    for sock, remedy in wrong_sockets():
        with sock:
            address = parse(f"/dev/fd/{sock.fileno()}")
            with pytest.raises(ListenError, match=remedy):
                listen(address)
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 0


def test_adopt_refuses_a_connected_socket(path):
    """A socket that is bound but connected cannot listen."""
    with on(path) as bound, contextlib.closing(connect(parse(str(path)))):
        server, _ = bound.sock.accept()
        with server, pytest.raises(ListenError, match=r"cannot listen \(.*\): pass a socket that is bound"):
            listen(parse(f"/dev/fd/{server.fileno()}"))


def test_adopt_refuses_what_is_no_socket(directory):
    """A closed descriptor, or one of something else, is named; it is left as it is."""
    with open(os.devnull, "rb") as file:
        for function in (listen, adopt, inherited_name):
            with pytest.raises(
                ListenError, match=f"descriptor {file.fileno()} is not an open socket .*have the parent"
            ):
                function(parse(f"/dev/fd/{file.fileno()}"))
        os.fstat(file.fileno())
    with pytest.raises(ListenError, match="descriptor 999999 is not an open socket"):
        listen(parse("/dev/fd/999999"))


def test_inherited_name_of_other_kinds():
    """The name of another kind of socket is not returned."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        with pytest.raises(ListenError, match="not a Unix socket of type SOCK_SEQPACKET"):
            inherited_name(parse(f"/dev/fd/{sock.fileno()}"))
        assert sock.getsockname() == ""


def test_systemd_needs_a_descriptor():
    """Sockets from systemd are adopted by descriptor; listening on their name is refused."""
    with pytest.raises(ListenError, match="handed over as descriptors"):
        listen(parse("systemd:bus"))
