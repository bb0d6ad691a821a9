"""Logins to a real nats-server, with and without TLS."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("nkeys", reason="no nkeys: pip install 'sbusd[nats]'")

import nkeys

from sbus.link.nats.client import Connection, ConnectionFailed, connect_options
from sbus.link.nats.settings import Login
from tests.support import servers
from tests.support.nats import NatsServer

_SEED = "SUACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY"  # of the documentation of NATS
_CONFIG = """
authorization {{ users = [
    {{ user: me, password: "s3cret", permissions: {{ publish: "sbus.a.>", subscribe: "sbus.>" }} }}
    {{ nkey: {nkey} }}
] }}
tls {{ cert_file: "{home}/cert.pem", key_file: "{home}/key.pem" }}
"""


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """A directory with secrets, and a certificate for 127.0.0.1."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl, which makes the certificate")
    home = servers._new_directory()
    (home / "password").write_text("s3cret\n")
    (home / "seed").write_text(_SEED + "\n")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-keyout", "key.pem", "-out", "cert.pem", "-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"],
        cwd=home, check=True, capture_output=True,
    )  # fmt: skip
    yield home
    shutil.rmtree(home)


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[NatsServer]:
    """A nats-server that requires TLS and a login."""
    nkey = nkeys.from_seed(_SEED.encode()).public_key.decode()
    (home / "config").write_text(_CONFIG.format(nkey=nkey, home=home))
    server = NatsServer(home, "-c", str(home / "config")).wait_started()
    yield server
    server.ensure_gone()


def attempt(server: NatsServer, login: Login, *, url: str = "", publish: str = "sbus.a.x") -> list[str]:
    """Log in, publish, and return what nats-server then reports."""
    reports: list[str] = []

    async def run() -> None:
        urls = (url or server.url,)
        connection = await Connection.open([*urls], connect_options(urls, login), "test", print, reports.append)
        await connection.publish(publish, b"MSG a/x\0")
        assert await connection.fence(10)
        await connection.close()

    asyncio.run(run())
    return reports


def test_a_user_with_a_password(server: NatsServer, home: Path) -> None:
    """A user logs in over TLS; what nats-server does not permit is reported."""
    login = Login(user="me", password_file=str(home / "password"), tls_ca=str(home / "cert.pem"))
    assert attempt(server, login) == []
    (report,) = attempt(server, login, publish="sbus.b.x")
    assert 'permissions violation for publish to "sbus.b.x"' in report


def test_an_nkey(server: NatsServer, home: Path) -> None:
    """A seed logs in."""
    assert attempt(server, Login(nkey_file=str(home / "seed"), tls_ca=str(home / "cert.pem"))) == []


def test_a_login_in_the_url(server: NatsServer, home: Path) -> None:
    """Name and password may be in the URL."""
    url = server.url.replace("nats://", "tls://me:s3cret@")
    assert attempt(server, Login(tls_ca=str(home / "cert.pem")), url=url) == []


def test_a_refused_login_gives_the_reason(server: NatsServer, home: Path) -> None:
    """A wrong password, no login at all, and a certificate that nobody vouches for are refused with the reason."""
    (home / "wrong").write_text("wrong")
    trusting = str(home / "cert.pem")
    for login, why in [
        (Login(user="me", password_file=str(home / "wrong"), tls_ca=trusting), "Authorization Violation"),
        (Login(tls_ca=trusting), "Authorization Violation"),
        (Login(user="me", password_file=str(home / "password")), "certificate verify failed"),
    ]:
        with pytest.raises(ConnectionFailed, match=why):
            attempt(server, login)
