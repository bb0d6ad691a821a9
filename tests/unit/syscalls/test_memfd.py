"""Sealed memory, and packets that come with descriptors."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import resource
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbus.syscalls import _pure, batch
from sbus.syscalls.descriptors import open_descriptors
from sbus.syscalls.elsewhere import Closing
from sbus.syscalls.memfd import Attached, Memfd, adopt, receive_from
from sbus.syscalls.sockets import pass_descriptors, send_with
from tests.support.waiting import wait_until

Pair = tuple[socket.socket, socket.socket]
READERS = (_pure.PacketReader, batch.PacketReader)


def sealed(data: bytes) -> Memfd:
    memfd = Memfd.create()
    os.write(memfd.fileno(), data)
    memfd.seal()
    return memfd


@contextlib.contextmanager
def connected() -> Iterator[Pair]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        yield ours, theirs


def send_descriptors(sock: socket.socket, packet: bytes, *descriptors: int) -> None:
    socket.send_fds(sock, [packet], list(descriptors))


class TestMemfd:
    """Memory, its seals, and its descriptor."""

    def test_sealed_memory_has_no_fault_and_is_read_and_mapped(self) -> None:
        """What was written is what is read and what is mapped, and the mapping cannot be written to."""
        memfd = sealed(b"x" * 5_000)
        assert memfd.fault() is None
        assert memfd.size == 5_000
        assert memfd.read(4_999, 1) == b"x"
        with pytest.raises(OSError, match="allocate"):
            memfd.read(4_999, 2)
        mapped = memfd.map()
        assert mapped[:5_000] == b"x" * 5_000
        assert memoryview(mapped).readonly

    def test_memory_without_seals_holes_and_other_files_are_faults(self) -> None:
        """No seal, three of four seals, a hole, a disk file, a directory, a pipe and a device: each has a fault."""
        unsealed = Memfd.create()
        assert "seal" in str(unsealed.fault())
        sparse = Memfd.create()
        os.ftruncate(sparse.fileno(), 1 << 40)
        sparse.seal()
        assert "holes" in str(sparse.fault())
        reader, writer = os.pipe()
        os.close(writer)
        with tempfile.TemporaryFile() as file:
            others = [os.dup(file.fileno()), os.open("/", os.O_RDONLY), os.open(os.devnull, os.O_RDONLY), reader]
        for descriptor in others:
            assert Memfd(descriptor).fault()

    def test_pages_beyond_the_end_do_not_make_up_for_holes(self) -> None:
        """Memory that is one hole has a fault, also if as many bytes are allocated beyond its end."""
        memfd = Memfd.create()
        size = 16 * mmap.PAGESIZE
        os.ftruncate(memfd.fileno(), size)
        allocate = ctypes.CDLL(None, use_errno=True).fallocate
        keep_size = 1
        assert allocate(memfd.fileno(), keep_size, ctypes.c_long(size), ctypes.c_long(size)) == 0
        memfd.seal()
        status = os.fstat(memfd.fileno())
        assert status.st_blocks * 512 >= status.st_size
        assert "holes" in str(memfd.fault())

    def test_much_memory_beyond_the_end_is_a_fault(self) -> None:
        """It stays: to free 1 GiB takes 50 ms of the caller. A huge page is no fault."""
        allocate = ctypes.CDLL(None, use_errno=True).fallocate
        keep_size = 1
        for mebibytes, is_freed in ((2, True), (4, False)):
            memfd = Memfd.create()
            os.write(memfd.fileno(), b"x")
            assert allocate(memfd.fileno(), keep_size, ctypes.c_long(0), ctypes.c_long(mebibytes << 20)) == 0
            memfd.seal()
            assert (memfd.fault() is None) is is_freed
            assert (os.fstat(memfd.fileno()).st_blocks * 512 < 1 << 20) is is_freed

    def test_a_descriptor_for_reading_only_is_a_fault(self) -> None:
        """Pages beyond the end can be freed only with a descriptor that is open for writing."""
        memfd = sealed(b"x")
        assert "reading" in str(Memfd(os.open(f"/proc/self/fd/{memfd.fileno()}", os.O_RDONLY)).fault())

    def test_sealed_memory_cannot_be_changed_by_any_way(self) -> None:
        """Neither writing, growing, shrinking nor opening it anew for writing changes sealed memory."""
        memfd = sealed(b"x" * 100)
        for change in (
            lambda: os.pwrite(memfd.fileno(), b"y", 0),
            lambda: os.ftruncate(memfd.fileno(), 50),
            lambda: os.ftruncate(memfd.fileno(), 200),
        ):
            with pytest.raises(PermissionError):
                change()
        again = os.open(f"/proc/self/fd/{memfd.fileno()}", os.O_RDWR)
        try:
            with pytest.raises(PermissionError):
                os.pwrite(again, b"y", 0)
        finally:
            os.close(again)

    def test_a_writable_mapping_prevents_sealing(self) -> None:
        """EBUSY is raised as long as somebody could write."""
        memfd = Memfd.create()
        os.ftruncate(memfd.fileno(), 4_096)
        with mmap.mmap(memfd.fileno(), 4_096), pytest.raises(OSError, match="busy"):
            memfd.seal()
        memfd.seal()

    def test_a_page_that_the_kernel_uses_delays_sealing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The kernel says EBUSY then, too, and another attempt succeeds."""
        memfd = Memfd.create()
        os.write(memfd.fileno(), b"x")
        real, refusals = fcntl.fcntl, [OSError(errno.EBUSY, "busy")] * 2

        def refuse(fd: int, command: int, argument: int = 0) -> int:
            if command == fcntl.F_ADD_SEALS and refusals:
                raise refusals.pop()
            return real(fd, command, argument)

        monkeypatch.setattr(fcntl, "fcntl", refuse)
        memfd.seal()
        assert memfd.fault() is None
        assert not refusals

    def test_the_descriptor_is_closed_with_the_last_reference(self) -> None:
        """Nothing is left open."""
        before = open_descriptors()
        memfd = sealed(b"x")
        assert open_descriptors() == before + 1
        del memfd
        assert open_descriptors() == before


def received(memfd: Memfd) -> Attached:
    """Return a packet that has arrived with a descriptor of this memory."""
    return Attached.of(b"packet", adopt([os.dup(memfd.fileno())]), False)


def test_received_memory_is_closed_with_its_packet() -> None:
    """As long as that takes no time, at once: another thread would cost more."""
    memfd = sealed(b"x" * (1 << 20))
    before = open_descriptors()
    packet = received(memfd)
    assert open_descriptors() == before + 1
    del packet
    assert open_descriptors() == before


@pytest.mark.parametrize("mebibytes", [[17], [8] * 8], ids=["too large", "too many"])
def test_memory_that_takes_long_to_free_is_closed_elsewhere(mebibytes: list[int]) -> None:
    """It is closed all the same, whoever closes it."""
    before = open_descriptors()
    packets = [received(sealed(bytes(size << 20))) for size in mebibytes]
    assert open_descriptors() == before + len(packets)
    packets.clear()
    wait_until(open_descriptors, lambda count: count == before)


def test_the_reader_frees_no_more_than_its_allowance() -> None:
    """However much memory a user has passed: one read can bring 2 GiB, which would stop the server for 90 ms."""
    closing, gate, memfd = Closing(), threading.Event(), sealed(bytes(17 << 20))
    closing.free(gate.wait)
    receive_from(closing)
    before = open_descriptors()
    packets = [received(memfd) for _ in range(40)]
    packets.clear()
    assert open_descriptors() == before + 40
    gate.set()
    wait_until(open_descriptors, lambda count: count == before)


def in_child(call: Callable[..., int], *args: object) -> int:
    """Return what a call returns in a child of this process: 0 to 254."""
    pid = os.fork()
    if not pid:
        code = 255
        try:
            code = call(*args)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _open_after_failed_read(reader: batch.PacketReader, sock: socket.socket) -> int:
    """Read without memory for a packet of 60,000 bytes; return how many descriptors that leaves open."""
    before = open_descriptors()
    resource.setrlimit(resource.RLIMIT_AS, (0, resource.RLIM_INFINITY))
    taken = []
    with contextlib.suppress(MemoryError):
        while True:
            taken.append(bytes(60_000))
    with contextlib.suppress(MemoryError):
        return 200 + len(reader.read(sock)[0])
    return open_descriptors() - before


@pytest.mark.parametrize("reader_class", READERS)
class TestReading:
    """`PacketReader` with descriptors."""

    def test_a_packet_with_a_descriptor_is_attached(self, reader_class: type[batch.PacketReader]) -> None:
        """Packets with and without a descriptor arrive in order, and only the former are `Attached`."""
        with connected() as (ours, theirs):
            memfd = sealed(b"payload")
            ours.send(b"one")
            assert send_with(ours, b"two", memfd.fileno())
            ours.send(b"three")
            packets, ended = reader_class(100, descriptors=True).read(theirs)
        assert packets == [b"one", b"two", b"three"]
        assert not ended
        assert [type(packet) for packet in packets] == [bytes, Attached, bytes]
        (file,) = packets[1].files  # type: ignore[attr-defined]
        assert not packets[1].is_cut  # type: ignore[attr-defined]
        assert not os.get_inheritable(file.fileno())
        assert file.read(0, 7) == b"payload"

    @given(counts=st.lists(st.integers(0, 5), min_size=1, max_size=20), lengths=st.data())
    def test_no_descriptor_is_left_open(
        self, reader_class: type[batch.PacketReader], counts: list[int], lengths: st.DataObject
    ) -> None:
        """Whatever comes with whatever packets, too long ones and the end included, is closed with the packets."""
        before = open_descriptors()
        memfd = sealed(b"payload")
        with connected() as (ours, theirs):
            for count in counts:
                packet = b"x" * lengths.draw(st.integers(0, 12))
                send_descriptors(ours, packet, *[memfd.fileno()] * count)
            reader = reader_class(10, read_bytes=64, descriptors=True)  # so packets of 2 bytes count as large
            for most in (1, 64, 64):
                packets, _ = reader.read(theirs, most)
                assert all(len(packet.files) in (1, 2) for packet in packets if isinstance(packet, Attached))
            del packets
        del memfd
        wait_until(open_descriptors, lambda count: count == before)

    def test_descriptors_come_after_other_control_data(self, reader_class: type[batch.PacketReader]) -> None:
        """As on a socket that asks for the peer's credentials with each packet."""
        with connected() as (ours, theirs):
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, True)
            memfd = sealed(b"payload")
            before = open_descriptors()
            send_descriptors(ours, b"packet", memfd.fileno(), memfd.fileno())
            (packet,) = reader_class(100, descriptors=True).read(theirs)[0]
            assert isinstance(packet, Attached)
            assert len(packet.files) == 2
            del packet
            assert open_descriptors() == before

    def test_a_packet_keeps_two_descriptors(self, reader_class: type[batch.PacketReader]) -> None:
        """All that fit arrive, as the kernel could take long to close them; the packet tells that it had more than two.

        A peer that is paused would hold 2,024 of the server's descriptors by 8 packets that nobody handles.
        """
        with connected() as (ours, theirs):
            memfd = sealed(b"payload")
            before = open_descriptors()
            for copies in (2, 3, 253):
                send_descriptors(ours, b"packet", *[memfd.fileno()] * copies)
            packets = reader_class(100, descriptors=True).read(theirs)[0]
            assert open_descriptors() == before + 6
        cut = [(len(packet.files), packet.is_cut) for packet in packets if isinstance(packet, Attached)]
        assert cut == [(2, False), (2, True), (2, True)]

    def test_descriptors_are_closed_if_there_is_no_memory_for_packets(
        self, reader_class: type[batch.PacketReader]
    ) -> None:
        """The kernel has given them to the process already, which would keep them for good."""
        with connected() as (ours, theirs):
            memfd, reader = sealed(b"payload"), reader_class(60_000, descriptors=True)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18)
            for _ in range(3):
                send_descriptors(ours, b"x" * 60_000, memfd.fileno(), memfd.fileno())
            assert in_child(_open_after_failed_read, reader, theirs) == 0

    def test_a_reader_for_plain_packets_receives_no_descriptor(self, reader_class: type[batch.PacketReader]) -> None:
        """The packet arrives, and the kernel closes what came with it."""
        with connected() as (ours, theirs):
            memfd = sealed(b"payload")
            before = open_descriptors()
            send_with(ours, b"packet", memfd.fileno())
            packets, _ = reader_class(100).read(theirs)
            assert [type(packet) for packet in packets] == [bytes]
            assert open_descriptors() == before


def test_a_full_socket_takes_no_packet_with_a_descriptor() -> None:
    """`send_with` returns False then, and raises nothing."""
    with connected() as (ours, _):
        memfd = sealed(b"payload")
        while send_with(ours, b"x" * 10_000, memfd.fileno()):
            pass


def test_the_kernel_refuses_descriptors_where_they_are_not_passed() -> None:
    """A socket takes descriptors only while it wants them, if the kernel can refuse them."""
    with connected() as (ours, theirs):
        memfd = sealed(b"payload")
        pass_descriptors(theirs, False)
        with contextlib.suppress(PermissionError):
            send_with(ours, b"packet", memfd.fileno())
        pass_descriptors(theirs, True)
        assert send_with(ours, b"packet", memfd.fileno())


@pytest.mark.parametrize("wanted", [False, True])
def test_nothing_but_descriptors_is_passed(wanted: bool) -> None:
    """Whatever the socket's maker has asked the kernel for."""
    options = (socket.SO_PASSCRED, socket.SO_PASSSEC)
    with connected() as (_, theirs):
        for option in options:
            theirs.setsockopt(socket.SOL_SOCKET, option, True)
        pass_descriptors(theirs, wanted)
        assert [theirs.getsockopt(socket.SOL_SOCKET, option) for option in options] == [0, 0]
