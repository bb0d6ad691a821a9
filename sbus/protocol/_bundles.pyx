# cython: language_level=3, boundscheck=False, wraparound=False
"""The compiled twin of `sbus.protocol.bundles`: it copies each byte once."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_Check, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint32_t
from libc.string cimport memcmp, memcpy

from sbus.protocol._framing cimport has_magic, is_framed, read_length

cdef extern from "Python.h":
    const Py_ssize_t PY_SSIZE_T_MAX


cdef enum:
    LARGE = 16384  # see `sbus.protocol.bundles.LARGE`


cdef inline void _put(unsigned char *at, uint32_t number) noexcept:
    at[0] = number & 255
    at[1] = number >> 8 & 255
    at[2] = number >> 16 & 255
    at[3] = number >> 24


cdef inline Py_ssize_t _size(object packet) except -1:
    if not PyBytes_Check(packet):
        raise TypeError("a packet is bytes, not %s" % type(packet).__name__)
    return PyBytes_GET_SIZE(packet)


cdef inline bint _is_bundle(object packet) except -1:
    cdef Py_ssize_t size = _size(packet)  # raises if it is not bytes
    return has_magic(PyBytes_AS_STRING(packet), size) and PyBytes_CheckExact(packet)


cdef bint _is_end(const char *data, Py_ssize_t size) noexcept:
    """Return whether this packet ends bundles: ``CMSG bundle/off``."""
    return size >= 15 and memcmp(data, b"CMSG bundle/off", 15) == 0 and (size == 15 or data[15] == 0)


def unbundle(list packets not None, Py_ssize_t enough=PY_SSIZE_T_MAX):
    """See `sbus.protocol.bundles._unbundle`."""
    cdef Py_ssize_t at, size
    cdef uint32_t length
    cdef const char *data
    cdef object packet
    cdef list plain = []
    cdef bint found = False, ended = False
    for packet in packets:
        if _is_bundle(packet):
            found = True
            break
    if not found:
        return packets
    for packet in packets:
        size = _size(packet)
        data = PyBytes_AS_STRING(packet)
        if ended or len(plain) >= enough or not _is_bundle(packet) or not is_framed(data, size):
            plain.append(packet)
            ended = ended or _is_end(data, size)
            continue
        at = 4
        while at < size:
            length = read_length(<const unsigned char *>data + at)
            plain.append(PyBytes_FromStringAndSize(data + at + 4, length))
            ended = ended or _is_end(data + at + 4, length)
            at += 4 + <Py_ssize_t>length
    return plain


def pack(list packets not None, Py_ssize_t limit, Py_ssize_t most):
    """See `sbus.protocol.bundles._pack`."""
    cdef Py_ssize_t at = 0, end, size, length, i, total
    cdef unsigned char *data
    cdef object packet, bundle
    cdef list bundles = [], counts = []
    total = len(packets)  # no Python code but __len__ runs from here on, so the list cannot change
    while at < total and len(bundles) < most:
        size = 4
        end = at
        while end < total:
            packet = packets[end]
            length = _size(packet)
            if length >= LARGE or size + 4 + length > limit:
                break
            if not PyBytes_CheckExact(packet) and len(packet) != length:
                break
            size += 4 + length
            end += 1
        if end - at < 2:
            bundles.append(packets[at])
            counts.append(1)
            at += 1
            continue
        bundle = PyBytes_FromStringAndSize(NULL, size)
        data = <unsigned char *>PyBytes_AS_STRING(bundle)
        memcpy(data, b"BNDL", 4)
        data += 4
        for i in range(at, end):
            packet = packets[i]
            length = PyBytes_GET_SIZE(packet)
            _put(data, <uint32_t>length)
            memcpy(data + 4, PyBytes_AS_STRING(packet), <size_t>length)
            data += 4 + length
        bundles.append(bundle)
        counts.append(end - at)
        at = end
    return bundles, counts
