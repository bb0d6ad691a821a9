"""HTTP of the page, on a transport without a socket."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from twisted.internet.address import IPv4Address
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport, StringTransportWithDisconnection
from twisted.logger import globalLogPublisher

from sbus.admin.pages import Problem
from sbus.errors import SbusError
from sbus.web.files import File, load
from sbus.web.guard import Guard
from sbus.web.site import HEADERS, MOST_BODY, MOST_STRANGERS, PageRequest, PageSite

TOKEN = "token-of-this-test-that-is-long-enough-00000"
OWN = "Host: 127.0.0.1:8080\r\n"
ALLOWED = f"{OWN}Authorization: Bearer {TOKEN}\r\n"


async def echo(request: PageRequest) -> Any:
    return {"said": request.body().get("say")}


async def refuse(request: PageRequest) -> Any:
    raise Problem(502, "the bus is not there")


async def look(request: PageRequest) -> Any:
    return dict(request.asked().parameters)


async def fail(request: PageRequest) -> Any:
    raise ZeroDivisionError


def ask(text: str, body: bytes = b"") -> tuple[int, dict[str, str], bytes]:
    """Send one request to a new site; return the status, the headers and the body of the answer."""
    site = PageSite(
        Clock(),
        Guard(TOKEN),
        {"/": File("text/html; charset=utf-8", b"<p>page</p>")},
        {
            ("POST", "/api/echo"): echo,
            ("GET", "/api/refuse"): refuse,
            ("GET", "/api/fail"): fail,
            ("GET", "/api/look"): look,
        },
    )
    channel: Any = site.buildProtocol(IPv4Address("TCP", "127.0.0.1", 50000))
    transport = StringTransport()
    channel.makeConnection(transport)
    channel.dataReceived(text.encode() + b"\r\n" + body)
    head, _, rest = transport.value().partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return int(first.split()[1]), headers, rest


@pytest.mark.parametrize(
    "request_head",
    [
        f"GET / HTTP/1.1\r\n{OWN}",
        "GET / HTTP/1.1\r\nHost: evil.example\r\n",
        f"GET /api/fail HTTP/1.1\r\n{OWN}",
        f"GET /nothing HTTP/1.1\r\n{ALLOWED}",
        f"OPTIONS /api/echo HTTP/1.1\r\n{OWN}Origin: http://evil.example\r\nAccess-Control-Request-Method: POST\r\n",
    ],
)
def test_every_answer_has_the_headers_and_none_of_cors(request_head: str) -> None:
    """Refusals too have the headers that bind the browser, and no answer permits another origin anything."""
    _, headers, _ = ask(request_head)
    assert headers.items() >= HEADERS.items()
    assert not [name for name in headers if name.startswith("access-control")]
    assert "set-cookie" not in headers


def test_the_policy_permits_nothing_from_elsewhere() -> None:
    """The policy of the page permits its own origin alone: no inline script, no frame around it."""
    policy = HEADERS["content-security-policy"].split("; ")
    assert "default-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in " ".join(policy)


def test_files_need_no_token() -> None:
    """The files of the page hold nothing secret: the link carries the token in its fragment, which no one sends."""
    status, headers, body = ask(f"GET / HTTP/1.1\r\n{OWN}")
    assert (status, headers["content-type"], body) == (200, "text/html; charset=utf-8", b"<p>page</p>")


def test_a_target_in_absolute_form() -> None:
    """The host may stand in the target, too, if it is that of the Host header; any other target is a path."""
    for target in (b"http://127.0.0.1:8080/", b"HTTP://127.0.0.1:8080"):
        assert ask(f"GET {target.decode()} HTTP/1.1\r\n{OWN}")[::2] == (200, b"<p>page</p>")
    _, _, body = ask(f"GET http://127.0.0.1:8080/api/look?a=1 HTTP/1.1\r\n{ALLOWED}")
    assert json.loads(body) == {"a": "1"}
    for host in ("127.0.0.1", "127.0.0.1:80801", "evil.example"):
        assert ask(f"GET http://{host}/api/look HTTP/1.1\r\n{ALLOWED}")[0] == 404


def test_a_head_request_has_no_body() -> None:
    """HEAD answers as GET does, without the body."""
    status, headers, body = ask(f"HEAD / HTTP/1.1\r\n{OWN}")
    assert (status, headers["content-length"], body) == (200, "11", b"")


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (f"GET /api/fail HTTP/1.1\r\n{OWN}", 401),
        (f"GET /elsewhere HTTP/1.1\r\n{OWN}", 401),
        (f"GET /elsewhere HTTP/1.1\r\n{ALLOWED}", 404),
        (f"GET /api/echo HTTP/1.1\r\n{ALLOWED}", 405),
        (f"POST / HTTP/1.1\r\n{ALLOWED}", 405),
        (f"GET /api/refuse HTTP/1.1\r\n{ALLOWED}", 502),
        (f"GET /api/refuse HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\nHost: rebound.example\r\n", 403),
    ],
)
def test_refusals_say_why(head: str, status: int) -> None:
    """A refusal is a problem document whose detail names the remedy; without a token nothing else is revealed."""
    found, headers, body = ask(head)
    assert (found, headers["content-type"]) == (status, "application/problem+json")
    assert json.loads(body)["detail"]


def test_an_error_reveals_nothing() -> None:
    """An error in the server is logged there, and answered with a status alone."""
    events: list[Any] = []
    observer: Any = events.append
    globalLogPublisher.addObserver(observer)
    try:
        status, _, body = ask(f"GET /api/fail HTTP/1.1\r\n{ALLOWED}")
    finally:
        globalLogPublisher.removeObserver(observer)
    assert status == 500
    assert b"ZeroDivision" not in body
    assert any("log_failure" in event for event in events)


def test_a_body_is_json() -> None:
    """A body is a JSON object of that type, which no form of another site can send."""
    body = b'{"say": "hello"}'
    head = f"POST /api/echo HTTP/1.1\r\n{ALLOWED}Content-Length: {len(body)}\r\n"
    assert ask(f"{head}Content-Type: application/json\r\n", body)[2] == b'{"said": "hello"}'
    assert ask(f"{head}Content-Type: text/plain\r\n", body)[0] == 415
    for other in (b"[]", b"}{", b"[" * 100_000, b'{"say": ' * 50_000, b'{"say": ' + b"9" * 5_000 + b"}"):
        head = f"POST /api/echo HTTP/1.1\r\n{ALLOWED}Content-Length: {len(other)}\r\nContent-Type: application/json\r\n"
        assert ask(head, other)[0] == 400


def test_a_body_without_the_token_is_not_read() -> None:
    """Whoever has no token cannot make the server hold a body: the refusal comes before it."""
    status, _, _ = ask(f"POST /api/echo HTTP/1.1\r\n{OWN}Content-Length: 1000\r\n")
    assert status == 401


@pytest.mark.parametrize("length", [f"Content-Length: {MOST_BODY + 1}", "Transfer-Encoding: chunked"])
def test_a_long_body_is_not_read(length: str) -> None:
    """A body that is too long, or of unknown length, is refused before it is read."""
    assert ask(f"POST /api/echo HTTP/1.1\r\n{ALLOWED}{length}\r\n")[0] == 413


def test_a_page_that_was_not_built(tmp_path: Path) -> None:
    """In a source tree without the page the error names the command that builds it."""
    with pytest.raises(SbusError, match="make web"):
        load(tmp_path)


def connect(site: PageSite) -> tuple[Any, StringTransportWithDisconnection]:
    """Connect to a site."""
    channel: Any = site.buildProtocol(IPv4Address("TCP", "127.0.0.1", 50000))
    transport = StringTransportWithDisconnection()
    transport.protocol = channel
    transport.abortConnection = transport.loseConnection  # type: ignore[method-assign]
    channel.makeConnection(transport)
    return channel, transport


def new_site() -> PageSite:
    return PageSite(Clock(), Guard(TOKEN), {"/": File("text/html", b"page")}, {("POST", "/api/echo"): echo})


def test_a_stranger_gets_one_answer() -> None:
    """Of pipelined requests for files the first is answered alone: nobody fills the memory by not reading."""
    channel, transport = connect(new_site())
    channel.dataReceived(f"GET / HTTP/1.1\r\n{OWN}\r\n".encode() * 1000)
    assert transport.value().count(b"HTTP/1.1 200") == 1
    assert not transport.connected
    channel, transport = connect(new_site())
    body = b'{"say": 1}'
    fields = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    head = f"POST /api/echo HTTP/1.1\r\n{ALLOWED}{fields}\r\n"
    channel.dataReceived((head.encode() + body) * 2)
    assert transport.value().count(b"HTTP/1.1 200") == 2
    assert transport.connected


def test_strangers_give_their_places_to_each_other() -> None:
    """Beyond 128 connections without the token the oldest ends; one that has shown it stays."""
    site = new_site()
    channel, transport = connect(site)
    head = f"POST /api/echo HTTP/1.1\r\n{ALLOWED}Content-Type: application/json\r\nContent-Length: 2\r\n\r\n"
    channel.dataReceived(head.encode() + b"{}")
    strangers = [connect(site)[1] for _ in range(MOST_STRANGERS + 2)]
    assert transport.connected
    assert [each.connected for each in strangers] == [False] * 2 + [True] * MOST_STRANGERS
    strangers[5].loseConnection()
    assert connect(site)[1].connected
    assert strangers[2].connected


def test_parameters_are_few() -> None:
    """A query of more than 16 parameters is refused, and parsed only with the token."""
    query = "a=b&" * 1000
    assert ask(f"GET /api/look?{query} HTTP/1.1\r\n{OWN}")[0] == 401
    assert ask(f"GET /api/look?{query} HTTP/1.1\r\n{ALLOWED}")[0] == 400
    assert json.loads(ask(f"GET /api/look?a=b&c=%C3%BC HTTP/1.1\r\n{ALLOWED}")[2]) == {"a": "b", "c": "ü"}
