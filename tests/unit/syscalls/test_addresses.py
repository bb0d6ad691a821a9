"""Addresses: how they are written, and sockets that listen and connect there; each failure names its remedy."""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import grp
import os
import resource
import shutil
import socket
import stat
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbus.errors import AddressError, ListenError
from sbus.syscalls import listening
from sbus.syscalls.addresses import Address, connect, default_address, parse
from sbus.syscalls.listening import adopt, inherited_name, listen, rehearse
from sbus.syscalls.sockets import is_unix
from tests.support.descriptors import descriptors

NOBODY = 65_534


@pytest.fixture
def directory():
    """A directory with a short name (a socket's path has 107 bytes at most) that other users can enter."""
    path = Path(tempfile.mkdtemp(prefix="sbus-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def path(directory):
    return directory / "socket"


@pytest.fixture(autouse=True)
def _no_leaks():
    """No test leaves a descriptor open."""
    before = descriptors()
    yield
    assert not descriptors().items() - before.items()


def on(path, **kwargs):
    """Listen on a path, for use with `closing`."""
    return contextlib.closing(listen(parse(str(path)), **kwargs))


def seqpacket():
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def talk(address):
    """Return whether a client can connect to the address right now."""
    try:
        connect(address).close()
    except OSError:
        return False
    return True


def stale(path):
    """A socket as a killed server leaves it."""
    with seqpacket() as sock:
        sock.bind(str(path))
        sock.listen()
    return os.lstat(path).st_ino


def mode(path):
    return stat.S_IMODE(os.lstat(path).st_mode)


@contextlib.contextmanager
def as_user(uid):
    """Act as another user for a while, without any capability; only root can."""
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


# --- how an address is written -----------------------------------------------------------------------------------


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


# --- listening and connecting ------------------------------------------------------------------------------------


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


def fill_backlog(bound, stack):
    """Connect until the server's backlog is full."""
    with contextlib.suppress(BlockingIOError):
        for _ in range(100):
            stack.enter_context(connect(bound.address))


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


# --- permissions -------------------------------------------------------------------------------------------------


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


# --- what stands in the way --------------------------------------------------------------------------------------


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


# --- what else can be wrong --------------------------------------------------------------------------------------


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


# --- inherited sockets -------------------------------------------------------------------------------------------


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


# --- a rehearsal ---------------------------------------------------------------------------------------------------


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
