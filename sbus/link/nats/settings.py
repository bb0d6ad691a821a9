"""The settings of a bridge; each has an option of ``twistd sbus-nats``."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from sbus.errors import UsageError, Violation
from sbus.link.interest import Interest
from sbus.link.subjects import check_realm
from sbus.protocol.keys import CURRENT
from sbus.protocol.packets import DEFAULT_MAX_PACKET

__all__ = ["Login", "Settings", "is_usable"]


def is_usable(url: str) -> bool:
    """Return whether a URL names a host, and a possible port if it names one."""
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """How a bridge proves to NATS who it is; NATS decides what that allows.

    :ivar user: the user's name; with `password_file`.
    :ivar password_file: a file with the password.
    :ivar token_file: a file with a token.
    :ivar nkey_file: a file with the seed of an nkey.
    :ivar creds: a file of credentials (a JWT and a seed), as ``nsc`` writes it.
    :ivar tls_ca: certificates to trust (PEM), in place of the system's.
    :ivar tls_cert: the bridge's own certificate (PEM).
    :ivar tls_key: the key of that certificate.
    """

    user: str | None = None
    password_file: str | None = None
    token_file: str | None = None
    nkey_file: str | None = None
    creds: str | None = None
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None

    def __post_init__(self) -> None:
        if (self.user is None) != (self.password_file is None):
            raise UsageError("--user and --password-file belong together: give both, or neither")
        if self.tls_key is not None and self.tls_cert is None:
            raise UsageError("--tls-key without --tls-cert: give the certificate of this key")
        ways = [self.user, self.token_file, self.nkey_file, self.creds]
        if sum(way is not None for way in ways) > 1:
            raise UsageError("--user, --token-file, --nkey-file and --creds exclude each other: give one of them")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The keys that a bridge carries, and its limits.

    :ivar nats: URLs of nats-servers of one cluster.
    :ivar name: the name of this bus among the joined ones.
    :ivar realm: the first tokens of all subjects; only bridges with the same realm hear each other.
    :ivar listed_out: patterns of the keys that leave this bus.
    :ivar listed_in: patterns of the keys that come to this bus, as far as clients of it want them.
    :ivar all_in: subscribe to the listed patterns whole, whoever wants them.
    :ivar prefix: put in front of the keys that leave, with a ``/``; empty: nothing.
    :ivar queue_bytes: limit of each of the two queues: packets that wait for NATS, and for the bus.
    :ivar confirm_time: seconds that nats-server may take to confirm, before the bridge connects again.
    :ivar max_packet: length of the longest packet of the bus, in bytes.
    :raises UsageError: if a value is not possible, with the remedy.
    """

    nats: tuple[str, ...]
    name: str
    realm: str = "sbus"
    listed_out: tuple[bytes, ...] = ()
    listed_in: tuple[bytes, ...] = ()
    all_in: bool = False
    prefix: bytes = b""
    queue_bytes: int = 8 << 20
    confirm_time: float = 5.0
    max_packet: int = DEFAULT_MAX_PACKET
    login: Login = field(default_factory=Login)

    def __post_init__(self) -> None:
        check_realm(self.realm)
        if not re.fullmatch("[A-Za-z0-9_.-]{1,64}", self.name):
            raise UsageError(f"--name={self.name}: use letters, digits, '_', '.' and '-', 64 characters at most")
        for url in self.nats:
            if not re.fullmatch(r"(nats|tls|ws|wss)://[^\s,]+", url) or not is_usable(url):
                raise UsageError(f"--nats={url}: give a URL such as nats://localhost:4222 or tls://nats.example:4222")
        if len({url.startswith("ws") for url in self.nats}) > 1:
            raise UsageError("--nats: web sockets (ws, wss) cannot be mixed with other URLs: give one kind")
        if not self.nats:
            raise UsageError("no NATS: give the URL of a server, such as --nats=nats://localhost:4222")
        if not self.listed_out and not self.listed_in:
            raise UsageError("nothing may cross: list patterns with --out=PATTERN and --in=PATTERN")
        if self.queue_bytes < self.max_packet:
            raise UsageError(f"--queue={self.queue_bytes}: at least one packet must fit ({self.max_packet} bytes)")
        try:
            CURRENT.check(self.prefix)
        except Violation as violation:
            raise UsageError(f"--prefix={CURRENT.shown(self.prefix)}: no key may begin so: {violation}") from None
        if b"\0" in self.prefix or CURRENT.is_secret(self.prefix) or len(self.prefix) > 256:
            raise UsageError(f"--prefix={CURRENT.shown(self.prefix)}: give an open key of at most 256 bytes")
        for listed in (self.listed_in, self.listed_out):
            for pattern in listed:
                if b"\0" in pattern:
                    raise UsageError(f"the pattern {pattern!r} contains a NUL byte, which ends a key")
            Interest(listed)
