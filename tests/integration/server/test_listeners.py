"""Several sockets of one bus, over a real twistd: permissions, users, limits, containers, and systemd's sockets."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import sys
import time

import pytest

from tests.support.harness import OTHER_USER, THIRD_USER, Bus, Client

_NOT_ALLOWED = "the client's user is not allowed on this bus"


def listen(directory, name, *settings):
    return f"--listen={name}=" + ",".join([f"{directory}/{name}", *settings])


def test_one_bus_many_sockets(bus, directory):
    """A message goes from one socket to all, and the log names the socket of each client but those of main."""
    one = bus(listen(directory, "app1"), listen(directory, "app.2", "mode=0660", "max-clients=7"))
    found = one.wait_log(r"sbus also listens on (\S+) as (\S+), for (.*)", 2)
    assert [match.groups() for match in found] == [
        (f"{directory}/app1", "app1", "all users and all clients"),
        (f"{directory}/app.2", "app.2", "all users and 7 clients"),
    ]
    assert stat.S_IMODE(os.stat(directory / "app1").st_mode) == 0o700
    assert stat.S_IMODE(os.stat(directory / "app.2").st_mode) == 0o660
    with Client(directory / "app1") as first, Client(directory / "app.2") as second, Client(one.address) as third:
        for client in (first, second, third):
            client.sub(b"k")
            client.sync()
        packet = first.msg(b"k")
        assert [client.receive(1) for client in (first, second, third)] == [[packet]] * 3
        second.send(b"nonsense")
        assert second.has_ended()
    one.wait_log(r"client 1 connected: pid \d+ uid \d+ gid \d+ at app1$")
    one.wait_log(r"violation by client 2, pid \d+ uid \d+ gid \d+ at app.2: unknown message type")
    one.wait_log(r"client 3 connected: pid \d+ uid \d+ gid \d+$")
    assert one.stop() == 0
    assert list(directory.iterdir()) == [], "all sockets are removed"


@pytest.mark.usefixtures("as_root")
def test_users_of_a_socket(bus, directory):
    """A user that is not in users= is refused at that socket only, root included."""
    uid, _ = OTHER_USER
    options = (listen(directory, "app", "mode=0666", f"users={uid}"), "--mode=0666")
    one = bus(*options)
    with Client(directory / "app", user=OTHER_USER) as allowed:
        allowed.sync()
    for user in (THIRD_USER, (0, 0)):
        with Client(directory / "app", user=user) as client:
            assert client.has_ended()
        one.wait_log(rf"refused a connection from pid \d+ uid {user[0]} gid \d+ at app: {_NOT_ALLOWED}")
        with Client(one.address, user=user) as client:
            client.sync()


@pytest.mark.usefixtures("as_root")
def test_group_and_mode_of_a_socket(bus, directory):
    """mode= and group= decide who reaches a socket."""
    _, gid = OTHER_USER
    bus(listen(directory, "app", "mode=0660", f"group={gid}"))
    with Client(directory / "app", user=OTHER_USER) as client:
        client.sync()
    with pytest.raises(PermissionError):
        Client(directory / "app", user=THIRD_USER)


def test_clients_of_a_socket(bus, directory):
    """A socket that is full refuses, while the others admit; who leaves makes room."""
    one = bus(listen(directory, "app", "max-clients=1"))
    first = Client(directory / "app")
    first.sync()
    with Client(directory / "app") as second:
        assert second.has_ended()
    one.wait_log(r"refused a connection from .* at app: .*limit of clients")
    one.client(b"a").sync()
    first.close()
    one.wait_log("client 1 disconnected")
    with Client(directory / "app") as third:
        third.sync()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--listen=app"], "--listen=app: write NAME=ADDRESS"),
        (["--listen=a=@sbus-a", "--listen=a=@sbus-b"], "two sockets are called 'a'"),
        (["--listen=a={bus}"], "the sockets 'main' and 'a' have one address"),
        (["--listen=a={bus}.d/../bus"], "the sockets 'main' and 'a' have one address"),
        (["--listen=a={bus}2", "--listen=b=/nowhere/x,mode=0666"], "--listen=b=/nowhere/x,mode=0666: cannot listen on"),
        (["--listen=a={bus}2,group=no-such-group"], "there is no group 'no-such-group'"),
        (
            ["--listen=a={bus}2,users=1000", "--allow-user=1001"],
            "user 1000 may not use this bus: add --allow-user=1000",
        ),
        (["--listen=a=systemd:app"], "systemd passed no socket called 'app'"),
    ],
)
def test_a_bus_that_cannot_listen_everywhere_does_not_start(spawn, directory, options, why):
    """One wrong socket is one line and status 1, and no socket is left."""
    (directory / "bus.d").mkdir()
    options = [option.replace("{bus}", f"{directory}/bus") for option in options]
    one = spawn(Bus, directory, *options)
    assert one.wait() == 1
    assert why in one.log
    assert one.log.count("\n") == 1
    assert [path.name for path in directory.iterdir()] == ["bus.d"]


def test_abstract_sockets(bus, directory):
    """Beside a main socket on a path, an abstract one admits root and the server's user."""
    name = f"sbus-listen-{os.getpid()}"
    one = bus(f"--listen=app=@{name}", "--mode=0666")
    with Client(f"@{name}") as client:
        client.sync()
    one.wait_log("as app, for root and the server's user and all clients")


_IN_CONTAINER = """
mount --bind "$1/app1" "$2/bus" && mount -t tmpfs none "$1" || exit 77
exec "$3" -I -c '
import os, socket, sys
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.connect(sys.argv[1])
sock.send(b"MSG hello\\0from the container")
sock.recv(1)
' "$2/bus"
"""


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare (util-linux)")
def test_a_socket_in_a_container(bus, directory, tmp_path):
    """A socket that is bind-mounted into a mount namespace leads to the bus, which knows the container by its label."""
    inside = directory / "inside"
    inside.mkdir()
    (inside / "bus").touch()
    outside = directory / "outside"
    outside.mkdir()
    one = bus(listen(outside, "app1"), listen(outside, "app2"))
    subscriber = one.client(b"hello")
    command = ["unshare", "--mount", "sh", "-c", _IN_CONTAINER, "sh", str(outside), str(inside), sys.executable]
    container = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        while not subscriber.has_input():
            if container.poll() is not None:
                _, errors = container.communicate()
                pytest.skip(f"no mount namespaces here: {errors.decode().strip()}")
            time.sleep(0.01)
        assert subscriber.receive(1) == [b"MSG hello\0from the container"]
        one.wait_log(r"client \d+ connected: pid \d+ uid \d+ gid \d+ at app1$")
    finally:
        container.kill()
        container.communicate()


def test_sockets_from_systemd(spawn, directory):
    """Each socket that systemd passes is labelled with its name; the one without a name is main.

    The one called admin is the admin socket.
    """
    made = []
    for name in ("app1", "admin", "plain", "app2"):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM if name == "admin" else socket.SOCK_SEQPACKET)
        sock.bind(str(directory / name))
        sock.listen()
        made.append(sock)
    script = (
        "import fcntl, os, sys\n"
        "fds = list(map(int, sys.argv[1].split(',')))\n"
        "high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for fd in fds]\n"
        "for i, fd in enumerate(high): os.dup2(fd, 3 + i); os.close(fd)\n"
        "os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS='4', LISTEN_FDNAMES=sys.argv[2])\n"
        "os.execv(sys.argv[3], sys.argv[3:])\n"
    )
    numbers = ",".join(str(sock.fileno()) for sock in made)
    one = spawn(
        Bus,
        directory,
        "--listen=second=systemd:app2,max-clients=1",
        address="systemd",
        before=(sys.executable, "-c", script, numbers, "app1:admin:sbus.socket:app2"),
        pass_fds=[sock.fileno() for sock in made],
    )
    for sock in made:
        sock.close()
    one.wait_started()
    for name, label in (("app1", " at app1"), ("plain", ""), ("app2", " at second")):
        with Client(directory / name) as client:
            client.sync()
        one.wait_log(rf"client \d+ connected: pid \d+ uid \d+ gid \d+{label}$")
        one.mark()
    with socket.socket(socket.AF_UNIX) as operator:
        operator.connect(str(directory / "admin"))
        operator.sendall(b"GET /v1/status HTTP/1.1\r\nHost: bus\r\nConnection: close\r\n\r\n")
        assert operator.makefile("rb").readline() == b"HTTP/1.1 200 OK\r\n"
    assert one.stop() == 0
    assert sorted(p.name for p in directory.iterdir()) == ["admin", "app1", "app2", "plain"], "they are systemd's"
