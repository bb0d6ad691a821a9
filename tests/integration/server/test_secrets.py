"""Secret keys: only clients with the IDs in the key receive the message."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess

import pytest

from sbus.syscalls.sockets import overflow_ids
from tests.support.harness import OTHER_USER, SAME_USER, THIRD_USER, WHOAMI, goes_on

OVERFLOW_USER = overflow_ids()

OPEN_PATTERNS = [b"", b"*", b"**", b"*/", b"*/*", b"*/cred/", b"*/cred/*/*/*/*", b"*/*/*/*/*/", b"!*/", b"!*", b"!**/"]
"""Patterns that anyone may subscribe to, and that may seem to reach a secret."""

REFUSED_PATTERNS = [
    b"!",
    b"!/",
    b"!/*",
    b"!/*/",
    b"!/*/*/*/*/*",
    b"!//",
    b"!/cred",
    b"!/cred*",
    b"!/cred/",
    b"!/cred/*",
    b"!/cred//",
    b"!/cred///",
    b"!/cred/*/*/*/",
    b"!/cred/*/*/*/*",
    b"!/cred/*///",
    b"!/cred//*//",
    b"!/cred///*/",
    b"!/cred/%d*///",
    b"!/cred//%d*//",
    b"!/cred///%d*/",
    b"!/cred/%d",
    b"!/cred/%d/",
    b"!/cred/%d/%d",
    b"!/cred/%d/%d/",
    b"!/cred/%d/%d/%d",
    b"!/cred/0%d/%d/%d/",
    b"!/cred/%d/0%d/%d/",
    b"!/cred/%d/%d/0%d/",
    b"!/cred/+%d/%d/%d/",
    b"!/cred/ %d/%d/%d/",
    b"!/cred/%d/%d/%d.0/",
    b"!/cred/-%d/%d/%d/",
    b"!/cred/4294967296///",
    b"!/cred/99999999999999999999///",
    b"!/credit////",
    b"!/CRED////",
    b"!/whoami",
    b"!/cred/whoami",
    b"*/!/cred////",
    b"/!/cred////",
    b"a/!",
    b"a/!/",
    b"a/!/b",
    b"!/cred////!",
    b"!/cred////!/",
    b"!/cred////!/cred/",
    b"!/cred////!/cred/1/2/3",
    b"!/cred////a/!/b",
]
"""Patterns that no client may subscribe to (``%d``: the subscriber's gid, uid and pid, in this order)."""


def filled_in(pattern, client):
    ids = (client.gid, client.uid, client.pid)
    return pattern % ids[: pattern.count(b"%d")] if b"%d" in pattern else pattern


class TestWhoami:
    """Every client learns its own peer credentials."""

    def test_of_another_process(self, shared):
        """The IDs are those of the process that connected, even if another process holds the socket now."""
        client = shared.client(user=SAME_USER)
        client.send(WHOAMI)
        assert client.recv() == b"CMSG !/cred/whoami\0!/cred/%d/%d/%d" % (*reversed(SAME_USER), client.pid)
        assert client.pid != os.getpid()

    def test_of_another_user(self, as_root, bus):
        """Another user's client gets that user's IDs in the reply: first the GID, then the UID."""
        started = bus("--mode=0777")
        client = started.client(user=(12003, 12004))
        client.send(WHOAMI)
        assert client.recv() == b"CMSG !/cred/whoami\0!/cred/12004/12003/%d" % client.pid


class TestSubscribers:
    """Permission to subscribe, and the messages that a subscriber receives."""

    def test_own_credentials(self, shared):
        """A client may subscribe with its own credentials, and gets what anyone sends there."""
        alice = shared.client(user=SAME_USER)
        alice.sub(alice.credentials + b"/inbox")
        assert alice.sync() == []
        anyone = shared.client()
        packet = anyone.msg(alice.credentials + b"/inbox", b"for alice")
        anyone.sync()
        assert alice.sync() == [packet]

    def test_own_messages(self, shared):
        """What a client sends to itself comes back to it, unless it has turned echo off."""
        client = shared.client(b"!/cred////self")
        packet = client.msg(client.credentials + b"/self")
        assert client.sync() == [packet]
        client.cmsg(b"echo/off")
        client.msg(client.credentials + b"/self")
        assert client.sync() == []

    def test_empty_fields(self, shared):
        """An empty field of a pattern stands for an empty field of a key and for the subscriber's own ID."""
        client = shared.client(b"!/cred////inbox", user=SAME_USER)
        other = shared.client(b"!/cred////inbox", user=SAME_USER)
        gid, uid, pid = client.gid, client.uid, client.pid
        mine = [b"//", b"%d//" % gid, b"/%d/" % uid, b"//%d" % pid, b"%d/%d/%d" % (gid, uid, pid)]
        theirs = [b"//%d" % (pid + 1_000_000), b"%d//" % (gid + 1), b"/%d/" % (uid + 1), b"//%d" % other.pid]
        publisher = shared.client()
        for ids in theirs:
            publisher.msg(b"!/cred/%b/inbox" % ids)
        expected = [publisher.msg(b"!/cred/%b/inbox" % ids) for ids in mine]
        publisher.sync()
        assert client.sync() == expected
        shared_with_other = [b"MSG !/cred/%b/inbox\0" % ids for ids in [theirs[3], *mine[:3]]]
        assert other.sync() == shared_with_other

    def test_given_field(self, shared):
        """An ID in a pattern matches that ID only, not an empty field."""
        client = shared.client()
        client.sub(b"!/cred/%d///inbox" % client.gid)
        client.sync()
        client.msg(b"!/cred////inbox")
        client.msg(b"!/cred//%d//inbox" % client.uid)
        packet = client.msg(b"!/cred/%d///inbox" % client.gid)
        assert client.sync() == [packet]

    @pytest.mark.parametrize(
        ("rest", "hits", "misses"),
        [
            (b"", [b"", b"a", b"a/b"], []),
            (b"*", [b"", b"a"], [b"a/b"]),
            (b"a/", [b"a/", b"a/b"], [b"a", b""]),
            (b"a*", [b"a", b"ab"], [b"b"]),
        ],
    )
    def test_wildcards_in_the_rest(self, shared, rest, hits, misses):
        """Behind the credentials wildcards and a trailing slash mean what they mean elsewhere."""
        with shared.client(b"!/cred////" + rest) as client:
            for key in misses:
                client.msg(client.credentials + b"/" + key, b"miss")
            expected = [client.msg(client.credentials + b"/" + key, b"hit") for key in hits]
            assert client.sync() == expected

    def test_one_copy(self, shared):
        """A secret message comes once, however many patterns match it."""
        client = shared.client(b"!/cred////", b"!/cred////*", b"!/cred////once", b"")
        client.sub(client.credentials + b"/once")
        packet = client.msg(client.credentials + b"/once")
        assert client.sync() == [packet]

    def test_unsubscribed(self, shared):
        """UNSUB ends a secret subscription, and only the one that reads like it."""
        client = shared.client(b"!/cred////gone")
        client.unsub(client.credentials + b"/gone")
        packet = client.msg(client.credentials + b"/gone")
        assert client.sync() == [packet]
        client.unsub(b"!/cred////gone")
        client.msg(client.credentials + b"/gone")
        assert client.sync() == []


class TestChains:
    """Credentials behind credentials, for servers behind servers."""

    def test_delivery(self, shared):
        """A secret for a client behind another server goes to the holder of the outer credentials."""
        server = shared.client(b"!/cred////!/cred/1/2/3/", user=SAME_USER)
        everything = shared.client(b"!/cred////", user=SAME_USER)
        publisher = shared.client()
        packet = publisher.msg(server.credentials + b"/!/cred/1/2/3/inbox", b"pass this on")
        publisher.msg(server.credentials + b"/!/cred/1/2/4/inbox")
        publisher.msg(everything.credentials + b"/!/cred/1/2/3/inbox")
        publisher.sync()
        assert server.sync() == [packet]
        assert everything.sync() == [b"MSG %b/!/cred/1/2/3/inbox\0" % everything.credentials]

    def test_outer_credentials_decide(self, bus):
        """A client's own credentials in the inner place give it no access to another client's outer ones."""
        started = bus("--on-violation=ignore")
        victim = started.client(b"!/cred////", user=SAME_USER)
        spy = started.client(user=SAME_USER)
        spy.sub(victim.credentials + b"/!" + spy.credentials[1:] + b"/")
        assert spy.sync() == []
        packet = spy.msg(victim.credentials + b"/!" + spy.credentials[1:] + b"/x")
        assert spy.sync() == []
        assert victim.sync() == [packet]

    def test_twice(self, shared):
        """Chains may be longer than two."""
        client = shared.client(b"!/cred////!/cred/1/2/3/!/cred/4/5/6/")
        packet = client.msg(client.credentials + b"/!/cred/1/2/3/!/cred/4/5/6/x")
        assert client.sync() == [packet]


class TestSpies:
    """No client receives another client's secret."""

    def secrets(self, victim, publisher):
        """Publish secrets to a victim, of every shape; returns how many there are."""
        ids = [victim.credentials[7:], b"//%d" % victim.pid]
        rests = [b"", b"x", b"x/", b"cred/", b"!/cred/1/2/3/x"]
        for one, rest in itertools.product(ids, rests):
            publisher.msg(b"!/cred/%b/%b" % (one, rest), b"secret")
        return len(ids) * len(rests)

    @pytest.mark.parametrize("pattern", OPEN_PATTERNS, ids=repr)
    def test_open_pattern(self, shared, pattern):
        """No wildcard and no empty pattern reaches a secret key; the pattern itself is allowed."""
        with shared.client(b"!/cred////", user=SAME_USER) as victim, shared.client(pattern) as spy:
            count = self.secrets(victim, spy)
            assert spy.sync() == []
            assert len(victim.sync()) == count

    @pytest.mark.parametrize("pattern", REFUSED_PATTERNS, ids=repr)
    def test_refused_pattern(self, shared, pattern):
        """A truncated, starred, misspelt or misplaced pattern is refused, and costs the connection."""
        with shared.client() as spy:
            spy.sub(filled_in(pattern, spy))
            assert spy.has_ended()

    def test_nothing_of_all_that(self, bus):
        """A client that tries everything, on a bus that forgives it, sees no secret at all."""
        started = bus("--on-violation=ignore")
        victim = started.client(b"!/cred////", user=SAME_USER)
        spy = started.client(user=SAME_USER)
        patterns = OPEN_PATTERNS + [filled_in(pattern, spy) for pattern in REFUSED_PATTERNS]
        patterns += [filled_in(pattern, victim) for pattern in REFUSED_PATTERNS if b"%d" in pattern]
        patterns += [victim.credentials + rest for rest in (b"", b"/", b"/*", b"/x", b"*", b"/!/cred////")]
        segments = [b"!", b"*", b"", b"cred", b"!*", b"%d" % victim.pid]
        for depth in range(1, 5):
            patterns += [b"/".join(parts) for parts in itertools.product(segments, repeat=depth)]
        for pattern in patterns:
            spy.sub(pattern)
        assert spy.sync() == []
        publisher = started.client()
        count = self.secrets(victim, publisher)
        publisher.sync()
        assert spy.sync() == []
        assert len(victim.sync()) == count
        assert started.stop() == 0
        refused = started.log.count("violation by client")
        refused += sum(map(int, re.findall(r"(\d+) more violations by client", started.log)))
        assert len(REFUSED_PATTERNS) < refused < len(patterns)

    @pytest.mark.parametrize("which", ["gid", "uid", "pid"])
    def test_foreign_id(self, as_root, bus, which):
        """One ID that is not the subscriber's own is enough to be refused; the log says so."""
        started = bus("--mode=0777")
        spy = started.client(user=OTHER_USER)
        ids = {"gid": spy.gid, "uid": spy.uid, "pid": spy.pid}
        ids[which] = {"gid": THIRD_USER[1], "uid": THIRD_USER[0], "pid": os.getpid()}[which]
        spy.sub(b"!/cred/%d/%d/%d/" % tuple(ids.values()))
        assert spy.has_ended()
        started.wait_log(f"pid {spy.pid} uid {spy.uid} gid {spy.gid}: subscription to another client's secret key")
        alone = started.client(user=OTHER_USER)
        fields = {name: b"%d" % value if name == which else b"" for name, value in ids.items()}
        alone.sub(b"!/cred/%b/%b/%b/" % tuple(fields.values()))
        assert alone.has_ended()

    def test_root_has_no_privilege(self, as_root, bus):
        """Root and the server's own user are no exception."""
        started = bus("--mode=0777")
        victim = started.client(b"!/cred////", user=OTHER_USER)
        root = started.client()
        root.sub(b"!/cred//%d//" % victim.uid)
        assert root.has_ended()
        assert goes_on(started)

    def test_two_users(self, as_root, bus):
        """A secret for a user reaches all that user's clients that ask for it, and no other user's."""
        started = bus("--mode=0777")
        one = started.client(b"!/cred//%d//" % OTHER_USER[0], user=OTHER_USER)
        two = started.client(b"!/cred////", user=OTHER_USER)
        spies = [started.client(b"!/cred////", b"", b"*/", user=user) for user in (THIRD_USER, SAME_USER)]
        packet = spies[0].msg(b"!/cred//%d//x" % OTHER_USER[0], b"secret")
        assert spies[0].sync() == []
        assert spies[1].sync() == []
        assert one.sync() == [packet]
        assert two.sync() == [packet]

    def test_group(self, as_root, bus):
        """A secret for a group reaches those whose own (primary) group it is."""
        started = bus("--mode=0777")
        member = started.client(b"!/cred/777///", user=(OTHER_USER[0], 777))
        stranger = started.client(b"!/cred////", user=(OTHER_USER[0], 778))
        packet = stranger.msg(b"!/cred/777///x")
        assert stranger.sync() == []
        assert member.sync() == [packet]

    def test_routes_are_not_mixed_up(self, shared):
        """A key that was looked up is looked up again after another client subscribes or leaves."""
        publisher = shared.client()
        first = shared.client(user=SAME_USER)
        key = b"!/cred//%d//routes" % first.uid
        publisher.msg(key, b"nobody yet")
        publisher.sync()
        first.sub(b"!/cred////routes")
        assert first.sync() == []
        one = publisher.msg(key, b"first")
        publisher.sync()
        second = shared.client(b"!/cred//%d//*" % first.uid, user=SAME_USER)
        two = publisher.msg(key, b"both")
        publisher.sync()
        assert first.sync() == [one, two]
        first.unsub(b"!/cred////routes")
        assert first.sync() == []
        three = publisher.msg(key, b"second")
        publisher.sync()
        assert first.sync() == []
        assert second.sync() == [two, three]


class TestUnprovenIdentity:
    """IDs that are shared by many prove nothing."""

    @pytest.mark.parametrize("which", [0, 1], ids=["uid", "gid"])
    def test_overflow_id(self, as_root, bus, which):
        """A client with an overflow ID may not subscribe to secrets, even by its PID, but gets a whoami reply."""
        started = bus("--mode=0777")
        user = (OVERFLOW_USER[0], OTHER_USER[1]) if which == 0 else (OTHER_USER[0], OVERFLOW_USER[1])
        client = started.client(user=user)
        client.send(WHOAMI)
        assert client.recv() == b"CMSG !/cred/whoami\0" + client.credentials
        client.sub(b"!/cred///%d/" % client.pid)
        assert client.has_ended()
        started.wait_log("the client's IDs are shared by many processes, so they prove nothing")

    def test_pid_zero(self, as_root, bus):
        """Clients outside the server's PID namespace all have the PID 0: they get no secrets, but the rest."""
        command = ["unshare", "--pid", "--fork", "--kill-child"]
        if not shutil.which("unshare") or subprocess.run([*command, "true"]).returncode:
            pytest.skip("unshare(1) cannot make a PID namespace here")
        started = bus(before=command)
        client = started.client(b"open")
        client.send(WHOAMI)
        assert client.recv() == b"CMSG !/cred/whoami\0!/cred/%d/%d/0" % (client.gid, client.uid)
        packet = client.msg(b"open")
        assert client.sync() == [packet]
        client.sub(b"!/cred////")
        assert client.has_ended()


class TestPublishers:
    """Anyone may publish a secret, to a key that is one."""

    @pytest.mark.parametrize(
        "key",
        [
            b"!",
            b"!/",
            b"!/x",
            b"!/cred",
            b"!/cred/",
            b"!/cred/1/2",
            b"!/cred/1/2/3",
            b"!/cred/*/*/*/",
            b"!/cred/01/2/3/x",
            b"!/cred/1/2/4294967296/x",
            b"!/cred/a/2/3/x",
            b"!/cred/1/2/3/!",
            b"!/cred/1/2/3/!/cred/1/2/3",
            b"a/!/cred/1/2/3/x",
            b"a/!",
            b"a/!/b",
            b"/!",
        ],
        ids=repr,
    )
    def test_malformed_key(self, shared, key):
        """Publishing to a reserved key that is not secret is a violation, and reaches no client."""
        with shared.client(b"", b"*/", b"!/cred////") as listener, shared.client() as client:
            client.msg(key, b"x")
            assert client.has_ended()
            assert listener.sync() == []

    def test_to_another_user(self, as_root, bus):
        """A publisher need not have the IDs in the secret key."""
        started = bus("--mode=0777")
        reader = started.client(b"!/cred////", user=OTHER_USER)
        publisher = started.client(user=THIRD_USER)
        packet = publisher.msg(reader.credentials + b"/from/a/stranger", b"hello")
        assert publisher.sync() == []
        assert reader.sync() == [packet]


class TestProof:
    """The example of the protocol's text."""

    def test_mutual(self, as_root, bus):
        """Two clients prove their identity to each other by repeating tokens that only they can read."""
        started = bus("--mode=0777")
        a = started.client(b"hello", user=OTHER_USER)
        b = started.client(b"hello", user=THIRD_USER)
        names = []
        for client in (a, b):
            client.send(WHOAMI)
            names.append(client.recv().partition(b"\0")[2])
            client.sub(names[-1] + b"/proof/")
            client.sync()
        a.cmsg(b"echo/off")
        a.msg(b"hello", names[0])
        claimed_a = b.recv().partition(b"\0")[2]
        key = claimed_a + b"/proof/" + os.urandom(8).hex().encode()
        b.msg(key, names[1])
        packet = a.recv()
        assert packet.startswith(b"MSG " + key)
        claimed_b = packet.partition(b"\0")[2]
        challenge = os.urandom(16)
        a.msg(claimed_b + b"/proof/challenge", challenge)
        answer = b.recv().partition(b"\0")[2]
        b.msg(key, answer)
        assert a.recv() == b"MSG " + key + b"\0" + challenge
