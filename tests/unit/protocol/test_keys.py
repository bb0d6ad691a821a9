"""Matching, reserved keys and secret keys: the rules of the protocol, one by one."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbus.errors import Violation, ViolationReason
from sbus.protocol.keys import CURRENT, EARLY, OpenPattern, PeerCredentials, SecretKey, matches, matches_open
from tests.support.strategies import PEERS, dialects, keys, patterns, peers, texts

ME = PeerCredentials(pid=30, uid=20, gid=10)


@pytest.mark.parametrize(
    ("pattern", "matched", "unmatched"),
    [
        # Rule 1: the empty pattern.
        (b"", [b"", b"a", b"/", b"a/b/c", b"*"], []),
        # No wildcard: byte for byte.
        (b"a/b", [b"a/b"], [b"", b"a", b"a/", b"a/b/", b"a/bc", b"a//b", b"A/b", b"a/b/c", b"x/a/b"]),
        # Rule 2: * is the longest run up to the next separator, and there is no going back.
        (b"*", [b"", b"a", b"a.b", b"*"], [b"/", b"a/", b"a/b"]),
        (b"a/*", [b"a/", b"a/b", b"a/*"], [b"a", b"a/b/", b"a/b/c"]),
        (b"a/b*", [b"a/b", b"a/bc"], [b"a/bc/d", b"a/c", b"a/"]),
        (b"a/*b", [], [b"a/b", b"a/*b", b"a/xb", b"a/"]),
        (b"a/*b/", [], [b"a/b/", b"a/*b/", b"a/xb/c"]),
        (b"a**", [b"a", b"ab", b"a*"], [b"b", b"a/"]),
        (b"*/*", [b"/", b"a/", b"/b", b"a/b"], [b"", b"a", b"a/b/c"]),
        (b"*/b", [b"/b", b"a/b"], [b"b", b"a/b/"]),
        # Rule 3: the trailing separator.
        (b"a/", [b"a/", b"a/b", b"a/b/c", b"a//"], [b"a", b"", b"ab/c", b"/a/"]),
        (b"a/*/c/", [b"a/b/c/", b"a/b/c/d/e", b"a//c/"], [b"a/b/c", b"a/c/d", b"a/b/cd/"]),
        (b"/", [b"/", b"/a", b"//"], [b"", b"a", b"a/"]),
        (b"//", [b"//", b"//a"], [b"/", b"/a/"]),
        (b"*/", [b"/", b"a/", b"a/b/c"], [b"", b"a"]),
        (b"a*/", [b"a/", b"ab/c"], [b"a", b"b/", b"/"]),
        # Rule 4: * in a key is an ordinary byte.
        (b"a", [], [b"*", b"a*"]),
        (b"a*", [b"a*", b"a*b"], [b"*"]),
        # Bytes, not text.
        (b"\xff/*", [b"\xff/\xfe\n"], [b"\xc3\xbf/a"]),
    ],
)
def test_matching(pattern, matched, unmatched):
    """Rules 1 to 4, in both dialects, each with its separator."""
    assert [key for key in matched if not matches(pattern, key)] == []
    assert [key for key in unmatched if matches(pattern, key)] == []

    def dotted(text):
        return text.translate(bytes.maketrans(b"/.", b"./"))

    assert [key for key in matched if not matches(dotted(pattern), dotted(key), EARLY)] == []
    assert [key for key in unmatched if matches(dotted(pattern), dotted(key), EARLY)] == []


def test_a_long_key_costs_no_more_than_the_pattern() -> None:
    """A key is split no further than the pattern goes: 200,000 segments take the time of the few that are compared."""
    key = b"state/" + b"a/" * 200_000
    began = time.process_time()
    for pattern in (b"state/b", b"state/", b"*/b/", b"state/*/*"):
        wanted = OpenPattern(pattern)
        assert [wanted.matches(key) for _ in range(100)] == [pattern == b"state/"] * 100
    assert time.process_time() - began < 0.5  # splitting all of it takes 4 s


@given(st.data(), dialects)
def test_matching_is_a_possessive_regular_expression(data, dialect):
    """For open keys: each ``*`` is a run that gives nothing back, a last separator anything below it."""
    text = st.one_of(texts, st.text(f"ab*{dialect.separator.decode()}", max_size=6).map(str.encode))
    pattern, key = data.draw(text), data.draw(text)
    separator = re.escape(dialect.separator)
    expression = (b"[^%b]*+" % separator).join(map(re.escape, pattern.split(b"*")))
    if not pattern or pattern.endswith(dialect.separator):
        expression += b".*"
    found = re.fullmatch(expression, key, re.DOTALL) is not None
    assert matches_open(pattern, key, dialect.separator) == found


@pytest.mark.parametrize(
    "pattern",
    [
        b"",
        b"*",
        b"*/",
        b"**",
        b"*/*",
        b"*/cred/",
        b"*/*/*/*/*/",
        b"!*",
        b"!*/",
        b"!*/cred/10/20/30/",
        b"!*/*/*/*/*/*",
        b"*/cred////",
        b"*/cred/10/20/30/inbox",
        b"/",
    ],
)
@pytest.mark.parametrize("key", [b"!/cred////", b"!/cred/10/20/30/", b"!/cred/10/20/30/inbox", b"!/cred////inbox"])
def test_no_wildcard_reaches_a_secret(pattern, key):
    """Rule 5: only a pattern that begins literally with !/cred/ matches a secret key, even one of the reader's own."""
    assert not matches(pattern, key, CURRENT, ME)
    assert not matches(pattern, key, CURRENT, None)


RESERVED = [
    b"!",
    b"!/",
    b"!/cred",
    b"!/cred/",
    b"!/cred/10",
    b"!/cred/10/20",
    b"!/cred/10/20/30",
    b"!/credx/10/20/30/",
    b"!/CRED/10/20/30/",
    b"!//10/20/30/",
    b"!/other",
    b"!/*",
    b"!/*/",
    b"!/cred*",
    b"!/cr*/10/20/30/",
    b"a/!",
    b"a/!/b",
    b"/!",
    b"a/!/",
    b"*/!",
    b"a/!/cred/10/20/30/",
    b"/!/cred/10/20/30/",
    b"!/cred/10/20/30/!",
    b"!/cred/10/20/30/!/",
    b"!/cred/10/20/30/x/!",
    b"!/cred/10/20/30/!/cred/1/2/3",
    b"!/cred/10/20/30/!/other/1/2/3/",
    b"!/cred/!/20/30/",
    b"!/cred/10/20/!/",
    b"!/!/cred/1/2/3/",
]


@pytest.mark.parametrize("text", RESERVED)
def test_reserved(text):
    """Rule 8: a segment that is exactly ``!`` is allowed only where complete credentials begin."""
    with pytest.raises(Violation) as caught:
        CURRENT.check(text)
    assert caught.value.reason in (ViolationReason.RESERVED_KEY, ViolationReason.BAD_ID)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"a",
        b"foo!/bar",
        b"a!b",
        b"!a",
        b"a!",
        b"!!",
        b"!!/a",
        b"!a/cred/1/2/3/",
        b"a/!b",
        b"!*",
        b"*!",
        b"!.x",
        b"!\n/a",
    ],
)
def test_not_reserved(text):
    """A ! with another byte beside it is an ordinary byte."""
    assert CURRENT.check(text) is None
    assert not CURRENT.is_secret(text)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (b"!/cred////", SecretKey(b"", b"", b"", b"")),
        (b"!/cred/0/0/0/", SecretKey(b"0", b"0", b"0", b"")),
        (b"!/cred/10/20/30/inbox", SecretKey(b"10", b"20", b"30", b"inbox")),
        (b"!/cred/10//30/a/*", SecretKey(b"10", b"", b"30", b"a/*")),
        (b"!/cred/4294967295///", SecretKey(b"4294967295", b"", b"", b"")),
        (b"!/cred/////", SecretKey(b"", b"", b"", b"/")),
        (b"!/cred/1/2/3/!/cred/4/5/6/x", SecretKey(b"1", b"2", b"3", b"!/cred/4/5/6/x")),
        (b"!/cred/1/2/3/a/!/cred/4///x/!/cred////", SecretKey(b"1", b"2", b"3", b"a/!/cred/4///x/!/cred////")),
    ],
)
def test_secret_keys(text, parts):
    """A secret key has three IDs, decimal or empty, and a rest in which further credentials may begin."""
    assert CURRENT.check(text) == parts
    assert CURRENT.is_secret(text)


@pytest.mark.parametrize(
    "field",
    [
        b"*",
        b"1*",
        b"*1",
        b"01",
        b"00",
        b"-1",
        b"+1",
        b" 1",
        b"1 ",
        b"1\n",
        b"0x1",
        b"a",
        b"\xb2",
        b"4294967296",
        b"10000000000",
        b"9" * 5000,
    ],
)
@pytest.mark.parametrize("position", [0, 1, 2])
def test_bad_ids(field, position):
    """An ID that is no number, has a leading zero or exceeds 32 bits is refused in every position."""
    fields = [b"1", b"2", b"3"]
    fields[position] = field
    text = b"!/cred/%b/rest" % b"/".join(fields)
    for key in (text, b"!/cred/1/2/3/" + text):
        with pytest.raises(Violation) as caught:
            CURRENT.check(key)
        assert caught.value.reason is ViolationReason.BAD_ID


@pytest.mark.parametrize("credentials", [b"!/cred/1/2/3/", b"!/cred////"])
def test_a_chain_has_a_most(credentials):
    """A key has up to 1,024 credentials: as many as fit a packet would stop the bus for 50 ms."""
    secret = CURRENT.check(credentials * 1_024 + b"x")
    assert secret is not None
    assert secret.rest == credentials * 1_023 + b"x"
    with pytest.raises(Violation) as caught:
        CURRENT.check(credentials * 1_025 + b"x")
    assert caught.value.reason is ViolationReason.RESERVED_KEY


@pytest.mark.parametrize(
    ("pattern", "matched", "unmatched"),
    [
        (
            b"!/cred////inbox",
            [b"!/cred////inbox", b"!/cred/10/20/30/inbox", b"!/cred/10///inbox", b"!/cred//20/30/inbox"],
            [b"!/cred/11/20/30/inbox", b"!/cred///31/inbox", b"!/cred////", b"!/cred////inbox/", b"inbox"],
        ),
        (
            b"!/cred/10/20/30/inbox",
            [b"!/cred/10/20/30/inbox"],
            [b"!/cred////inbox", b"!/cred/10/20//inbox", b"!/cred/10/20/31/inbox", b"!/cred/30/20/10/inbox"],
        ),
        (
            b"!/cred//20//a/",
            [b"!/cred//20//a/", b"!/cred/10/20//a/b/c", b"!/cred/10/20/30/a/"],
            [b"!/cred////a/", b"!/cred//20//a", b"!/cred//21//a/", b"!/cred//20/31/a/"],
        ),
        (b"!/cred////", [b"!/cred////", b"!/cred////a/b", b"!/cred/10/20/30/a"], [b"!/cred/1///a", b"a"]),
        (b"!/cred////a/*", [b"!/cred////a/b", b"!/cred/10///a/"], [b"!/cred////a/b/c", b"!/cred////a"]),
        (
            b"!/cred////!/cred/1/2/3/",
            [b"!/cred////!/cred/1/2/3/", b"!/cred/10/20/30/!/cred/1/2/3/x"],
            [b"!/cred////!/cred///3/", b"!/cred/1/2/3/", b"!/cred////a/!/cred/1/2/3/"],
        ),
        (b"!/cred////*/cred/*/", [b"!/cred////!/cred/1/2/3/"], [b"!/cred/1/2/3/"]),
    ],
)
def test_secrets_for_their_reader(pattern, matched, unmatched):
    """An empty field of a pattern matches an empty field or the subscriber's own ID; any other matches only itself."""
    assert [key for key in matched if not matches(pattern, key, CURRENT, ME)] == []
    assert [key for key in unmatched if matches(pattern, key, CURRENT, ME)] == []


@pytest.mark.parametrize(
    "pattern", [b"!/cred/11///", b"!/cred//21//", b"!/cred///31/", b"!/cred/20/10/30/x", b"!/cred/11/20/30/"]
)
def test_foreign_secrets(pattern):
    """Each ID in a pattern must be the subscriber's own; otherwise the pattern matches nothing at all."""
    secret = CURRENT.check(pattern)
    assert secret is not None
    assert not secret.belongs_to(ME)
    assert not matches(pattern, pattern, CURRENT, ME)
    assert not matches(pattern, b"!/cred/10/20/30/x", CURRENT, ME)


def test_own_secrets():
    """A pattern with any choice of the subscriber's own IDs belongs to it."""
    for gid in (b"", b"10"):
        for uid in (b"", b"20"):
            for pid in (b"", b"30"):
                secret = CURRENT.check(b"!/cred/%b/%b/%b/x" % (gid, uid, pid))
                assert secret is not None
                assert secret.ids == b"%b/%b/%b" % (gid, uid, pid)
                assert secret.belongs_to(ME)
                readers = secret.readers(ME)
                assert len(readers) == len(set(readers)) == 2 ** (gid, uid, pid).count(b"")
                assert secret.ids in readers


@given(st.data(), peers)
def test_secrets_stay_secret(data, subscriber):
    """With any pattern, a secret key is received only by a subscriber that has all IDs in the key."""
    key, pattern = data.draw(keys().filter(CURRENT.is_secret)), data.draw(patterns())
    secret = CURRENT.check(key)
    assert secret is not None
    if matches(pattern, key, CURRENT, subscriber):
        assert secret.belongs_to(subscriber)
        assert pattern.startswith(b"!/cred/")
    assert not matches(pattern, key, CURRENT, None)


@given(texts)
def test_check_raises_violations_only(text):
    """Any bytes are an allowed key or a violation; a key is secret if and only if it has a secret key's parts."""
    for dialect in (CURRENT, EARLY):
        try:
            secret = dialect.check(text)
        except Violation:
            assert b"!" in text
        else:
            assert (secret is not None) == dialect.is_secret(text)


@given(st.lists(st.sampled_from((b"!", b"cred", b"", b"1", b"01", b"*", b"a")), max_size=12).map(b"/".join))
def test_every_lone_bang_begins_credentials(text):
    """Rule 8, checked another way: after each lone ``!``, from the start on, three IDs and a slash must follow."""
    segments = text.split(b"/")
    bangs = [i for i, segment in enumerate(segments) if segment == b"!"]

    def complete(at):
        ids = segments[at + 2 : at + 5]
        return segments[at + 1 : at + 2] == [b"cred"] and len(segments) > at + 5 and set(ids) <= {b"", b"1"}

    good = not bangs or (bangs[0] == 0 and all(complete(i) for i in bangs))
    try:
        CURRENT.check(text)
    except Violation:
        assert not good
    else:
        assert good


@pytest.mark.parametrize(
    ("text", "good"),
    [
        (b"!", False),
        (b"!.cred.1.2.3.", False),
        (b"!a.b", False),
        (b"!/cred/1/2/3/", False),
        (b"a.!", True),
        (b"a.!b", True),
        (b"a!.b", True),
        (b"a/!/b", True),
        (b"", True),
    ],
)
def test_reserved_in_the_early_dialect(text, good):
    """The early dialect reserves keys whose first segment begins with ``!``, and has no secret keys."""
    assert not EARLY.is_secret(text)
    if good:
        assert EARLY.check(text) is None
    else:
        with pytest.raises(Violation) as caught:
            EARLY.check(text)
        assert caught.value.reason is ViolationReason.RESERVED_KEY


def test_dialects_have_their_own_separator():
    """The separator of one dialect is an ordinary byte in the other."""
    assert matches(b"*", b"a.b", CURRENT)
    assert not matches(b"*", b"a.b", EARLY)
    assert matches(b"*", b"a/b", EARLY)
    assert matches(b"a.", b"a.b", EARLY)
    assert not matches(b"a.", b"a.b", CURRENT)


@pytest.mark.parametrize(("pattern", "key"), [(b"!", b"a"), (b"a", b"!"), (b"!/cred/01///", b"a")])
def test_matches_refuses_what_no_peer_may_use(pattern, key):
    """The reference raises for patterns and keys that the server would refuse before matching."""
    with pytest.raises(Violation):
        matches(pattern, key, CURRENT, PEERS[0])


@pytest.mark.parametrize(
    ("key", "shown"),
    [
        (b"", ""),
        (b"a/b c", "a/b c"),
        (b"a\nb\x1b[31m\x7f", "a\\x0ab\\x1b[31m\\x7f"),
        (b"\xff\xc3\xa4", "\\xff\\xc3\\xa4"),
        (b"!/cred/1/2/3/", "!/cred/1/2/3/"),
        (b"!/cred/1/2/3/the secret", "!/cred/1/2/3/..."),
        (b"!/cred////!/cred/1/2/3/x", "!/cred////..."),
        (b"x" * 200, "x" * 200),
        (b"x" * 201, "x" * 200 + "..."),
    ],
)
def test_keys_as_logs_show_them(key, shown):
    """A key in a log is escaped and truncated, and contains nothing of a secret key's rest."""
    assert CURRENT.shown(key) == shown


@given(texts)
def test_shown_is_one_line_of_ascii(text):
    """No key can write control characters or a second line into a log."""
    for dialect in (CURRENT, EARLY):
        shown = dialect.shown(text)
        assert shown.isascii()
        assert shown.isprintable()
