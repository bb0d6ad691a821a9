"""The requests that the page's server answers."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from twisted.web.http_headers import Headers

from sbus.admin.pages import Problem
from sbus.web.guard import Guard, Host, parse_host

TOKEN = "t" * 43
PORTS = st.integers(1, 65535)


@pytest.mark.parametrize(
    ("value", "host"),
    [
        (b"127.0.0.1:8080", Host("127.0.0.1", 8080, True)),
        (b"127.8.9.1", Host("127.8.9.1", 80, True)),
        (b"[::1]:9", Host("::1", 9, True)),
        (b"[0:0:0:0:0:0:0:1]:9", Host("::1", 9, True)),
        (b"LocalHost:1", Host("localhost", 1, True)),
        (b"127.evil.example:80", Host("127.evil.example", 80, False)),
        (b"127.0.0.1.evil.example", Host("127.0.0.1.evil.example", 80, False)),
        (b"localhost.evil.example", Host("localhost.evil.example", 80, False)),
        (b"127.1:80", Host("127.1", 80, False)),
        (b"0x7f.0.0.1", Host("0x7f.0.0.1", 80, False)),
        (b"2130706433", Host("2130706433", 80, False)),
        (b"0.0.0.0:80", Host("0.0.0.0", 80, False)),
        (b"[::ffff:127.0.0.1]", Host("::ffff:7f00:1", 80, False)),
        (b"192.0.2.7", Host("192.0.2.7", 80, False)),
    ],
)
def test_a_host_is_parsed_as_an_address(value: bytes, host: Host) -> None:
    """A name that only looks like a loopback address is a name."""
    found = parse_host(value)
    assert found is not None
    assert (found.port, found.is_loopback) == (host.port, host.is_loopback)
    if host.is_loopback:
        assert found == host


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b":80",
        b"[::1",
        b"[::1]x",
        b"a b",
        b"user@127.0.0.1",
        b"127.0.0.1:0",
        b"127.0.0.1:99999",
        b"127.0.0.1:",
        b"[]",
    ],
)
def test_a_malformed_host_is_no_host(value: bytes) -> None:
    """Everything but a name or an address with an optional port is malformed."""
    assert parse_host(value) is None


@given(st.ip_addresses(v=4), PORTS)
def test_addresses_are_loopback_as_ipaddress_says(address: ipaddress.IPv4Address, port: int) -> None:
    """Of the IPv4 addresses those of 127.0.0.0/8 pass, with every port."""
    found = parse_host(f"{address}:{port}".encode())
    assert found == Host(str(address), port, address in ipaddress.ip_network("127.0.0.0/8"))


_LIKELY = st.text("0123456789abcdefx.:[]-%@/ \\localhost127", max_size=30).map(str.encode)


@given(st.one_of(st.binary(max_size=40), _LIKELY))
def test_only_loopback_literals_and_localhost_pass(value: bytes) -> None:
    """Whatever passes is, for another parser too, a loopback address or the name localhost."""
    found = parse_host(value)
    if found is not None and found.is_loopback:
        name = urlsplit(f"http://{value.decode()}/").hostname
        assert name is not None
        assert name == "localhost" or ipaddress.ip_address(name).is_loopback


@given(st.from_regex(r"[a-z0-9-]{1,20}(\.[a-z0-9-]{1,10}){1,4}\.[a-z]{2,6}", fullmatch=True))
def test_no_name_of_the_internet_passes(name: str) -> None:
    """A name with a top-level domain never passes, whatever it begins with."""
    for each in (name, f"127.{name}", f"127.0.0.1.{name}", f"localhost.{name}"):
        found = parse_host(each.encode())
        assert found is not None
        assert not found.is_loopback


def check(*headers: tuple[str, str]) -> None:
    raw = Headers()
    for name, value in headers:
        raw.addRawHeader(name, value)
    Guard(TOKEN).check_source(raw)


OWN = ("Host", "127.0.0.1:8080")


@pytest.mark.parametrize(
    "headers",
    [
        [OWN],
        [OWN, ("Sec-Fetch-Site", "none")],
        [OWN, ("Sec-Fetch-Site", "same-origin"), ("Origin", "http://127.0.0.1:8080")],
        [("Host", "localhost:9000"), ("Origin", "http://localhost:9000")],
    ],
)
def test_the_own_page_passes(headers: list[tuple[str, str]]) -> None:
    """Requests of the page itself pass, also through a port that ssh forwards; so does the address bar."""
    check(*headers)


@pytest.mark.parametrize(
    "headers",
    [
        [("Host", "rebound.example:8080")],
        [
            ("Host", "rebound.example:8080"),
            ("Origin", "http://rebound.example:8080"),
            ("Sec-Fetch-Site", "same-origin"),
        ],
        [OWN, ("Origin", "http://evil.example")],
        [OWN, ("Origin", "null")],
        [OWN, ("Origin", "https://127.0.0.1:8080")],
        [OWN, ("Origin", "http://127.0.0.1:8081")],
        [OWN, ("Origin", "http://localhost:8080")],
        [OWN, ("Sec-Fetch-Site", "cross-site")],
        [OWN, ("Sec-Fetch-Site", "same-site")],
        [OWN, ("Sec-Fetch-Site", "")],
    ],
)
def test_other_sites_do_not(headers: list[tuple[str, str]]) -> None:
    """A rebound name, another origin (also another port) and a cross-site request are refused."""
    with pytest.raises(Problem) as refused:
        check(*headers)
    assert refused.value.status == 403


@pytest.mark.parametrize("headers", [[], [OWN, OWN], [OWN, ("Origin", "http://127.0.0.1:8080"), ("Origin", "null")]])
def test_headers_come_once(headers: list[tuple[str, str]]) -> None:
    """A request without a Host, or with a second one, is refused, so that two readers cannot differ."""
    with pytest.raises(Problem) as refused:
        check(*headers)
    assert refused.value.status == 400


@pytest.mark.parametrize("value", [None, "", "Bearer", "Bearer ", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}", TOKEN])
def test_a_wrong_token_is_refused(value: str | None) -> None:
    """Only the whole token, as a bearer token, is one."""
    headers = Headers({} if value is None else {"Authorization": [value]})
    with pytest.raises(Problem) as refused:
        Guard(TOKEN).check_token(headers)
    assert refused.value.status == 401


def test_the_token_passes() -> None:
    """The token passes, and the scheme's case does not matter (RFC 9110)."""
    Guard(TOKEN).check_token(Headers({"Authorization": [f"bearer {TOKEN}"]}))
