"""Payloads in sealed memory over real sockets: who gets them how, what is refused, and what nobody leaves behind."""

from __future__ import annotations

import fcntl
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from sbus.protocol.bundles import unbundle
from sbus.syscalls.memfd import SEALS, Memfd
from sbus.syscalls.polling import is_readable
from tests.support.harness import OTHER_USER, THIRD_USER, TIMEOUT, Bus, Client
from tests.support.waiting import paused, wait_until

FUTURE_WRITE = 0x10
"""F_SEAL_FUTURE_WRITE, which the module fcntl lacks."""
ON = b"CMSG payload/on"
ANSWER = b"CMSG payload/on\x00262144 67108864"


def memory(*parts: bytes, seals: int = SEALS, size: int | None = None) -> Memfd:
    """Return memory with some bytes, sealed."""
    memfd = Memfd.create()
    os.write(memfd.fileno(), b"".join(parts))
    if size is not None:
        os.ftruncate(memfd.fileno(), size)
    if seals:
        fcntl.fcntl(memfd.fileno(), fcntl.F_ADD_SEALS, seals)
    return memfd


def framed(*packets: bytes) -> bytes:
    return b"BNDL" + b"".join(len(packet).to_bytes(4, "little") + packet for packet in packets)


def publish(client: Client, packet: bytes, *files: Memfd) -> None:
    """Send a packet with descriptors, as soon as there is room."""
    while True:
        try:
            socket.send_fds(client.sock, [packet], [file.fileno() for file in files])
            return
        except BlockingIOError:
            assert client.waits_for_room(20)


def publish_one(client: Client, key: bytes, payload: bytes) -> None:
    publish(client, b"FMSG %b\x000 %d" % (key, len(payload)), memory(payload))


def take(client: Client) -> tuple[bytes, Memfd | None]:
    """Receive a packet, perhaps with a descriptor."""
    assert client._wait(1)
    packet, files, flags, _ = socket.recv_fds(client.sock, 1 << 20, 4)
    assert len(files) < 2
    assert not flags & socket.MSG_CTRUNC
    return packet, Memfd(files[0]) if files else None


def payload_of(client: Client) -> tuple[bytes, bytes]:
    """Receive a message; return its key, and its payload as this user can read it."""
    packet, memfd = take(client)
    verb, _, rest = packet.partition(b" ")
    key, _, text = rest.partition(b"\0")
    if verb == b"MSG":
        assert memfd is None
        return key, text
    assert verb == b"FMSG", packet
    assert memfd is not None
    assert memfd.fault() is None
    return key, read(memfd, packet)


def read(memfd: Memfd, packet: bytes) -> bytes:
    """Return the payload that an FMSG packet names, as this user can read it."""
    offset, length = map(int, packet.partition(b"\0")[2].split())
    with memfd.map() as view:
        return view[offset : offset + length]


def asking(bus: Bus, *patterns: bytes, user: tuple[int, int] | None = None) -> Client:
    """A client that has asked for payloads, and received the answer."""
    client = bus.client(*patterns, user=user)
    client.send(ON)
    assert client.recv() == ANSWER
    return client


def open_memory(pid: int) -> int:
    """Return the number of memfds that a process has open."""
    found = 0
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            found += "/memfd:" in os.readlink(f"/proc/{pid}/fd/{fd}")
        except FileNotFoundError:
            pass
    return found


def forgets(bus: Bus) -> None:
    """Wait until the server has no memory file open: it closes the last one behind the batch that it came in."""
    wait_until(lambda: open_memory(bus.pid), lambda found: not found)


@pytest.fixture(scope="module", params=["compiled", "plain"])
def both(request, module_bus):
    """A bus with the compiled helper, and one without, for several users."""
    return module_bus("--mode=0777", env={"SBUS_PURE": "1" if request.param == "plain" else "0"})


@pytest.fixture
def shared(both):
    """The same without clients: those of the test before would be receivers that do not read."""
    yield both.lease()
    both.release()


def test_each_receiver_gets_it_as_it_has_asked(shared):
    """A receiver that has asked gets the memory, any other the bytes; senders are named to both."""
    one, named, plain = asking(shared, b"k"), asking(shared, b"k"), shared.client(b"k")
    for client in (named, plain):
        client.send(b"CMSG sender/on")
        assert client.recv() == b"CMSG sender/on\0"
    publisher = asking(shared)
    publish_one(publisher, b"k", b"x" * 100_000)
    assert payload_of(one) == (b"k", b"x" * 100_000)
    for client in (named, plain):
        assert client.recv().startswith(b"CMSG sender\0")
        assert payload_of(client) == (b"k", b"x" * 100_000)
    publisher.sync()
    forgets(shared)


def test_off_and_on(shared):
    """After off, an FMSG is an unknown packet, and what comes is plain; on again works."""
    a = asking(shared, b"off")
    a.send(b"CMSG payload/off")
    assert a.recv() == b"CMSG payload/off\0"
    b = asking(shared)
    publish_one(b, b"off", b"x" * 70_000)
    assert a.recv() == b"MSG off\0" + b"x" * 70_000
    a.send(ON)
    assert a.recv() == ANSWER
    publish_one(b, b"off", b"y" * 70_000)
    assert payload_of(a) == (b"off", b"y" * 70_000)
    a.send(b"CMSG payload/off")
    assert a.recv() == b"CMSG payload/off\0"
    a.send(b"FMSG off\x000 1")
    assert a.has_ended()


def test_too_large_for_a_packet(shared):
    """A receiver that has not asked loses what does not fit a packet, with a receipt at its place."""
    one, plain = asking(shared, b"k"), shared.client(b"k")
    plain.send(b"CMSG receipts/on")
    assert plain.recv() == b"CMSG receipts/on\0"
    publisher = asking(shared)
    publisher.msg(b"k", b"before")
    publish_one(publisher, b"k", b"x" * 500_000)
    publisher.msg(b"k", b"after")
    assert plain.receive(3) == [b"MSG k\0before", b"CMSG lost\x001 500006 1 too-large", b"MSG k\0after"]
    assert [payload_of(one)[1] for _ in range(3)] == [b"before", b"x" * 500_000, b"after"]


def test_a_bundle_with_one_descriptor(shared):
    """All FMSG of a bundle are ranges of one memory; with bundles they leave in one bundle, else one by one."""
    single, bundling, publisher = asking(shared, b"b"), asking(shared, b"b"), asking(shared)
    for client in (bundling, publisher):
        client.send(b"CMSG bundle/on")
        assert client.recv() == b"CMSG bundle/on\x0065536"
    memfd = memory(b"one", b"two", b"three")
    ranges = [b"FMSG b\x000 3", b"FMSG b\x003 3", b"FMSG b\x006 5"]
    publish(publisher, framed(*ranges, b"MSG b\0plain"), memfd)
    assert [payload_of(single)[1] for _ in range(4)] == [b"one", b"two", b"three", b"plain"]
    packet, received = take(bundling)
    assert received is not None
    assert unbundle([packet]) == ranges
    assert bundling.recv() == b"MSG b\0plain"


@pytest.mark.parametrize(
    ("packet", "files"),
    [
        (b"FMSG k\x000 3", lambda: [memory(b"abc", seals=0)]),
        *[
            (b"FMSG k\x000 3", lambda seals=SEALS & ~missing: [memory(b"abc", seals=seals)])
            for missing in (fcntl.F_SEAL_SEAL, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_WRITE)
        ],
        (b"FMSG k\x000 3", lambda: [memory(b"abc", seals=SEALS & ~fcntl.F_SEAL_WRITE | FUTURE_WRITE)]),
        (b"FMSG k\x000 3", lambda: [memory(b"abc", size=1 << 40)]),
        (b"FMSG k\x000 3", lambda: [Memfd(os.open("/dev/zero", os.O_RDWR))]),
        (b"FMSG k\x000 3", lambda: [Memfd(os.open("/etc/passwd", os.O_RDONLY))]),
        (b"FMSG k\x000 4", lambda: [memory(b"abc")]),
        (b"FMSG k\x003 1", lambda: [memory(b"abc")]),
        (b"FMSG k\x000 0", lambda: [memory(b"abc")]),
        (b"FMSG k\x00-1 2", lambda: [memory(b"abc")]),
        (b"FMSG k\x00999999999999999999 999999999999999999", lambda: [memory(b"abc")]),
        (b"FMSG k\x000 3 ", lambda: [memory(b"abc")]),
        (b"FMSG k", lambda: [memory(b"abc")]),
        (b"FMSG k\x000 3", lambda: []),
        (b"FMSG k\x000 3", lambda: [memory(b"abc"), memory(b"abc")]),
        (b"FMSG k\x000 3", lambda: [memory(b"abc")] * 200),
        (b"MSG k\x000 3", lambda: [memory(b"abc")]),
        (b"SUB k", lambda: [memory(b"abc")]),
        (b"FMSG !/cred/01/2/3/a\x000 3", lambda: [memory(b"abc")]),
        (framed(b"FMSG k\x000 3"), lambda: []),
        (framed(b"FMSG k\x000 3"), lambda: [memory(b"abc"), memory(b"abc")]),
        (framed(b"MSG k\x000 3"), lambda: [memory(b"abc")]),
        (framed(b"FMSG k\x000 3") + b"x", lambda: [memory(b"abc")]),
    ],
)
def test_violations(shared, packet, files):
    """Wrong memory, ranges and numbers of descriptors end the connection, and nothing of it stays open."""
    reader, a = asking(shared, b"k"), asking(shared)
    a.send(b"CMSG bundle/on")
    assert a.recv() == b"CMSG bundle/on\x0065536"
    publish(a, packet, *files())
    assert a.has_ended()
    assert reader.sync() == []
    forgets(shared)


def lingering() -> tuple[socket.socket, socket.socket]:
    """Return a TCP socket whose close takes a minute, and the other end, which does not read."""
    with socket.create_server(("127.0.0.1", 0)) as port:
        ours = socket.create_connection(port.getsockname())
        theirs, _ = port.accept()
    ours.setblocking(False)
    try:
        while True:
            ours.send(bytes(1 << 20))
    except BlockingIOError:
        pass
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 60))
    return ours, theirs


@pytest.mark.parametrize(
    ("packets", "copies"), [(1, 1), (1, 253), (5, 1)], ids=["alone", "all that fit", "behind a violation"]
)
def test_what_takes_long_to_close_stops_nobody(shared, packets, copies):
    """A descriptor whose close waits is closed elsewhere, wherever it was: the bus answers others at once."""
    hostile, other = asking(shared, user=OTHER_USER), shared.client()
    ours, theirs = lingering()
    with theirs:
        os.kill(shared.pid, signal.SIGSTOP)
        for _ in range(packets):
            socket.send_fds(hostile.sock, [b"FMSG k\x000 1"], [ours.fileno()] * copies)
        ours.close()
        os.kill(shared.pid, signal.SIGCONT)
        assert hostile.has_ended()
        assert other.sync() == []


def test_a_server_with_few_descriptors_reads_none_for_which_it_has_no_room(bus):
    """The kernel closes those at once, and that can take a minute; the client waits, and is read when there is room."""
    started = bus("--mode=0777")
    hostile, other = asking(started, user=OTHER_USER), started.client()
    limits = resource.prlimit(started.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(started.pid, resource.RLIMIT_NOFILE, (200, limits[1]))
    ours, theirs = lingering()
    memfd = memory(b"x")
    with theirs:
        with paused(started.pid):  # else the server may be the first to close it, and this process waits
            socket.send_fds(hostile.sock, [b"FMSG k\x000 1"], [*[memfd.fileno()] * 252, ours.fileno()])
            ours.close()
        assert other.sync() == []
        started.wait_log("fewer than 253 descriptors are free")
        resource.prlimit(started.pid, resource.RLIMIT_NOFILE, limits)
        assert hostile.has_ended()


def test_few_descriptors_do_not_keep_plain_messages_waiting(bus):
    """Only packets that come with descriptors need room for them."""
    started = bus("--mode=0777")
    client, receiver = asking(started, user=OTHER_USER), started.client(b"k", user=OTHER_USER)
    resource.prlimit(started.pid, resource.RLIMIT_NOFILE, (200, 1024))
    client.msg(b"k", b"1")
    client.msg(b"k", b"2")
    assert client.sync() == []
    assert [receiver.recv(), receiver.recv()] == [b"MSG k\x001", b"MSG k\x002"]


@pytest.mark.parametrize("last", ["nothing", "a message", "a payload"])
def test_a_client_that_hangs_up_is_let_go_however_few_descriptors_are_free(bus, last):
    """Its own descriptor may be among those that lack. Its plain messages are handled; a payload is lost."""
    started = bus("--mode=0777")
    client, receiver = asking(started, user=OTHER_USER), started.client(b"k", user=OTHER_USER)
    before = len(os.listdir(f"/proc/{started.pid}/fd"))
    resource.prlimit(started.pid, resource.RLIMIT_NOFILE, (200, 1024))
    if last == "a message":
        client.msg(b"k", b"last")
    elif last == "a payload":
        publish_one(client, b"k", b"lost")
    client.close()
    wait_until(lambda: len(os.listdir(f"/proc/{started.pid}/fd")), lambda found: found == before - 1)
    receiver.msg(b"k", b"next")
    expected = [b"MSG k\0last"] if last == "a message" else []
    assert receiver.sync() == [*expected, b"MSG k\0next"]


def test_what_one_user_passes_delays_the_closing_of_no_other(shared):
    """Behind twenty descriptors of one user whose close takes a minute, that of another user is closed at once."""
    ends = []
    for _ in range(20):
        hostile = asking(shared, user=OTHER_USER)
        ours, theirs = lingering()
        ends.append(theirs)
        with paused(shared.pid):  # else the server may be the first to close it, and this process waits
            socket.send_fds(hostile.sock, [b"FMSG k\x000 1"], [ours.fileno()])
            ours.close()
        assert hostile.has_ended()
    reading, writing = os.pipe()
    with open(reading, "rb") as pipe:
        other = asking(shared, user=THIRD_USER)
        socket.send_fds(other.sock, [b"FMSG k\x000 1"], [writing])
        os.close(writing)
        assert other.has_ended()
        assert is_readable(pipe, TIMEOUT)
        assert pipe.read() == b""
    for theirs in ends:
        theirs.close()


def test_a_silent_receiver_stops_nobody(shared):
    """It has 16 descriptors that it has not read, and part of the quota; another user's receiver gets all."""
    silent, fast = asking(shared, b"k", user=OTHER_USER), asking(shared, b"k", user=THIRD_USER)
    publisher = asking(shared)
    for number in range(200):
        publish_one(publisher, b"k", b"%03d" % number)
        assert payload_of(fast) == (b"k", b"%03d" % number)
    publisher.sync()
    waiting = open_memory(shared.pid)
    assert 64 // 3 <= waiting <= 32
    got = [int(payload_of(silent)[1]) for _ in range(16 + waiting)]
    assert got == sorted(set(got))
    assert got[:16] == list(range(16))
    silent.sync()
    forgets(shared)


def test_a_receiver_that_reads_late_gets_all_that_was_kept(shared):
    """The server goes on when the receiver has read some descriptors, though the socket was never full."""
    late, publisher = asking(shared, b"late"), asking(shared)
    for number in range(40):
        publish_one(publisher, b"late", b"%d" % number)
    publisher.msg(b"late", b"last")
    publisher.sync()
    assert [payload_of(late)[1] for _ in range(41)] == [*(b"%d" % number for number in range(40)), b"last"]


def test_thousands_of_descriptors_to_silent_readers(shared):
    """They make the server hold no more than the quota, and other users' messages go on."""
    silent = [asking(shared, b"flood", user=OTHER_USER) for _ in range(20)]
    publisher, other = asking(shared, user=OTHER_USER), asking(shared, b"other", user=THIRD_USER)
    for number in range(2_000):
        publish_one(publisher, b"flood", b"x")
        if number % 100 == 0:
            publish_one(other, b"other", b"%d" % number)
            assert payload_of(other) == (b"other", b"%d" % number)
    publisher.sync()
    assert open_memory(shared.pid) <= 64
    for reader in silent:
        reader.close()
    forgets(shared)


def test_ended_connections_with_unread_descriptors_are_bounded(shared):
    """With 64 of them a user, also root, gets no descriptors on others, until one has read its own, or has left."""
    publisher = asking(shared)
    silent = [asking(shared, b"k") for _ in range(64)]
    publish_one(publisher, b"k", b"x")
    publisher.sync()
    poll = select.poll()
    for client in silent:
        client.send(b"no packet of the protocol")
        poll.register(client.sock, 0)
    wait_until(lambda: len(poll.poll()), lambda ended: ended == 64)
    assert not takes_descriptors(shared)
    assert payload_of(silent[0]) == (b"k", b"x")
    wait_until(lambda: takes_descriptors(shared), bool)
    ended = asking(shared, b"k")
    publish_one(publisher, b"k", b"x")
    publisher.sync()
    ended.send(b"no packet of the protocol")
    wait_until(lambda: takes_descriptors(shared), lambda takes: not takes)
    silent[1].close()
    wait_until(lambda: takes_descriptors(shared), bool)


def takes_descriptors(bus: Bus) -> bool:
    """Return whether the server grants a new client's request for payloads."""
    client = bus.client()
    client.send(ON)
    granted = client.sync() == [ANSWER]
    client.close()
    return granted


@pytest.mark.parametrize("victim", ["publisher", "receiver"])
def test_killed(shared, victim):
    """A process that is killed while payloads wait leaves nothing behind."""
    reader, publisher = asking(shared, b"killed"), asking(shared)
    program = """
import os, socket, sys
from sbus.syscalls.memfd import Memfd
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.connect(sys.argv[1])
for packet in (b"CMSG payload/on", b"SUB killed"):
    sock.send(packet)
sock.recv(1000)
print("ready", flush=True)
if sys.argv[2] == "publisher":
    while True:
        memfd = Memfd.create()
        os.write(memfd.fileno(), b"x" * 5000)
        memfd.seal()
        socket.send_fds(sock, [b"FMSG killed\\x000 5000"], [memfd.fileno()])
sys.stdin.read()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(shared.address), victim], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdin is not None
    with process, process.stdout, process.stdin:
        process.stdout.readline()
        if victim == "publisher":
            for _ in range(30):
                assert payload_of(reader) == (b"killed", b"x" * 5000)
        else:
            for _ in range(40):
                publish_one(publisher, b"killed", b"x" * 5000)
            publisher.sync()
        process.send_signal(signal.SIGKILL)
        process.wait()
    drain(reader)
    publisher.sync()
    forgets(shared)


def test_half_of_the_receivers_end_meanwhile(shared):
    """Others, and those that only shut down sending, get all messages, in order; of those that ended nothing stays."""
    publisher, count = asking(shared), 20
    readers = [asking(shared, b"k") for _ in range(200)]
    for number in range(count):
        publish_one(publisher, b"k", b"%d" % number)
    publisher.sync()
    for at, reader in enumerate(readers):
        if at % 4 == 0:
            reader.close()
        elif at % 4 == 1:
            reader.send(b"no packet of the protocol")
        elif at % 4 == 2:
            reader.sock.shutdown(socket.SHUT_WR)
    publisher.sync()
    expected = [(b"k", b"%d" % number) for number in range(count)]
    for at, reader in enumerate(readers):
        if at % 4 > 1:
            assert [payload_of(reader) for _ in range(count)] == expected
        if at % 4 == 2:
            assert reader.has_ended()
    publisher.sync()
    forgets(shared)
    for reader in readers[1::4]:
        assert [payload_of(reader) for _ in range(1024 // 201)] == expected[: 1024 // 201]
        assert take(reader) == (b"", None)
    wait_until(lambda: takes_descriptors(shared), bool)


def drain(client: Client) -> None:
    """Read until the server has handled everything before."""
    client.send(b"CMSG !/cred/whoami")
    while not take(client)[0].startswith(b"CMSG !/cred/whoami"):
        pass


def test_policy(bus, directory):
    """A rule with ``payload = false`` denies FMSG, and nothing else."""
    policy = Path(directory, "policy.toml")
    policy.write_text('version = 1\n[[rule]]\nname = "no-memory"\npayload = false\n')
    started = bus(f"--policy={policy}", "--mode=0777")
    a = asking(started, b"k")
    a.send(b"CMSG denied/on")
    assert a.recv() == b"CMSG denied/on\0"
    publish_one(a, b"k", b"x")
    assert a.recv() == b"CMSG denied\0FMSG k no-memory"
    a.msg(b"k", b"plain")
    assert a.recv() == b"MSG k\0plain"


def test_last_values(bus):
    """A payload that fits a packet is kept as bytes; a longer one makes nothing be kept for its key."""
    started = bus("--last-value=k")
    publisher = asking(started)
    publish_one(publisher, b"k", b"x" * 70_000)
    publisher.sync()
    late = started.client()
    late.send(b"CMSG last\0k")
    assert late.receive(2) == [b"MSG k\0" + b"x" * 70_000, b"CMSG last/done\0k"]
    publish_one(publisher, b"k", b"x" * 500_000)
    publisher.sync()
    later = started.client()
    later.send(b"CMSG last\0k")
    assert later.recv() == b"CMSG last/done\0k"


def test_a_server_with_too_many_descriptors_under_way(become, bus, directory):
    """Readers of many users fill what a server that is not root may have under way; each message still arrives.

    The kernel then refuses descriptors (ETOOMANYREFS). A message that fits a packet goes with its bytes; a longer one
    waits until some are read.
    """
    directory.chmod(0o777)
    started = bus("--mode=0777", before=["prlimit", "--nofile=640", *become])
    users = [(12_101 + each, 12_101) for each in range(25)]
    readers = [asking(started, b"k", user=user) for user in users for _ in range(2)]  # none gets them by mail
    publisher = asking(started)
    for number in range(16):
        publish_one(publisher, b"k", b"%d" % number)
    publish_one(publisher, b"k", long := bytes(500_000))
    publisher.sync()
    taken = [[take(reader) for _ in range(16)] for reader in readers]
    for reader, packets in zip(readers, taken, strict=True):
        texts = [packet.partition(b"\0")[2] if memfd is None else read(memfd, packet) for packet, memfd in packets]
        assert texts == [b"%d" % number for number in range(16)]
        assert payload_of(reader) == (b"k", long)
    as_bytes = [packet for packets in taken for packet, memfd in packets if memfd is None]
    assert 50 <= len(as_bytes) <= 16 * 50 - 600


def test_over_a_stream(bus, directory):
    """Over a stream socket, ``payload/on`` is unknown, and the bytes come."""
    started = bus(f"--stream=s={directory}/stream")
    publisher = asking(started)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(f"{directory}/stream")
        sock.settimeout(20)
        for packet in (ON, b"SUB k", b"CMSG !/cred/whoami"):
            sock.send(len(packet).to_bytes(4, "little") + packet)
        answer = sock.recv(1000)
        assert b"payload" not in answer
        publish_one(publisher, b"k", b"x" * 70_000)
        expected = b"MSG k\0" + b"x" * 70_000
        received = b""
        while len(received) < 4 + len(expected):
            received += sock.recv(1 << 20)
        assert received[4:] == expected
