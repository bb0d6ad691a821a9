"""Labelled sockets: what ``--listen`` and systemd may say, and whom a socket admits."""

from __future__ import annotations

import os
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbus.errors import CloseReason, UsageError
from sbus.protocol.keys import PeerCredentials
from sbus.seqpacket.systemd import passed_names
from sbus.server.bus.protocol import BusProtocol
from sbus.server.core.listeners import (
    MAIN,
    Listener,
    ListenOption,
    check_names,
    check_paths,
    parse_listen,
    passed_admin,
    passed_sockets,
)
from sbus.syscalls.addresses import parse
from sbus.testing import FakePacketTransport
from tests.support.buses import Bus

letters = string.ascii_letters + string.digits + "_.-"
names = st.text(letters, min_size=1, max_size=64).filter(lambda name: name != "main")
paths = st.text(string.ascii_letters + "=:@ äx'", min_size=1, max_size=20).map(lambda text: "/run/" + text)
others = st.sampled_from(["@name", "/dev/fd/5", "systemd:app", "/dev/unix/abstract/00ff"])


@st.composite
def options(draw):
    address = parse(draw(st.one_of(paths, others)))
    return ListenOption(
        name=draw(names),
        address=address,
        mode=draw(st.none() | st.integers(0, 0o777)) if address.is_path else None,
        group=draw(st.none() | st.sampled_from(["root", "1000"])) if address.is_path else None,
        users=draw(st.none() | st.frozensets(st.integers(0, 2**32 - 2), min_size=1, max_size=4)),
        max_clients=draw(st.none() | st.integers(1, 10**9 - 1)),
        stream=draw(st.booleans()),
    )


@given(options())
def test_round_trip(option):
    """What an option writes is read as the same option."""
    assert parse_listen(str(option), option.stream) == option
    assert option.text == f"--{'stream' if option.stream else 'listen'}={option}"


@given(st.text(max_size=60) | st.text(string.ascii_lowercase + "=,:@/0", max_size=60).map(lambda text: "app=/" + text))
def test_any_text_is_an_option_or_one_error(text):
    """Whatever is written, it is an option, or an error that quotes it and names the remedy."""
    error = ""
    try:
        option = parse_listen(text)
    except UsageError as e:
        error = str(e)
    assert error.startswith(f"--listen={text}: ") if error else parse_listen(str(option)) == option


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("app", "write NAME=ADDRESS, such as app=/run/sbus/app.sock"),
        ("=/run/x", "a socket cannot be called ''"),
        ("a b=/run/x", "a socket cannot be called 'a b': use letters, digits"),
        ("a" * 65 + "=/run/x", "1 to 64 of them"),
        ("main=/run/x", "main is the name of --socket: choose another name"),
        ("app=", "an address must not be empty"),
        ("app=@", "an abstract name has 1 to 107 bytes"),
        ("app=/run/x,mode=0888", "mode=0888: give three octal digits (0 to 7), such as 770"),
        ("app=/run/x,mode=1777", "give three octal digits"),
        ("app=/run/x,mode=", "mode= has no value: give one, or leave it out"),
        ("app=/run/x,mode=0700,mode=0700", "mode= is there twice"),
        ("app=/run/x,color=red", "'color=red' is no setting: use mode=, group=, users= or max-clients="),
        ("app=/run/x,users", "'users' is no setting"),
        ("app=/run/x,", "'' is no setting"),
        ("app=/run/x,users=1000:", "users=1000: has an empty name"),
        ("app=/run/x,users=nobody-here", "there is no such user 'nobody-here': give a UID, or a name from"),
        ("app=/run/x,users=4294967295", "a UID is less than 2^32 - 1"),
        ("app=/run/x,users=" + "1" * 5000, "a UID is less than 2^32 - 1"),
        ("app=/run/x,max-clients=0", "max-clients=0: give a number of clients above 0"),
        ("app=/run/x,max-clients=-1", "give a number of clients above 0"),
        ("app=@x,mode=0700", "mode= is for a path: leave it out, as @x is none"),
        ("app=systemd:x,group=root", "group= is for a path: leave it out, as systemd:x is none"),
    ],
)
def test_errors_name_the_remedy(text, why):
    """Each mistake has its own error."""
    with pytest.raises(UsageError) as caught:
        parse_listen(text)
    assert why in str(caught.value)


def test_users_by_name_and_number():
    """Users are names or UIDs, and kept as UIDs."""
    assert parse_listen("app=/run/x,users=root:1001").users == frozenset((0, 1001))


def test_names_and_addresses_are_unique(tmp_path):
    """Two sockets of one name, or at one path however it is written, are refused."""
    with pytest.raises(UsageError, match="two sockets are called 'a': give each a name"):
        check_names(["main", "a", "b", "a"])
    check_names(["main", "a", "b"])
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    one, other = parse(f"{tmp_path}/real/bus"), parse(f"{tmp_path}/link/../real/./bus")
    with pytest.raises(UsageError, match=r"the sockets 'main' and 'a' have one address, .*: choose another"):
        check_paths([("main", one), ("a", other)])
    with pytest.raises(UsageError, match="one address"):
        check_paths([("main", parse("@x")), ("a", parse("@x"))])
    check_paths([("main", one), ("a", parse(f"{tmp_path}/real/bus2")), ("b", parse("@x"))])


@pytest.mark.parametrize(
    ("passed", "sockets"),
    [
        ([], [("main", "systemd")]),
        (["anything at all"], [("main", "systemd")]),
        (["app1", "app2"], [("app1", "systemd"), ("app2", "/dev/fd/4")]),
        (["app1", "sbus.socket", "b"], [("main", "/dev/fd/4"), ("app1", "systemd"), ("b", "/dev/fd/5")]),
        (["unknown", "app1"], [("main", "systemd"), ("app1", "/dev/fd/4")]),
        (["", "app1"], [("main", "systemd"), ("app1", "/dev/fd/4")]),
        (["main", "app1"], [("main", "systemd"), ("app1", "/dev/fd/4")]),
    ],
)
def test_sockets_from_systemd(passed, sockets):
    """One socket is main; of several each has its own name, and main is one that has none."""
    assert passed_sockets(passed) == sockets


@pytest.mark.parametrize("passed", [["", ""], ["a", "a"], ["sbus.socket", "main"], ["a b", "c"]])
def test_names_from_systemd_must_be_labels(passed):
    """Names that are no labels, or no longer unique, are refused with the setting to change."""
    with pytest.raises(UsageError, match="FileDescriptorName="):
        passed_sockets(passed)


def test_sockets_that_listen_names_are_taken():
    """A socket that --listen names does not count among those of --socket=systemd."""
    assert passed_sockets(["app", "sbus"], [parse_listen("x=systemd:app,max-clients=3")]) == [("main", "/dev/fd/4")]


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        (b"", ()),
        (b"LISTEN_PID=%d\0LISTEN_FDS=2\0LISTEN_FDNAMES=a:b", ("a", "b")),
        (b"LISTEN_PID=%d\0LISTEN_FDS=2\0LISTEN_FDNAMES=a", ()),
        (b"LISTEN_PID=%d\0LISTEN_FDS=2", ("", "")),
        (b"LISTEN_PID=%d\0LISTEN_FDS=many", ()),
        (b"LISTEN_PID=1%d\0LISTEN_FDS=1", ()),
    ],
)
def test_names_in_the_environment(environ, found):
    """The names are those of this process's sockets, and empty without LISTEN_FDNAMES."""
    assert passed_names(environ.replace(b"%d", b"%d" % os.getpid())) == found


class TestAdmission:
    """Clients at the sockets of one bus."""

    def connect(self, bus, listener, uid=1000, pid=1):
        transport = FakePacketTransport(PeerCredentials(pid, uid, 100), clock=bus.clock)
        protocol = BusProtocol(bus.registry, listener)
        transport.connect(protocol)
        bus.settle()
        return protocol, transport

    def test_users(self):
        """A user that is not on the list is refused, root and the server's own user included."""
        bus = Bus()
        app = Listener("app", users=frozenset((1000,)))
        assert self.connect(bus, app)[1].connected
        for uid in (0, 1001, os.geteuid()):
            protocol, transport = self.connect(bus, app, uid)
            assert not transport.connected
            assert protocol.reason is CloseReason.NOT_ALLOWED
        assert self.connect(bus, MAIN, 1001)[1].connected

    def test_abstract_addresses(self):
        """Without a list, an abstract address admits root and the server's user."""
        listener = Listener("app", is_abstract=True)
        assert listener.admits(PeerCredentials(1, 0, 0))
        assert listener.admits(PeerCredentials(1, os.geteuid(), 0))
        assert not listener.admits(PeerCredentials(1, 1000, 0))
        assert Listener("app", frozenset((1000,)), is_abstract=True).admits(PeerCredentials(1, 1000, 0))

    def test_max_clients(self):
        """A socket has a limit of its own, within that of the bus; who leaves makes room."""
        bus = Bus()
        app = Listener("app", max_clients=2)
        first, _ = [self.connect(bus, app) for _ in range(2)]
        protocol, transport = self.connect(bus, app)
        assert not transport.connected
        assert protocol.reason is CloseReason.TOO_MANY_CLIENTS
        assert self.connect(bus, MAIN)[1].connected
        first[1].end()
        bus.settle()
        assert self.connect(bus, app)[1].connected

    def test_one_user_cannot_take_all_places_of_a_socket(self):
        """The last quarter of max-clients= is kept for users without a client at the socket; root may have it, and so
        may the user of a socket that is one user's alone."""
        bus = Bus()
        app, own = Listener("app", max_clients=8), Listener("own", frozenset((1001,)), max_clients=8)
        first, *_ = [self.connect(bus, app, 1001) for _ in range(6)]
        protocol, transport = self.connect(bus, app, 1001)
        assert (transport.connected, protocol.reason) == (False, CloseReason.KEPT_FOR_OTHERS)
        assert not bus.registry.admits(PeerCredentials(1, 1001, 0), app)
        assert bus.registry.admits(PeerCredentials(1, 1002, 0), app)
        assert self.connect(bus, MAIN, 1001)[1].connected
        newcomer = self.connect(bus, app, 1002)[1]
        assert newcomer.connected
        assert self.connect(bus, app, 1002)[0].reason is CloseReason.KEPT_FOR_OTHERS
        assert self.connect(bus, app, 0)[1].connected
        assert self.connect(bus, app, 1003)[0].reason is CloseReason.TOO_MANY_CLIENTS
        newcomer.end()
        first[1].end()
        bus.settle()
        assert self.connect(bus, app, 1002)[1].connected
        assert [self.connect(bus, own, 1001)[1].connected for _ in range(9)] == [True] * 8 + [False]

    def test_label_is_on_the_client(self):
        """The state of a connection names its socket."""
        bus = Bus()
        protocol, _ = self.connect(bus, Listener("app"))
        assert protocol.listener.name == "app"
        assert protocol.describe()["listener"] == "app"
        assert bus.connect().protocol.describe()["listener"] == "main"


def test_the_admin_socket_from_systemd():
    """A socket that systemd calls admin is for operators, wherever it stands, unless --listen names it."""
    assert passed_admin(["sbus", "admin"]) == "/dev/fd/4"
    assert passed_sockets(["admin", "sbus"]) == [("main", "/dev/fd/4")]
    assert passed_sockets(["admin", "a", "b.socket"]) == [("main", "/dev/fd/5"), ("a", "/dev/fd/4")]
    assert passed_admin(["sbus"]) is None
    assert passed_admin(["sbus", "admin"], [parse_listen("x=systemd:admin")]) is None
    with pytest.raises(UsageError, match="an admin socket and no other"):
        passed_sockets(["admin"])
