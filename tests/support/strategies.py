"""Hypothesis strategies for keys, patterns, packets and peers: few different ones, so that they match often."""

from __future__ import annotations

from hypothesis import strategies as st

from sbus.errors import Violation
from sbus.protocol.keys import CURRENT, EARLY, Dialect, PeerCredentials

__all__ = [
    "PEERS",
    "dialects",
    "keys",
    "may_subscribe",
    "patterns",
    "patterns_near",
    "payloads",
    "peers",
    "texts",
    "usable",
]

PEERS = (
    PeerCredentials(pid=7, uid=1, gid=1),
    PeerCredentials(pid=8, uid=1, gid=1),
    PeerCredentials(pid=8, uid=2, gid=1),
    PeerCredentials(pid=9, uid=2, gid=2),
)
"""Clients that share some of their IDs, so that each field of a secret key matters."""

peers = st.sampled_from(PEERS)
dialects = st.sampled_from((CURRENT, EARLY))

texts = st.binary(max_size=12).map(lambda text: text.replace(b"\0", b""))
"""Any bytes that a key can contain, `usable` in a dialect or not."""

payloads = st.binary(max_size=12)

# Segments that differ in little, with each shape of wildcard, and '!' where it is an ordinary byte.
_SEGMENTS = (b"", b"a", b"b", b"ab", b"abc", b"*", b"a*", b"ab*", b"a**", b"*a", b"a*b", b"a!", b"!a", b"cred")
_IDS = (b"", b"", b"1", b"2", b"7", b"8")


def usable(text: bytes, dialect: Dialect) -> bool:
    """Return whether this text is an allowed key or pattern, credentials aside."""
    try:
        dialect.check(text)
    except Violation:
        return False
    return True


def may_subscribe(dialect: Dialect, peer: PeerCredentials, pattern: bytes) -> bool:
    """Return whether this peer's credentials allow a pattern that is `usable`."""
    secret = dialect.check(pattern)
    return secret is None or secret.belongs_to(peer)


@st.composite
def _secret(draw: st.DrawFn) -> bytes:
    """Draw a secret key or pattern, sometimes with the IDs of one of the `PEERS`."""
    if draw(st.booleans()):
        peer = draw(peers)
        own = (b"%d" % peer.gid, b"%d" % peer.uid, b"%d" % peer.pid)
        ids = [field if draw(st.booleans()) else b"" for field in own]
    else:
        ids = [draw(st.sampled_from(_IDS)) for _ in range(3)]
    chained = draw(st.sampled_from((b"", b"", b"", b"!/cred/1/2/3/")))
    rest = b"/".join(draw(st.lists(st.sampled_from(_SEGMENTS), max_size=3)))
    return b"!/cred/%b/%b" % (b"/".join(ids), b"/" + chained + rest)


@st.composite
def _joined(draw: st.DrawFn, dialect: Dialect) -> bytes:
    kind = draw(st.integers(0, 9))
    if dialect.control and kind < 3:
        return draw(_secret())
    if kind == 9:
        return draw(texts)
    return dialect.separator.join(draw(st.lists(st.sampled_from(_SEGMENTS), max_size=4)))


def keys(dialect: Dialect = CURRENT) -> st.SearchStrategy[bytes]:
    """Keys that a client may publish to: open and secret ones, some with ``*`` as an ordinary byte."""
    return _joined(dialect).filter(lambda key: usable(key, dialect))


patterns = keys
"""Patterns that are allowed, credentials aside; every allowed key is an allowed pattern."""


@st.composite
def patterns_near(draw: st.DrawFn, some_keys: list[bytes], dialect: Dialect = CURRENT) -> bytes:
    """Draw a pattern that resembles one of these keys: the key itself, with wildcards, or a parent."""
    key = draw(st.sampled_from(some_keys))
    start = len(b"!/cred/") if dialect.is_secret(key) else 0
    segments = key[start:].split(dialect.separator)
    ids = 3 if start else 0
    kept = draw(st.integers(min(ids + 1, len(segments)), len(segments)))
    cut = segments[:kept]
    for i in range(ids, kept):
        if draw(st.integers(0, 3)) == 0:
            cut[i] = cut[i][: draw(st.integers(0, len(cut[i])))] + b"*"
    if kept < len(segments) or draw(st.integers(0, 3)) == 0:
        cut.append(b"")
    pattern = key[:start] + dialect.separator.join(cut)
    return pattern if usable(pattern, dialect) else key
