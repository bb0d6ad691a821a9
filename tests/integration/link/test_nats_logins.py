"""Logins to a real nats-server, with and without TLS."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import subprocess
import time
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

_CERTIFIED = """
authorization {{ token: "t0ken" }}
tls {{ cert_file: "{home}/cert.pem", key_file: "{home}/key.pem", ca_file: "{home}/cert.pem", verify: true }}
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


@pytest.fixture(scope="module")
def certified(home: Path) -> Iterator[NatsServer]:
    """A nats-server that requires a token, and a certificate of the client."""
    (home / "token").write_text("t0ken\n")
    (home / "certified").write_text(_CERTIFIED.format(home=home))
    server = NatsServer(home, "-c", str(home / "certified")).wait_started()
    yield server
    server.ensure_gone()


class _Entity:
    """An operator, an account or a user: a key, and what it signs (JWT, version 2).

    :param kind: the kind; its first letter begins the public key.
    """

    def __init__(self, kind: str, prefix: int) -> None:
        self.kind = kind
        self.seed = nkeys.encode_seed(os.urandom(32), prefix)
        self._pair = nkeys.from_seed(self.seed)
        self.name = self._pair.public_key.decode()

    def sign(self, other: _Entity, **claims: object) -> str:
        """Return the signed claims about an entity."""
        about = {"iss": self.name, "sub": other.name, "name": other.kind, "iat": int(time.time())}
        about["nats"] = {**claims, "type": other.kind, "version": 2}
        words = [_encoded(json.dumps(each).encode()) for each in ({"typ": "JWT", "alg": "ed25519-nkey"}, about)]
        return ".".join([*words, _encoded(self._pair.sign(".".join(words).encode()))])


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


@pytest.fixture(scope="module")
def trusting(home: Path) -> Iterator[NatsServer]:
    """A nats-server that knows an operator and an account; the credentials of a user are in ``me.creds``."""
    operator, account, user, stranger = (
        _Entity(kind, prefix)
        for kind, prefix in (
            ("operator", nkeys.PREFIX_BYTE_OPERATOR),
            ("account", nkeys.PREFIX_BYTE_ACCOUNT),
            ("user", nkeys.PREFIX_BYTE_USER),
            ("account", nkeys.PREFIX_BYTE_ACCOUNT),
        )
    )
    limits = {"subs": -1, "data": -1, "payload": -1}
    of_account = {**limits, "imports": -1, "exports": -1, "wildcards": True, "conn": -1, "leaf": -1}
    for name, signer in (("me", account), ("stranger", stranger)):
        token = signer.sign(user, pub={"allow": ["sbus.a.>"]}, sub={}, **limits)
        (home / f"{name}.creds").write_text(
            f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n"
            f"-----BEGIN USER NKEY SEED-----\n{user.seed.decode()}\n------END USER NKEY SEED------\n"
        )
    (home / "operator").write_text(
        f"operator: {operator.sign(operator)}\nresolver: MEMORY\n"
        f"resolver_preload: {{ {account.name}: {operator.sign(account, limits=of_account)} }}\n"
    )
    server = NatsServer(home, "-c", str(home / "operator")).wait_started()
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


def test_a_token_and_a_certificate_of_the_client(certified: NatsServer, home: Path) -> None:
    """A token logs in, from a file or in the URL, if the bridge shows the certificate that nats-server requires."""
    tls = {"tls_ca": str(home / "cert.pem"), "tls_cert": str(home / "cert.pem"), "tls_key": str(home / "key.pem")}
    assert attempt(certified, Login(token_file=str(home / "token"), **tls)) == []
    assert attempt(certified, Login(**tls), url=certified.url.replace("nats://", "tls://t0ken@")) == []
    (home / "wrong").write_text("wrong")
    with pytest.raises(ConnectionFailed, match="Authorization Violation"):
        attempt(certified, Login(token_file=str(home / "wrong"), **tls))
    with pytest.raises(ConnectionFailed, match=r"certificate required|[Ll]ost|closed|reset|Broken pipe"):
        attempt(certified, Login(token_file=str(home / "token"), tls_ca=str(home / "cert.pem")))


def test_credentials_of_an_operator_s_user(trusting: NatsServer, home: Path) -> None:
    """A file of credentials logs in, with the rights that it names; one that no known account has signed does not."""
    assert attempt(trusting, Login(creds=str(home / "me.creds"))) == []
    (report,) = attempt(trusting, Login(creds=str(home / "me.creds")), publish="sbus.b.x")
    assert 'permissions violation for publish to "sbus.b.x"' in report
    for login in (Login(creds=str(home / "stranger.creds")), Login()):
        with pytest.raises(ConnectionFailed, match="Authorization Violation"):
            attempt(trusting, login)
