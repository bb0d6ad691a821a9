# cython: language_level=3, boundscheck=False, wraparound=False
"""Batches of packets with recvmmsg(2) and sendmmsg(2); the twin in plain Python is `sbus.syscalls._pure`.

No call waits (MSG_DONTWAIT), and each handles at most one batch, so the GIL is kept: no other thread can change the list
of packets, or close a socket, while the kernel reads from it. `send_to_each` keeps it for all of its sockets.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_Check, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.exc cimport PyErr_SetFromErrno
from libc.errno cimport EAGAIN, ECONNRESET, EINTR, ENOMEM, errno
from libc.stddef cimport size_t
from libc.string cimport memchr, memcmp, memcpy, memset

from sbus.protocol.packets import Split, Truncated
from sbus.syscalls.memfd import Attached, adopt

cdef extern from "sys/socket.h" nogil:
    cdef struct iovec:
        void *iov_base
        size_t iov_len
    cdef struct msghdr:
        iovec *msg_iov
        size_t msg_iovlen
        void *msg_control
        size_t msg_controllen
        int msg_flags
    cdef struct cmsghdr:
        size_t cmsg_len
        int cmsg_level
        int cmsg_type
    cmsghdr *CMSG_FIRSTHDR(msghdr *)
    cmsghdr *CMSG_NXTHDR(msghdr *, cmsghdr *)
    unsigned char *CMSG_DATA(cmsghdr *)
    size_t CMSG_LEN(size_t)
    int SOL_SOCKET, SCM_RIGHTS, MSG_CTRUNC, MSG_CMSG_CLOEXEC
    cdef struct mmsghdr:
        msghdr msg_hdr
        unsigned int msg_len
    ssize_t recvmsg(int, msghdr *, int)
    int recvmmsg(int, mmsghdr *, unsigned int, int, void *)
    int sendmmsg(int, mmsghdr *, unsigned int, int)
    ssize_t send(int, const void *, size_t, int)
    ssize_t sendmsg(int, msghdr *, int)
    ssize_t recv(int, void *, size_t, int)
    int MSG_DONTWAIT, MSG_NOSIGNAL, MSG_PEEK, MSG_TRUNC

cdef extern from "sys/mman.h" nogil:
    void *mmap(void *, size_t, int, int, int, long)
    int munmap(void *, size_t)
    int madvise(void *, size_t, int)
    int PROT_READ, PROT_WRITE, MAP_PRIVATE, MAP_ANONYMOUS, MAP_NORESERVE, MADV_DONTNEED
    void *MAP_FAILED

cdef extern from "time.h" nogil:
    cdef struct timespec:
        long tv_sec
    int clock_gettime(int, timespec *)
    int CLOCK_MONOTONIC_COARSE

cdef enum:
    MAX_BATCH = 64
    # Bytes after which a read ends, if the caller does not say.
    READ_BYTES = 1 << 20
    # A sender can continue to send while recvmmsg(2) reads, so a batch of the largest packets had 26 MB and took 40 ms,
    # most of it for memory that is touched for the first time. After a read with a large packet, and after one that
    # ended for its bytes, the reads of the next ten seconds ask for one large packet or four small ones at a time,
    # whatever the connection. Rejected, for their cost to a batch of small packets: always four at a time (14 %),
    # the timeout of recvmmsg(2) (8 %), and asking for the bytes in the socket first (3 %).
    WARY_SECONDS = 10
    WARY_BATCH = 4
    # A packet is large from this part (one over it) of `read_bytes` on, if it is no bundle. It is received into its
    # own memory: asking for its size costs less than copying it from a buffer that the CPU's cache has lost. After two
    # of one size nothing is asked for: the third is expected to need as much.
    LARGE_PART = 64
    # A read of large packets ends after this part of `read_bytes`. With 128 KiB in place of 1 MiB, 64 KiB from one
    # client to another cost 41 µs in place of 76: the cache holds a packet until it is sent, and the heap of a
    # program that receives does not grow, and shrink again, with each read.
    LARGE_READ_PART = 8
    # Bytes in front of the first buffer. AMD's Zen 3 copies five times slower (64 KiB in 26 µs instead of 5) if the
    # destination's offset within its page is 1 to 31 bytes above that of the source. The kernel stores most of a large
    # packet from the beginning of pages. So whole pages of payload after a head of up to 31 bytes would be copied
    # slowly into a buffer that begins with a page. With a cache line in front, 64 KiB cost the server 19 µs instead of
    # 33 (benchmarks/large.py).
    OFFSET = 64
    # Bytes in one batch past which the buffers' memory is given back to the kernel.
    LARGE = 1 << 22
    # Bytes of the beginning of a large message that is split: the verb and a key as long as any in use.
    HEAD = 512
    # Words of control data in a packet: a header of two, and room for all descriptors that can come with it
    # (SCM_MAX_FD, 253): it may take long to close one, and the kernel closes those without room at once
    # (`sbus.syscalls.elsewhere`).
    CONTROL = 129


cdef class PacketReader:
    """Reads packets from SEQPACKET sockets, through buffers that all connections share."""

    cdef readonly Py_ssize_t max_packet
    cdef readonly int batch
    cdef size_t read_bytes
    cdef mmsghdr headers[MAX_BATCH]
    cdef iovec vectors[MAX_BATCH]
    cdef char *memory
    cdef char *buffers
    cdef size_t length
    cdef long wary_until
    cdef readonly bint descriptors
    cdef readonly bint is_empty
    cdef size_t controls[MAX_BATCH][CONTROL]
    cdef bint splits
    cdef char head[HEAD]
    cdef size_t head_size
    cdef Py_ssize_t last_size
    # Whether the last large packets had one size: the next one is received into as much memory, and not looked at.
    cdef readonly bint is_steady
    cdef iovec parts[3]

    def __cinit__(
        self,
        Py_ssize_t max_packet,
        int batch=MAX_BATCH,
        size_t read_bytes=READ_BYTES,
        bint descriptors=False,
        bint splits=False,
    ):
        cdef size_t stride
        cdef int i
        if not 0 < batch <= MAX_BATCH or max_packet <= 0:
            raise ValueError("a batch has 1 to %d packets, a packet at least 1 byte" % MAX_BATCH)
        self.max_packet = max_packet
        self.batch = batch
        self.read_bytes = read_bytes
        self.descriptors = descriptors
        self.is_empty = False
        self.splits = splits and not descriptors
        self.parts[0].iov_base = self.head
        self.last_size = 0
        self.is_steady = False
        # An odd number of cache lines apart: buffers at a multiple of 4 KiB would share cache sets.
        stride = ((<size_t>max_packet + 63) // 64 | 1) * 64
        if stride > (<size_t>-1 - OFFSET) // <size_t>batch:
            raise MemoryError("no memory for a batch of %d packets of %d bytes" % (batch, max_packet))
        self.length = OFFSET + stride * <size_t>batch
        self.memory = <char *>mmap(NULL, self.length, PROT_READ | PROT_WRITE,
                                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
        if self.memory == <char *>MAP_FAILED:
            self.memory = NULL
            raise MemoryError("no memory for a batch of %d packets of %d bytes" % (batch, max_packet))
        self.buffers = self.memory + OFFSET
        memset(self.headers, 0, sizeof(self.headers))
        self.parts[2].iov_base = self.buffers
        self.parts[2].iov_len = <size_t>max_packet
        for i in range(batch):
            self.vectors[i].iov_base = self.buffers + stride * <size_t>i
            self.vectors[i].iov_len = <size_t>max_packet
            self.headers[i].msg_hdr.msg_iov = &self.vectors[i]
            self.headers[i].msg_hdr.msg_iovlen = 1
            if descriptors:
                self.headers[i].msg_hdr.msg_control = self.controls[i]

    def __dealloc__(self):
        if self.memory != NULL:
            munmap(self.memory, self.length)

    def read(self, sock not None, int most=MAX_BATCH):
        """See `sbus.syscalls._pure.PacketReader.read`."""
        cdef int fd = sock.fileno()
        cdef int count, i, wanted, flags = MSG_DONTWAIT | MSG_TRUNC
        cdef bint ended = False
        cdef unsigned int size
        cdef size_t total = 0, room = <size_t>self.max_packet
        cdef bint retried = False, looks = False, is_wary = False, is_large = False, has_large
        cdef char *data
        cdef list packets = []
        cdef list files = None
        cdef object own
        cdef timespec now
        if most <= 0:
            raise ValueError("a batch has at least 1 packet")
        most = min(most, self.batch)
        self.is_empty = False
        if self.descriptors:
            flags |= MSG_CMSG_CLOEXEC
        elif most == 1 and not self.wary_until:
            return self._read_one(fd)
        if self.wary_until:
            clock_gettime(CLOCK_MONOTONIC_COARSE, &now)
            is_wary = now.tv_sec < self.wary_until
            if not is_wary:
                self.wary_until = 0
        looks = is_wary
        while most > 0 and total < self.read_bytes:
            wanted = min(most, WARY_BATCH) if is_wary else most
            own = self._own_memory(fd) if looks else None
            if own is None:
                looks = False
            else:
                wanted = 1
                self.parts[0].iov_len = self.head_size
                self.parts[1].iov_base = PyBytes_AS_STRING(own)
                self.parts[1].iov_len = PyBytes_GET_SIZE(own)
                self.headers[0].msg_hdr.msg_iov = self.parts
                self.headers[0].msg_hdr.msg_iovlen = 3
            if self.descriptors:
                for i in range(wanted):
                    self.headers[i].msg_hdr.msg_controllen = CONTROL * sizeof(size_t)
            # With MSG_TRUNC the length is that of the packet, also if it did not fit.
            if own is None:
                count = recvmmsg(fd, self.headers, <unsigned int>wanted, flags, NULL)
            else:
                count = <int>recvmsg(fd, &self.headers[0].msg_hdr, flags)
                if count >= 0:
                    self.headers[0].msg_len = <unsigned int>count
                    count = 1
            self.headers[0].msg_hdr.msg_iov = &self.vectors[0]
            self.headers[0].msg_hdr.msg_iovlen = 1
            if count < 0:
                if errno == EAGAIN or (packets and errno != EINTR):
                    self.is_empty = True  # or there is an error, which the kernel reports again, also to poll(2)
                    break
                if errno == ECONNRESET and not retried:
                    # A reset is reported once, before the packets that still wait (unix(7)): read on.
                    retried = True
                elif errno != EINTR:
                    PyErr_SetFromErrno(OSError)
                continue
            if self.descriptors:
                files = [self._files(&self.headers[i].msg_hdr) for i in range(count)]
            for i in range(count):
                size = self.headers[i].msg_len
                if size == 0:
                    ended = True
                    if not self.descriptors:
                        break
                total += size
                data = <char *>self.vectors[i].iov_base
                if own is not None:
                    data = PyBytes_AS_STRING(own)
                    if self.head_size > 0:
                        data = self.head
                has_large = size <= room and self._is_large(data, size)
                is_large = is_large or has_large
                if size > room:
                    packet = self._truncated(data, size)
                elif own is not None:
                    packet = self._joined(own, size)
                else:
                    packet = PyBytes_FromStringAndSize(<char *>self.vectors[i].iov_base, size)
                if self.descriptors and size <= room and (
                    self.headers[i].msg_hdr.msg_controllen or self.headers[i].msg_hdr.msg_flags & MSG_CTRUNC
                ):
                    packet = Attached.of(packet, files[i], self.headers[i].msg_hdr.msg_flags & MSG_CTRUNC != 0)
                if not ended:  # descriptors with a packet after the end are closed
                    packets.append(packet)
            if ended:
                return packets, True
            if own is not None:
                self.is_steady = has_large and size == self.last_size and (
                    self.head_size == 0 or type(packet) is Split
                )
                self.last_size = size
                if has_large and total * LARGE_READ_PART >= self.read_bytes:
                    break
            if count < wanted:
                self.is_empty = True
                break
            most -= count
        if total >= self.read_bytes or is_large:
            self._be_wary()
        if total > LARGE:
            madvise(self.memory, self.length, MADV_DONTNEED)
        return packets, False

    def forward(self, sock not None, to not None, bytes head not None, Py_ssize_t most):
        """See `sbus.syscalls._pure.PacketReader.forward`."""
        cdef int fd = sock.fileno(), out = to.fileno()
        cdef ssize_t size
        cdef size_t length = <size_t>PyBytes_GET_SIZE(head)
        cdef Py_ssize_t count = 0, total = 0
        while total < most:
            size = self._receive(fd, count > 0)
            if size < 0:
                break
            if size == 0:
                return count, total, [], True
            if size > self.max_packet:
                return count, total, [self._truncated(self.buffers, <size_t>size)], False
            if (
                <size_t>size < length
                or memcmp(self.buffers, PyBytes_AS_STRING(head), length) != 0
                or not self._is_large(self.buffers, <size_t>size)
                or not _has_sent(out, self.buffers, <size_t>size)
            ):
                return count, total, [PyBytes_FromStringAndSize(self.buffers, size)], False
            count += 1
            total += size
        return count, total, [], False

    cdef object _own_memory(self, int fd):
        """Return memory for the next packet alone, if that is large; unseen, if the last two had one size.

        If it is not large, it is left to recvmmsg(2), as are errors, the end, and packets that are too long.
        """
        cdef char *nul = NULL
        cdef ssize_t size
        if self.is_steady:
            return PyBytes_FromStringAndSize(NULL, self.last_size - <Py_ssize_t>self.head_size)
        size = recv(fd, self.head, HEAD if self.splits else 4, MSG_DONTWAIT | MSG_TRUNC | MSG_PEEK)
        if size < 4 or size > self.max_packet or not self._is_large(self.head, <size_t>size):
            return None
        if self.splits and memcmp(self.head, b"MSG ", 4) == 0:
            nul = <char *>memchr(self.head, 0, <size_t>min(size, HEAD))
        self.head_size = nul - self.head + 1 if nul != NULL else 0
        return PyBytes_FromStringAndSize(NULL, size - <ssize_t>self.head_size)

    cdef object _joined(self, object own, size_t size):
        """Return the packet that was received into its own memory, after its head if that is split.

        It may be another one than was expected; the rest that did not fit is in the first buffer.
        """
        cdef object head, packet
        cdef char *data
        cdef size_t rest = <size_t>PyBytes_GET_SIZE(own), at
        if size == self.head_size + rest:
            if self.head_size == 0:
                return own
            if memcmp(self.head, b"MSG ", 4) == 0 and (
                memchr(self.head, 0, self.head_size) == self.head + self.head_size - 1
            ):
                head = PyBytes_FromStringAndSize(self.head, <Py_ssize_t>self.head_size)
                packet = Split(head)  # as `Split.of`, which costs more than the rest of this function
                packet.payload = own
                return packet
        packet = PyBytes_FromStringAndSize(NULL, <Py_ssize_t>size)
        data = PyBytes_AS_STRING(packet)
        at = min(size, self.head_size)
        memcpy(data, self.head, at)
        rest = min(size - at, rest)
        memcpy(data + at, PyBytes_AS_STRING(own), rest)
        at += rest
        memcpy(data + at, self.buffers, size - at)
        return packet

    cdef bint _is_large(self, const char *data, size_t size) noexcept:
        return size * LARGE_PART >= self.read_bytes and memcmp(data, b"BNDL", 4) != 0

    cdef tuple _files(self, msghdr *header):
        """Return the descriptors that came with a packet."""
        cdef cmsghdr *control = CMSG_FIRSTHDR(header)
        cdef list descriptors = []
        cdef size_t i
        while control != NULL:
            if control.cmsg_level == SOL_SOCKET and control.cmsg_type == SCM_RIGHTS:
                for i in range((control.cmsg_len - CMSG_LEN(0)) // sizeof(int)):
                    descriptors.append((<int *>CMSG_DATA(control))[i])
            control = CMSG_NXTHDR(header, control)
        return adopt(descriptors) if descriptors else ()

    cdef object _truncated(self, char *data, size_t size):
        return Truncated.of(size, PyBytes_FromStringAndSize(data, min(4, self.max_packet)))

    cdef int _be_wary(self) noexcept:
        cdef timespec now
        clock_gettime(CLOCK_MONOTONIC_COARSE, &now)
        self.wary_until = now.tv_sec + WARY_SECONDS
        return 0

    cdef ssize_t _receive(self, int fd, bint is_behind) except -2:
        """Receive one packet into the first buffer, and return its length, or -1 if there is none.

        After another packet, an error is left to the next call: the kernel reports it again.
        """
        cdef ssize_t size
        cdef bint retried = False
        while True:
            # With MSG_TRUNC recv(2) returns the length of the packet, also if it did not fit.
            size = recv(fd, self.buffers, <size_t>self.max_packet, MSG_DONTWAIT | MSG_TRUNC)
            if size >= 0:
                return size
            if errno == EAGAIN or (is_behind and errno != EINTR):
                return -1
            if errno == ECONNRESET and not retried:
                retried = True
            elif errno != EINTR:
                PyErr_SetFromErrno(OSError)

    cdef object _read_one(self, int fd):
        """Receive one packet with recv(2), which copies no headers and does not look for a second packet."""
        cdef ssize_t size = self._receive(fd, False)
        if size <= 0:
            self.is_empty = size < 0
            return [], size == 0
        if size > self.max_packet:
            return [self._truncated(self.buffers, size)], False
        packet = PyBytes_FromStringAndSize(self.buffers, size)
        if self._is_large(self.buffers, <size_t>size):
            self._be_wary()
        if size > LARGE:
            madvise(self.memory, self.length, MADV_DONTNEED)
        return [packet], False


cdef bint _has_sent(int fd, const char *data, size_t size) noexcept:
    """Send a packet, and return whether the socket has taken it; a caller that sends it again meets the reason."""
    while send(fd, data, size, MSG_DONTWAIT | MSG_NOSIGNAL) < 0:
        if errno != EINTR:
            return False
    return True


def send_packets(sock not None, list packets not None):
    """See `sbus.syscalls._pure.send_packets`."""
    cdef mmsghdr headers[MAX_BATCH]
    cdef iovec vectors[MAX_BATCH]
    cdef int fd = sock.fileno()
    cdef int sent = _send_prepared(fd, headers, vectors, _prepare(packets, headers, vectors))
    if sent < 0:
        PyErr_SetFromErrno(OSError)
    return sent


def send_split(sock not None, bytes head not None, bytes payload not None):
    """See `sbus.syscalls._pure.send_split`."""
    cdef iovec parts[2]
    cdef msghdr header
    cdef int fd = sock.fileno()
    memset(&header, 0, sizeof(header))
    header.msg_iov = parts
    header.msg_iovlen = 2
    parts[0].iov_base = PyBytes_AS_STRING(head)
    parts[0].iov_len = PyBytes_GET_SIZE(head)
    parts[1].iov_base = PyBytes_AS_STRING(payload)
    parts[1].iov_len = PyBytes_GET_SIZE(payload)
    while sendmsg(fd, &header, MSG_DONTWAIT | MSG_NOSIGNAL) < 0:
        if errno == EAGAIN:
            return False
        if errno != EINTR:
            PyErr_SetFromErrno(OSError)
    return True


def send_to_each(list socks not None, list packets not None):
    """See `sbus.syscalls._pure.send_to_each`."""
    cdef mmsghdr headers[MAX_BATCH]
    cdef iovec vectors[MAX_BATCH]
    cdef Py_ssize_t i, total = len(packets)
    cdef int count = _prepare(packets, headers, vectors)
    cdef int sent
    cdef list short = []
    for i in range(len(socks)):
        sent = _send_prepared(socks[i].fileno(), headers, vectors, count)
        if sent != total:
            short.append((i, max(sent, 0)))
    return short


cdef int _prepare(list packets, mmsghdr *headers, iovec *vectors) except -1:
    """Have the kernel's structures point to the first batch of a list of packets, and return its length."""
    cdef int count = <int>min(len(packets), MAX_BATCH)
    cdef int i
    cdef object packet
    memset(headers, 0, sizeof(mmsghdr) * <size_t>count)
    for i in range(count):
        packet = packets[i]
        if not PyBytes_Check(packet):
            raise TypeError("a packet is bytes, not %s" % type(packet).__name__)
        vectors[i].iov_base = PyBytes_AS_STRING(packet)
        vectors[i].iov_len = PyBytes_GET_SIZE(packet)
        headers[i].msg_hdr.msg_iov = &vectors[i]
        headers[i].msg_hdr.msg_iovlen = 1
    return count


cdef int _send_prepared(int fd, mmsghdr *headers, iovec *vectors, int count) noexcept:
    """Send a batch, and return how many packets the socket took, or -1 with `errno` set.

    A packet that is alone goes through send(2), which copies no headers and does not yield the CPU afterwards.
    """
    cdef int sent
    if count == 0:
        return 0
    while True:
        if count > 1:
            sent = sendmmsg(fd, headers, <unsigned int>count, MSG_DONTWAIT | MSG_NOSIGNAL)
        elif send(fd, vectors[0].iov_base, vectors[0].iov_len, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0:
            sent = 1
        else:
            sent = -1
        if sent >= 0:
            return sent
        if errno == EAGAIN:
            return 0
        if errno != EINTR:
            return -1
