"""Senders over real sockets: the kernel's word on who published, for several users, and what it is the word on."""

from __future__ import annotations

import socket

from tests.support.harness import OTHER_USER

THIRD_USER = (OTHER_USER[0] + 1, OTHER_USER[1] + 1)
ON = b"CMSG sender/on"


def names(packets: list[bytes]) -> list[tuple[bytes, bytes]]:
    """Return the payload of each message with the credentials of its sender, as a receiver reads them."""
    named, last = [], b""
    for packet in packets:
        verb, _, payload = packet.partition(b"\0")
        if verb == b"CMSG sender":
            last = payload.split(b" ")[1]
        elif verb.startswith(b"MSG "):
            named.append((payload, last))
    return named


def test_three_users(as_root, bus):
    """Each message has the credentials of the process that connected, whoever writes to the socket now."""
    started = bus("--mode=0777")
    reader = started.client(b"k")
    reader.cmsg(b"sender/on")
    assert reader.sync() == [ON + b"\0"]
    # Another process has made the connections of these, ended, and left their sockets to this one.
    one, two = started.client(user=OTHER_USER), started.client(user=THIRD_USER)
    assert {one.pid, two.pid}.isdisjoint({reader.pid})
    expected, got = [], []
    for turn in range(3):
        for publisher in (one, two, reader):
            publisher.msg(b"k", b"%d" % turn)
            if publisher is not reader:
                publisher.sync()
            got += reader.sync()
            expected.append((b"%d" % turn, publisher.credentials))
    assert names(got) == expected


def test_publishers_that_have_left(lease):
    """Who closed, or shut down writing, is named all the same."""
    started = lease()
    reader, closed, half = started.client(b"k"), started.client(), started.client()
    reader.cmsg(b"sender/on")
    reader.sync()
    closed.msg(b"k", b"1")
    closed.sync()
    half.msg(b"k", b"2")
    half.sock.shutdown(socket.SHUT_WR)
    assert half.has_ended()
    closed.close()
    later = started.client()
    later.msg(b"k", b"3")
    later.sync()
    packets = reader.sync()
    numbers = [int(packet.split(b"\0")[1].split(b" ")[0]) for packet in packets if packet.startswith(b"CMSG sender\0")]
    assert numbers == sorted(set(numbers))
    assert [payload for payload, _ in names(packets)] == [b"1", b"2", b"3"]


def test_without_senders(as_root, bus):
    """With --no-sender others than root do not learn who publishes, and find out with whoami."""
    started = bus("--mode=0777", "--no-sender")
    reader, root = started.client(b"k", user=OTHER_USER), started.client(b"k")
    for client in (reader, root):
        client.cmsg(b"sender/on")
    assert (reader.sync(), root.sync()) == ([], [ON + b"\0"])
    root.msg(b"k", b"1")
    root.sync()
    assert reader.sync() == [b"MSG k\x001"]


def test_the_early_dialect_knows_no_senders(bus):
    """There it is a violation, as every control message."""
    client = bus("--dialect=early").client()
    client.send(ON)
    assert client.has_ended()
