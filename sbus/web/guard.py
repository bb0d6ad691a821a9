"""The requests that the page's server answers: those of its own page, through a loopback address.

Theory of operation
-------------------

Every local user can connect to a port of 127.0.0.1, and every web site that the user visits can make the browser send
requests to it. Three checks stand against that; each is sufficient alone.

*Host.* A site that rebinds its name to 127.0.0.1 reaches this server as its own origin, so the browser would let it
read the answers. Its requests still carry its name. `parse_host` takes an address apart as an address, and only
loopback addresses and the name ``localhost`` pass: a test of the beginning would let ``127.evil.example`` in. The port
may be another than the server's, because ``ssh -L`` changes it, and a rebound name gains nothing by it.

*Origin and Sec-Fetch-Site.* The browser states where a request comes from, and no page can change that. A request of
another origin is refused, also one of another port of this host (``same-site``). Programs other than browsers send
neither header.

*Token.* Everything but the files of the page needs a token of 32 random bytes, in a separate header. There is no
cookie: browsers send the cookies of 127.0.0.1 to all of its ports, and another user may listen on the next one. No page
of another origin can set the header, since no answer permits that (CORS).
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from sbus.admin.pages import Problem

__all__ = ["Guard", "Headers", "Host", "parse_host"]

_HOST = re.compile(rb"(?:\[(?P<v6>[0-9A-Fa-f:.]{2,45})\]|(?P<name>[0-9A-Za-z.-]{1,253}))(?::(?P<port>[0-9]{1,5}))?")


class Host(NamedTuple):
    """A parsed ``Host``.

    :ivar name: an address as `ipaddress` writes it, or a name in lower case.
    :ivar port: the port; 80 if the header has none.
    :ivar is_loopback: whether it is a loopback address or ``localhost``.
    """

    name: str
    port: int
    is_loopback: bool


class Headers(Protocol):
    """The methods of a request's headers that the guard uses (`twisted.web.http_headers.Headers`)."""

    def getRawHeaders(self, name: bytes) -> Sequence[bytes] | None:
        """Return the values of a header, or None."""


def parse_host(value: bytes) -> Host | None:
    """Parse a ``Host`` header (RFC 9110, section 7.2); None if it is malformed.

    IPv4 addresses have four decimal numbers without leading zeros, as browsers write them.
    """
    found = _HOST.fullmatch(value)
    if found is None:
        return None
    port = 80 if found["port"] is None else int(found["port"])
    if not 0 < port < 65536:
        return None
    if found["v6"] is not None:
        try:
            address6 = ipaddress.IPv6Address(found["v6"].decode())
        except ValueError:
            return None
        return Host(str(address6), port, address6 == ipaddress.IPv6Address(1))
    name = found["name"].decode().lower()
    try:
        address = ipaddress.IPv4Address(name)
    except ValueError:
        return Host(name, port, name == "localhost")
    return Host(str(address), port, address.is_loopback)


class Guard:
    """Decides whether a request is answered.

    :param token: the secret of this server's pages.
    """

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    def check_source(self, headers: Headers) -> None:
        """Check where a request comes from.

        :raises Problem: with status 403, or 400 without exactly one ``Host``.
        """
        raw = _only(headers, b"host")
        if raw is None:
            raise Problem(400, "the request has no Host header: use HTTP/1.1")
        host = parse_host(raw)
        if host is None or not host.is_loopback:
            raise Problem(
                403,
                "this Host is no loopback address: open the page as 127.0.0.1 or localhost (ssh -L from elsewhere)",
            )
        origin = _only(headers, b"origin")
        if origin is not None and (not origin.startswith(b"http://") or parse_host(origin[7:]) != host):
            raise Problem(403, "the request comes from another origin: use the page that this server sends")
        site = _only(headers, b"sec-fetch-site")
        if site not in (None, b"same-origin", b"none"):
            raise Problem(403, "another site has sent you here: paste the link into the address bar")

    def check_token(self, headers: Headers) -> None:
        """Check the token.

        :raises Problem: with status 401.
        """
        scheme, _, given = (_only(headers, b"authorization") or b"").partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(given, self._token):
            raise Problem(401, "the token is missing or of another sbus web: open the link that sbus web has printed")


def _only(headers: Headers, name: bytes) -> bytes | None:
    """Return a header that may be there once.

    :raises Problem: if it is there more than once: two readers could take different ones.
    """
    values = headers.getRawHeaders(name)
    if not values:
        return None
    if len(values) > 1:
        raise Problem(400, f"the request has {len(values)} {name.decode().title()} headers: send one")
    return values[0].strip()
