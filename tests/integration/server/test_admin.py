"""The admin socket of a real server."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sbus.testing import RunningBus, running_bus


class Connection(http.client.HTTPConnection):
    """A connection to the admin socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=10)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(10)
        self.sock.connect(self._path)


def ask(path: str, what: str, method: str = "GET", body: bytes | None = None) -> tuple[int, bytes]:
    """Ask once; return the status and the body."""
    connection = Connection(path)
    try:
        connection.request(method, what, body)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def got(path: str, what: str, method: str = "GET") -> Any:
    """Return an answer in JSON that must be a success."""
    status, body = ask(path, what, method)
    assert status == 200, body
    return json.loads(body)


@contextmanager
def admin(directory: Path, **options: Any) -> Iterator[tuple[RunningBus, str]]:
    """Run a bus with an admin socket."""
    path = str(directory / "admin")
    with running_bus(admin=path, **options) as bus:
        yield bus, path


def test_pages(tmp_path: Path) -> None:
    """Each page answers about the clients, users and messages of the bus, and an operator can disconnect a client."""
    with admin(tmp_path) as (bus, path):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        with bus.record("a/*") as client, bus.connect() as publisher:
            publisher.publish("a/b", b"x")
            publisher.fence()
            status = got(path, "/v1/status")
            assert (status["clients"], status["counters"]["published"]) == (2, 1)
            clients = got(path, "/v1/clients?sort=patterns&limit=1")
            assert clients["total"] == 2
            (subscriber,) = clients["clients"]
            assert (subscriber["patterns"] > 0, subscriber["pid"]) == (True, os.getpid())
            explained = got(path, "/v1/explain?key=a/b")
            assert [(r["client"], r["pattern"]) for r in explained["receivers"]] == [(subscriber["client"], "a/*")]
            (user,) = got(path, "/v1/users")["users"]
            assert (user["uid"], user["clients"]) == (os.getuid(), 2)
            assert got(path, f"/v1/disconnect?client={subscriber['client']}", "POST")
            while not (closed := [c for c in got(path, "/v1/closed")["closed"] if c["reason"] == "operator"]):
                pass
            assert closed[0]["client"] == subscriber["client"]
            del client
    assert not os.path.exists(path)


class Events:
    """A stream of events of a real server."""

    def __init__(self, path: str, what: str) -> None:
        self._connection = Connection(path)
        self._connection.request("GET", f"/v1/events{what}")
        self.response = self._connection.getresponse()
        assert self.response.status == 200, self.response.read()
        assert self.response.headers["Content-Type"] == "text/event-stream"

    def any(self) -> tuple[str, Any]:
        """Return the name and the data of the next event."""
        name = b""
        while line := self.response.readline():
            field, _, value = line.rstrip().partition(b": ")
            if field == b"event":
                name = value
            elif field == b"data":
                return name.decode(), json.loads(value)
        raise AssertionError("the stream has ended")

    def next(self, wanted: str) -> Any:
        """Return the data of the next event of this name."""
        while True:
            name, data = self.any()
            if name == wanted:
                return data

    def close(self) -> None:
        self._connection.close()
        self.response.close()


def test_events(tmp_path: Path) -> None:
    """A stream shows the status each second, and what is published soon after it is.

    A server that is preempted while it notes a message has no time left for the next ones, and counts them.
    """
    with admin(tmp_path) as (bus, path), bus.record("a/*"), bus.connect() as publisher:
        stream = Events(path, "?monitor=a/*&talk=1&unrouted=1")
        first = stream.next("status")
        assert first["clients"] == 2
        messages: list[dict[str, Any]] = []
        flows: dict[str, int] = {}
        unrouted: set[str] = set()
        name, data = "status", first
        times = [first["time"]]
        while not (messages and len(flows) == 2 and unrouted and len(times) > 1):
            if name == "status":
                publisher.publish("a/b", b"x")
                publisher.publish("c", b"x")
            name, data = stream.any()
            if name == "status":
                times.append(data["time"])
            messages += data.get("messages", ())
            flows.update({flow["prefix"]: flow["receivers_total"] for flow in data.get("flows", ())})
            unrouted.update(row["key"] for row in data.get("keys", ()))
        for message in messages:
            assert (message["key"], message["receivers"], message["publisher"]["pid"]) == ("a/b", 1, os.getpid())
        assert flows == {"a/": 1, "c": 0}
        assert unrouted == {"c"}
        assert times == sorted(set(times))
        stream.close()


def test_a_stream_that_is_not_read(tmp_path: Path) -> None:
    """A reader that stops gets no more events until it reads again, and then learns how much it has missed."""
    with admin(tmp_path) as (bus, path), bus.connect() as publisher:
        stream = Events(path, "?monitor=&head=4096")
        stream.next("status")
        seen = missed = 0
        for _ in range(60):  # far more than the buffers of the kernel and of the connection take
            publisher.publish_many(("k", bytes(4096)) for _ in range(100))
            publisher.fence()
        held = got(path, "/v1/status")["memory_bytes"]
        assert held < 32 << 20
        while seen + missed < 6000:
            event = stream.next("messages")
            seen += len(event["messages"])
            missed += sum(event["missed"].values())
        assert seen + missed == 6000
        assert missed
        stream.close()


def test_streams_are_few(shared_admin: str) -> None:
    """At most 16 streams are open at one time; one that ends makes room."""
    streams = [Events(shared_admin, "") for _ in range(16)]
    status, body = ask(shared_admin, "/v1/events")
    assert (status, b"stop one of them" in body) == (503, True)
    streams.pop().close()
    while ask(shared_admin, "/v1/events?talk=x")[0] == 503:
        pass
    for stream in streams:
        stream.close()


def test_metrics_are_what_prometheus_reads(tmp_path: Path) -> None:
    """The library's own parser reads the metrics; each has a help text, and no label names a client or a key."""
    with admin(tmp_path) as (bus, path), bus.connect() as client:
        client.publish("k", b"x")
        client.fence()
        status, body = ask(path, "/metrics")
        assert status == 200
        found = {family.name: family for family in text_string_to_metric_families(body.decode())}
        assert found["sbus_published_messages"].samples[0].value == 1
        for family in found.values():
            assert family.documentation.endswith("."), family
            assert re.fullmatch("(sbus|process)_[a-z_]+", family.name)
            for sample in family.samples:
                assert sample.name.endswith("_total") is (family.type == "counter")
        assert {s.labels["bus"] for f in found.values() for s in f.samples} == {bus.address}, "two buses have no series"
        assert {label for f in found.values() for s in f.samples for label in s.labels} == {
            "bus",
            "compiled",
            "limit",
            "reason",
            "rule",
            "version",
        }


@pytest.mark.parametrize(
    ("what", "method", "status"),
    [
        ("/nothing", "GET", 404),
        ("/v1/status", "POST", 405),
        ("/v1/disconnect?client=1", "GET", 405),
        ("/v1/disconnect?client=99", "POST", 404),
        ("/v1/clients?limit=0", "GET", 400),
        ("/v1/clients?sort=name", "GET", 400),
        ("/v1/explain", "GET", 400),
        ("/v1/explain?key=!/secret", "GET", 400),
    ],
)
def test_problems(shared_admin: str, what: str, method: str, status: int) -> None:
    """A request that cannot be answered gets a problem with a remedy."""
    found, body = ask(shared_admin, what, method)
    problem = json.loads(body)
    assert (found, problem["status"]) == (status, status)
    assert ":" in problem["detail"]


def test_a_target_in_absolute_form(shared_admin: str) -> None:
    """A client that takes the socket for a proxy sends the whole URL (RFC 9112)."""
    assert got(shared_admin, "http://localhost/v1/clients?limit=5") == got(shared_admin, "/v1/clients?limit=5")
    assert ask(shared_admin, "ftp://localhost/v1/clients")[0] == 404


@pytest.fixture(scope="module")
def shared_admin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The admin socket of a bus for several tests."""
    with admin(tmp_path_factory.mktemp("admin")) as (_, path):
        yield path


def test_large_bodies_are_refused(shared_admin: str) -> None:
    """A request with a body that no page needs is refused before it is read."""
    connection = Connection(shared_admin)
    connection.putrequest("POST", "/v1/disconnect?client=1")
    connection.putheader("Content-Length", str(1 << 30))
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()


def test_huge_heads_are_refused(shared_admin: str) -> None:
    """A head of more than 8 KiB, and one of very many fields, is refused; the next request is answered."""
    for head in (b"X: " + b"x" * 10_000, b"\r\n".join(b"X%d: x" % n for n in range(100))):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(10)
            sock.connect(shared_admin)
            sock.sendall(b"GET /v1/status HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert b" 200 " not in sock.makefile("rb").readline()
    assert ask(shared_admin, "/v1/status")[0] == 200


def test_half_a_request(shared_admin: str) -> None:
    """Connections that send half a request, or nothing, keep nobody out."""
    halves = [socket.socket(socket.AF_UNIX) for _ in range(40)]
    for at, sock in enumerate(halves):
        sock.connect(shared_admin)
        if at % 2:
            sock.sendall(b"GET /v1/sta")
    assert ask(shared_admin, "/v1/status")[0] == 200
    for sock in halves:
        sock.close()


def test_the_connection_beyond_the_last(shared_admin: str) -> None:
    """The 65th connection is closed without an answer; when one goes, the next is answered."""
    others = [socket.socket(socket.AF_UNIX) for _ in range(64)]
    for sock in others:
        sock.connect(shared_admin)
    with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError)):
        ask(shared_admin, "/v1/status")
    for sock in others:
        sock.close()
    for _ in range(100):
        with contextlib.suppress(http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
            assert ask(shared_admin, "/v1/status")[0] == 200
            return
    raise AssertionError("no connection is accepted any more")


def test_a_client_that_is_leaving(tmp_path: Path) -> None:
    """A client that is disconnected twice, or while it leaves, is gone once; the bus goes on."""
    with admin(tmp_path) as (bus, path):
        for _ in range(20):
            with bus.connect() as client:
                client.fence()
                number = got(path, "/v1/clients?limit=1")["clients"][0]["client"]
                client.close()
                status, _body = ask(path, f"/v1/disconnect?client={number}", "POST")
                assert status in (200, 404)
        found = got(path, "/v1/closed")["closed"]
        assert len({row["client"] for row in found}) == len(found)
        assert {row["reason"] for row in found} <= {"operator", "peer-closed", "peer-reset"}


def test_a_refused_body_does_nothing(shared_admin: str) -> None:
    """A request that is refused for its body is not obeyed, even if all of it comes at once; nor is a chunked one."""
    for body in (
        b"Content-Length: 5000\r\n\r\n" + bytes(5000),
        b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n",
    ):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(10)
            sock.connect(shared_admin)
            sock.sendall(b"POST /v1/disconnect?client=99 HTTP/1.1\r\nHost: x\r\n" + body)
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                while more := sock.recv(65536):
                    answer += more
        assert answer.count(b"HTTP/1.1") == 1
        assert b" 413 " in answer


def test_parameters_are_few(shared_admin: str) -> None:
    """A query of more than 16 parameters is refused, in few words; a form in the body is not read."""
    status, body = ask(shared_admin, "/v1/status?" + "a=b&" * 1900)
    assert (status, len(body) < 500) == (400, True)
    connection = Connection(shared_admin)
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    connection.request("POST", "/v1/disconnect", b"client=1", form)
    assert connection.getresponse().status == 400
    connection.close()


class Others:
    """Connections of other users to the admin socket of a bus.

    :param path: the path of the socket.
    """

    PROGRAM = """
import os, socket, sys
os.setgroups([]); os.setgid(int(sys.argv[3])); os.setuid(int(sys.argv[2]))
for line in sys.stdin:
    sockets = [socket.socket(socket.AF_UNIX) for _ in range(int(line))]
    for s in sockets:
        s.connect(sys.argv[1])
    print("connected", flush=True)
    sys.stdin.readline()
    ends = 0
    for s in sockets:
        s.settimeout(10)
        try:
            s.sendall(b"GET /metrics HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n\\r\\n")
            words = s.makefile("rb").read().split()
        except OSError:
            words = []
        print(words[1].decode() if words else "closed", end=" ", flush=True)
    print(flush=True)
"""

    def __init__(self, path: str, uid: int, gid: int) -> None:
        command = [sys.executable, "-I", "-S", "-c", self.PROGRAM, path, str(uid), str(gid)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def connect(self, count: int) -> None:
        """Make connections, and leave them silent."""
        self._say(str(count))
        assert self._line() == "connected"

    def ask(self) -> list[str]:
        """Ask for the metrics on each of them; return the answers."""
        self._say("")
        return self._line().split()

    def _say(self, text: str) -> None:
        assert self._process.stdin is not None
        print(text, file=self._process.stdin, flush=True)

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs other users: run as root")
def test_connections_of_others_are_few() -> None:
    """One user has 8 connections, all others together 16; users without any right have 2 each and 8 together, so that
    they lock out neither readers of the metrics nor root. A place is free again after one answer."""
    directory = Path(tempfile.mkdtemp(prefix="sbus-admin-"))
    directory.chmod(0o755)
    path = str(directory / "admin")
    with contextlib.ExitStack() as stack:
        stack.enter_context(running_bus(admin=path, admin_group="64000,metrics", reuse=True))

        def user(uid: int, gid: int = 64000) -> Others:
            found = Others(path, uid, gid)
            stack.callback(found.close)
            return found

        strangers = [user(65000 + n, 64001) for n in range(5)]
        for each in strangers:
            each.connect(3)
        got(path, "/v1/status")  # it was accepted after all of these
        readers = [user(65100 + n) for n in range(2)]
        readers[0].connect(9)
        got(path, "/v1/status")
        readers[1].connect(1)
        got(path, "/v1/status")
        assert readers[1].ask() == ["closed"]
        assert [each.ask() for each in strangers] == [["403"] * 2 + ["closed"]] * 4 + [["closed"] * 3]
        assert readers[0].ask() == ["200"] * 8 + ["closed"]
        readers[1].connect(8)
        assert readers[1].ask() == ["200"] * 8
    directory.rmdir()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs other users: run as root")
def test_places_are_kept_for_the_owner() -> None:
    """Members of the admin group cannot take all connections, nor all streams: root is served all the same."""
    directory = Path(tempfile.mkdtemp(prefix="sbus-admin-"))
    directory.chmod(0o755)
    path = str(directory / "admin")
    with contextlib.ExitStack() as stack:
        stack.enter_context(running_bus(admin=path, admin_group=64000, reuse=True))
        member = Others(path, 65000, 64000)
        stack.callback(member.close)
        member.connect(64)
        assert got(path, "/v1/status")["clients"] == 0
        assert member.ask() == ["200"] * 56 + ["closed"] * 8
    directory.rmdir()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user: run as root")
def test_other_users(tmp_path: Path) -> None:
    """A member of the metrics group reads the metrics and nothing else, one of the admin group all; others nothing."""
    program = (
        "import os, socket, sys\n"
        "os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(65533)\n"
        "s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])\n"
        "s.sendall(b'GET %b HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n' % sys.argv[3].encode())\n"
        "print(s.makefile('rb').readline().split()[1].decode())\n"
    )
    directory = Path(tempfile.mkdtemp(prefix="sbus-admin-"))
    directory.chmod(0o755)
    path = str(directory / "admin")
    with running_bus(admin=path, admin_group=["64000,metrics", "64002"], reuse=True):
        for gid, what, status in (
            (64000, "/metrics", "200"),
            (64000, "/v1/status", "403"),
            (64001, "/metrics", "403"),
            (64002, "/v1/status", "200"),
        ):
            command = [sys.executable, "-I", "-S", "-c", program, path, str(gid), what]
            answer = subprocess.run(command, capture_output=True, text=True, timeout=20)
            assert answer.stdout.strip() == status, answer.stderr
    directory.rmdir()
