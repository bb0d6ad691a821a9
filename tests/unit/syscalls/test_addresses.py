"""Addresses: how they are written, and sockets that listen and connect there; each failure names its remedy."""

from __future__ import annotations

import array
import contextlib
import grp
import os
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbus.errors import AddressError, ListenError
from sbus.syscalls.addresses import Address, connect, default_address, parse
from sbus.syscalls.listening import listen, rehearse
from sbus.syscalls.sockets import is_unix
from tests.unit.syscalls.addressing import NOBODY, as_user, fill_backlog, mode, needs_root, on, stale, talk

pytestmark = pytest.mark.usefixtures("no_leaks")


# --- how an address is written --------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["/run/sbus.sock", "relative", "./a b", "/dev/fd/x", "/dev/unix/abstractly", "systemdx"]
)
def test_paths(text):
    """Text that looks like no other kind of address is a path."""
    address = parse(text)
    assert address == Address(text, os.fsencode(text))
    assert address.is_path
    assert not address.is_abstract


def test_path_of_any_bytes():
    """The bytes of a path need not be text in any encoding."""
    assert parse(os.fsdecode(b"/tmp/\xff\xfe")).name == b"/tmp/\xff\xfe"


@pytest.mark.parametrize(("length", "good"), [(107, True), (108, False), (5000, False)])
def test_length_of_a_path(length, good):
    """A path has at most 107 bytes, not characters."""
    for text in ("/" + "a" * (length - 1), "/ä" + "a" * (length - 3)):
        assert len(os.fsencode(text)) == length
        if good:
            assert parse(text).is_path
        else:
            with pytest.raises(AddressError, match=f"{length} bytes, but a socket's has at most 107"):
                parse(text)


@pytest.mark.parametrize("text", ["", "a\0b", "/run/x\0"])
def test_no_address(text):
    """An address is not empty and has no NUL."""
    with pytest.raises(AddressError, match="give a path, or @name"):
        parse(text)


def test_abstract_name():
    """@name is the abstract address of exactly this name, without padding."""
    address = parse("@name")
    assert address == Address("@name", b"\0name")
    assert address.is_abstract
    assert not address.is_path
    assert parse("@n").name == b"\0n"
    assert parse("@" + "n" * 107).name == b"\0" + b"n" * 107
    for text in ("@", "@" + "n" * 108):
        with pytest.raises(AddressError, match="1 to 107 bytes"):
            parse(text)


@pytest.mark.parametrize(
    ("digits", "name"),
    [
        ("00", b""),
        ("0061", b"\0a"),
        ("61", b"\0a"),
        ("6100FF", b"\0a\0\xff"),
        ("00" + "ab" * 107, b"\0" + b"\xab" * 107),
        ("ab" * 107, b"\0" + b"\xab" * 107),
    ],
)
def test_hexadecimal_abstract_address(digits, name):
    """Hexadecimal digits are the whole sun_path, padded with NULs; the first NUL may be left out."""
    address = parse(f"/dev/unix/abstract/{digits}")
    assert address.name == name.ljust(108, b"\0")
    assert address.is_abstract
    assert parse(address.text) == address


@pytest.mark.parametrize("digits", ["", "0", "000", "0g", "00 ", "é0", "00" * 109, "ab" * 108, "00/00", "٠٠"])
def test_bad_hexadecimal(digits):
    """Anything but an even number of digits that fit is refused."""
    with pytest.raises(AddressError, match=r"hexadecimal digits, an even number and at most 216|at most 107 bytes"):
        parse(f"/dev/unix/abstract/{digits}")


def test_random_abstract_address():
    """Each random address is different, and its text can be passed on."""
    one, other = parse("/dev/unix/abstract"), parse("/dev/unix/abstract")
    assert one.is_abstract
    assert len(one.name) == 108
    assert one.name != other.name
    assert any(parse("/dev/unix/abstract").name[-1] for _ in range(16))  # random to the last byte
    assert parse(one.text) == one


def test_descriptors_and_systemd():
    """An inherited descriptor has a number, a systemd socket a name or none; neither is a name for the kernel."""
    assert parse("/dev/fd/3") == Address("/dev/fd/3", descriptor=3)
    assert parse("systemd") == Address("systemd", systemd="")
    assert parse("systemd:bus") == Address("systemd:bus", systemd="bus")
    for text in ("/dev/fd/3", "systemd"):
        assert not parse(text).is_path
        assert not parse(text).is_abstract
        with pytest.raises(AddressError, match="give a path or @name"):
            connect(parse(text))


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=120))
def test_text_says_it_all(text):
    """Any text is an address or refused as one; an address's text means the same again."""
    try:
        address = parse(text)
    except AddressError:
        return
    assert parse(address.text) == address or address.text.startswith("/dev/unix/abstract")


def test_default_address():
    """The bus of root is in /run, that of any other user in the user's run-time directory."""
    assert default_address({}, 0) == "/run/sbus.sock"
    assert default_address({"XDG_RUNTIME_DIR": "/run/user/7"}, 0) == "/run/sbus.sock"
    assert default_address({"XDG_RUNTIME_DIR": "/run/user/7"}, 7) == "/run/user/7/sbus.sock"
    for environ in ({}, {"XDG_RUNTIME_DIR": ""}):
        with pytest.raises(AddressError, match=r"XDG_RUNTIME_DIR is not set: .*--socket="):
            default_address(environ, 7)


# --- listening and connecting ---------------------------------------------------------------------


def test_listen_and_connect(path):
    """A client can connect to a listening socket; closing it removes the path, and closing again changes nothing."""
    with on(path) as bound, contextlib.closing(connect(parse(str(path)))) as client:
        server, _ = bound.sock.accept()
        with server:
            server.send(b"packet")
            assert client.recv(100) == b"packet"
        for sock in (bound.sock, client):
            assert is_unix(sock)
            assert not sock.getblocking()
            assert not sock.get_inheritable()
    assert not os.path.lexists(path)
    Path(path).touch()
    bound.close()
    assert path.exists()


def test_relative_path(directory, monkeypatch):
    """A relative path is removed where it was made, even if the process has changed its directory."""
    monkeypatch.chdir(directory)
    bound = listen(parse("socket"))
    monkeypatch.chdir("/")
    bound.close()
    assert os.listdir(directory) == []


@pytest.mark.parametrize("text", ["@sbus-test-{}", "/dev/unix/abstract/00{}", "/dev/unix/abstract"])
def test_abstract(text):
    """Abstract addresses work alike, and are free again when the socket is closed."""
    address = parse(text.format(os.urandom(8).hex()))
    for _ in range(2):
        with contextlib.closing(listen(address)) as bound:
            assert bound.sock.getsockname() == address.name
            assert talk(address)
            with pytest.raises(ListenError, match="another server is running there: stop that one"):
                listen(address)
        assert not talk(address)


def test_abstract_names_are_exact():
    """A padded name and an unpadded one are two addresses."""
    name = os.urandom(8).hex()
    with contextlib.closing(listen(parse(f"@{name}"))):
        assert talk(parse(f"@{name}"))
        assert not talk(parse("/dev/unix/abstract/00" + name.encode().hex()))


def test_connect_to_nobody(directory, path):
    """If no server listens, connect raises the kernel's error, and leaves nothing open."""
    with pytest.raises(FileNotFoundError):
        connect(parse(str(path)))
    stale(path)
    with pytest.raises(ConnectionRefusedError):
        connect(parse(str(path)))


def test_full_backlog(path):
    """A server whose backlog is full is alive, and the client has to try again."""
    with on(path, backlog=0) as bound, contextlib.ExitStack() as stack:
        fill_backlog(bound, stack)
        with pytest.raises(BlockingIOError):
            connect(bound.address)


def test_descriptors_are_refused(path):
    """Descriptors sent along never arrive: the kernel refuses them to the sender, or drops them."""
    with on(path) as bound, contextlib.closing(connect(parse(str(path)))) as client:
        server, _ = bound.sock.accept()
        with server, open(os.devnull, "rb") as file:
            control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file.fileno()]))]
            try:
                client.sendmsg([b"packet"], control)
            except PermissionError:
                return
            assert server.recvmsg(100)[0] == b"packet"


# --- permissions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0, 0o022, 0o777])
@pytest.mark.parametrize("wanted", [0, 0o600, 0o700, 0o770, 0o777])
def test_mode(path, wanted, umask):
    """The path gets exactly the requested mode, whatever the umask is; the umask does not change."""
    before = os.umask(umask)
    try:
        with on(path, mode=wanted):
            assert mode(path) == wanted
        assert os.umask(umask) == umask
    finally:
        os.umask(before)


def test_default_mode(path):
    """Without a mode only the owner can connect."""
    with on(path):
        assert mode(path) == 0o700


def test_never_more_than_the_mode(path, monkeypatch):
    """The path has no permissions from its first moment until it has its group."""
    seen = []
    real_chown, real_chmod = os.chown, os.chmod

    def chown(name, *args):
        seen.append(("chown", mode(name)))
        real_chown(name, *args)

    def chmod(name, wanted):
        seen.append(("chmod", mode(name)))
        real_chmod(name, wanted)

    monkeypatch.setattr(os, "chown", chown)
    monkeypatch.setattr(os, "chmod", chmod)
    before = os.umask(0)
    try:
        with on(path, mode=0o777, group=os.getegid()):
            assert seen == [("chown", 0), ("chmod", 0)]
    finally:
        os.umask(before)


def test_nobody_is_served_before_the_mode_is_set(path, monkeypatch):
    """While the path gets its mode no client can connect, not even root."""
    real_chmod = os.chmod

    def chmod(name, wanted):
        real_chmod(name, wanted)
        assert not talk(parse(str(path)))

    monkeypatch.setattr(os, "chmod", chmod)
    with on(path):
        assert talk(parse(str(path)))


def test_group(path):
    """The path is given to a group by number or by name."""
    gid = os.getegid()
    groups = [gid] if os.geteuid() else [gid, 12_345]
    for number in (*groups, str(gid)):
        with on(path, group=number, mode=0o770):
            assert os.lstat(path).st_gid == int(str(number))
            assert mode(path) == 0o770
    with on(path, group=grp.getgrgid(gid).gr_name):
        assert os.lstat(path).st_gid == gid


def test_unknown_group(path):
    """A group that does not exist is named, and nothing is left behind."""
    with pytest.raises(ListenError, match=r"there is no group 'no-such-group': name one that `getent group` lists"):
        listen(parse(str(path)), group="no-such-group")
    for name in ("²", "1" * 5000):  # `int` takes 4,300 digits
        with pytest.raises(ListenError, match=f"there is no group '{name}'"):
            listen(parse(str(path)), group=name)
    for number in (2**32 - 1, "4294967295", 99_999_999_999, -1):
        with pytest.raises(ListenError, match="is not a group: a GID is less than"):
            listen(parse(str(path)), group=number)
    assert not os.path.lexists(path)


@needs_root
def test_foreign_group(directory, path):
    """The kernel refuses a group of which the user is not a member; the error says what to choose instead."""
    directory.chmod(0o777)
    with as_user(NOBODY), pytest.raises(ListenError, match=r"only a member of the group .*: choose another --group"):
        listen(parse(str(path)), group=12_345)
    assert os.listdir(directory) == []


# --- a rehearsal ----------------------------------------------------------------------------------


def test_rehearsal_changes_nothing(directory):
    """A rehearsal makes no file, and leaves a socket that a server has left where it is."""
    address = parse(str(directory / "bus"))
    assert not rehearse(address)
    assert list(directory.iterdir()) == []
    inode = stale(directory / "bus")
    assert not rehearse(address)
    assert os.lstat(directory / "bus").st_ino == inode


@needs_root
def test_rehearsal_as_another_user(directory):
    """Without rights a rehearsal fails as the start would: for the directory, and for the group."""
    address = parse(str(directory / "bus"))
    with as_user(12001), pytest.raises(ListenError, match="you may not make a socket in"):
        rehearse(address)
    os.chown(directory, 12001, -1)
    with as_user(12001):
        assert not rehearse(address)
        with pytest.raises(ListenError, match="only a member of the group"):
            rehearse(address, group=54321)
