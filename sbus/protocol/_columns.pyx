# cython: language_level=3, boundscheck=False, wraparound=False
"""The compiled twin of `sbus.protocol.columns`: it copies each byte once and makes no object for a message."""

from cpython.bytearray cimport PyByteArray_AsString, PyByteArray_Resize, PyByteArray_Size
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_Check, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int32_t, uint32_t
from libc.string cimport memchr, memcmp, memcpy

from sbus.protocol._framing cimport has_magic, is_framed, read_length


cdef enum:
    NAMES = 12  # bytes before the name in a packet that names a publisher


cdef struct Cursor:
    const char *data  # of the packet at hand
    Py_ssize_t size
    Py_ssize_t offset  # in it, of the next packet of a bundle; 0 where it was not begun


cdef inline Py_ssize_t _key_size(const char *data, Py_ssize_t size) noexcept:
    """Return the length of the key of a message; -1 if the packet is no message."""
    cdef const char *nul
    if size < 5 or memcmp(data, b"MSG ", 4) != 0:
        return -1
    nul = <const char *>memchr(data + 4, 0, size - 4)
    return -1 if nul == NULL else nul - data - 4


cdef inline bint _names_sender(const char *data, Py_ssize_t size) noexcept:
    """Return whether a packet names the publisher of the messages after it."""
    return size >= NAMES and memcmp(data, b"CMSG sender\0", NAMES) == 0


cdef inline void _open(Cursor *cursor, object packet, Py_ssize_t offset):
    cursor.data = PyBytes_AS_STRING(packet)
    cursor.size = PyBytes_GET_SIZE(packet)
    cursor.offset = offset
    if offset == 0 and has_magic(cursor.data, cursor.size) and is_framed(cursor.data, cursor.size):
        cursor.offset = 4


cdef inline Py_ssize_t _next(Cursor *cursor, const char **data) noexcept:
    """Move to the end of the next packet; return its length."""
    cdef Py_ssize_t length
    if cursor.offset == 0:
        data[0] = cursor.data
        cursor.offset = cursor.size
        return cursor.size
    length = read_length(<const unsigned char *>cursor.data + cursor.offset)
    data[0] = cursor.data + cursor.offset + 4
    cursor.offset += 4 + length
    return length


def collect(
    list packets not None,
    Py_ssize_t at,
    Py_ssize_t offset,
    bytearray keys not None,
    bytearray key_ends not None,
    bytearray payloads not None,
    bytearray payload_ends not None,
    bytearray senders not None,
    bytearray sender_ends not None,
    bytearray run_starts not None,
    Py_ssize_t max_rows,
    Py_ssize_t max_bytes,
):
    """See `sbus.protocol.columns._collect`."""
    cdef Cursor cursor
    cdef const char *data = NULL
    cdef Py_ssize_t count = len(packets), size = 0, key, end, begin, stop = at
    cdef Py_ssize_t rows = PyByteArray_Size(key_ends) // 4 - 1, new = 0
    cdef Py_ssize_t key_size = PyByteArray_Size(keys), payload_size = PyByteArray_Size(payloads)
    cdef Py_ssize_t key_bytes = key_size, payload_bytes = payload_size
    cdef Py_ssize_t runs = PyByteArray_Size(run_starts) // 4, new_runs = 0
    cdef Py_ssize_t sender_size = PyByteArray_Size(senders), sender_bytes = sender_size
    cdef char *to_senders
    cdef int32_t *to_sender_ends
    cdef int32_t *to_run_starts
    cdef char *to_keys
    cdef char *to_payloads
    cdef int32_t *to_key_ends
    cdef int32_t *to_payload_ends
    cdef object packet, other = None
    # First find out how much room is needed and where to stop; then copy. No Python code runs meanwhile.
    cursor.offset = offset
    while stop < count and rows + new < max_rows and key_bytes + payload_bytes < max_bytes:
        packet = packets[stop]
        if not PyBytes_Check(packet):
            raise TypeError("a packet is bytes, not %s" % type(packet).__name__)
        _open(&cursor, packet, offset if stop == at else 0)
        while rows + new < max_rows and key_bytes + payload_bytes < max_bytes:
            begin = cursor.offset
            size = _next(&cursor, &data)
            key = _key_size(data, size)
            if key >= 0:
                new += 1
                key_bytes += key
                payload_bytes += size - key - 5
            elif _names_sender(data, size):
                new_runs += 1
                sender_bytes += size - NAMES
            else:
                other = packet if begin == 0 else PyBytes_FromStringAndSize(data, size)
                break
            if cursor.offset >= cursor.size:
                break
        if cursor.offset >= cursor.size:
            stop += 1
            cursor.offset = 0
        if other is not None or cursor.offset:
            break
    end = cursor.offset if stop < count else 0
    if new or new_runs:
        PyByteArray_Resize(senders, sender_bytes)
        PyByteArray_Resize(sender_ends, 4 * (runs + new_runs + 1))
        PyByteArray_Resize(run_starts, 4 * (runs + new_runs))
        to_senders = PyByteArray_AsString(senders)
        to_sender_ends = <int32_t *>PyByteArray_AsString(sender_ends) + runs + 1
        to_run_starts = <int32_t *>PyByteArray_AsString(run_starts) + runs
        PyByteArray_Resize(keys, key_bytes)
        PyByteArray_Resize(payloads, payload_bytes)
        PyByteArray_Resize(key_ends, 4 * (rows + new + 1))
        PyByteArray_Resize(payload_ends, 4 * (rows + new + 1))
        to_keys = PyByteArray_AsString(keys)
        to_payloads = PyByteArray_AsString(payloads)
        to_key_ends = <int32_t *>PyByteArray_AsString(key_ends) + rows + 1
        to_payload_ends = <int32_t *>PyByteArray_AsString(payload_ends) + rows + 1
        begin = at
        while new or new_runs:
            _open(&cursor, packets[begin], offset if begin == at else 0)
            while new or new_runs:
                size = _next(&cursor, &data)
                key = _key_size(data, size)
                if key < 0:
                    memcpy(to_senders + sender_size, data + NAMES, size - NAMES)
                    sender_size += size - NAMES
                    to_sender_ends[0] = <int32_t>sender_size
                    to_run_starts[0] = <int32_t>rows
                    to_sender_ends += 1
                    to_run_starts += 1
                    new_runs -= 1
                    if cursor.offset >= cursor.size:
                        break
                    continue
                memcpy(to_keys + key_size, data + 4, key)
                memcpy(to_payloads + payload_size, data + 5 + key, size - key - 5)
                key_size += key
                payload_size += size - key - 5
                to_key_ends[0] = <int32_t>key_size
                to_payload_ends[0] = <int32_t>payload_size
                to_key_ends += 1
                to_payload_ends += 1
                rows += 1
                new -= 1
                if cursor.offset >= cursor.size:
                    break
            begin += 1
    return stop, end, other
