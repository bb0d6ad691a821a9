# cython: language_level=3, boundscheck=False, wraparound=False
"""The compiled twin of `sbus.runs`: no key is copied or hashed that equals the one before it."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_Check, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_GetItemWithError
from cpython.object cimport PyObject
from libc.string cimport memchr, memcmp


def next_run(list packets not None, Py_ssize_t start, Py_ssize_t end, dict routes not None):
    """See `sbus.runs._next_run`."""
    cdef object receivers = None
    cdef object packet
    cdef PyObject *found
    cdef const char *key
    cdef const char *nul
    cdef const char *last = NULL
    cdef Py_ssize_t at, size, length, last_length = -1
    if start < 0 or end > len(packets):
        raise IndexError("a run lies within its packets")
    for at in range(start, end):
        packet = packets[at]
        if not PyBytes_Check(packet):
            raise TypeError("a packet is bytes, not %s" % type(packet).__name__)
        size = PyBytes_GET_SIZE(packet) - 4
        key = PyBytes_AS_STRING(packet)
        if size <= 0 or memcmp(key, b"MSG ", 4) != 0:
            return receivers, at
        key += 4
        nul = <const char *>memchr(key, 0, <size_t>size)
        if nul == NULL:
            return receivers, at
        length = nul - key
        # `last` points into an earlier packet, which the list keeps alive.
        if length == last_length and memcmp(key, last, <size_t>length) == 0:
            continue
        found = PyDict_GetItemWithError(routes, PyBytes_FromStringAndSize(key, length))
        if found == NULL:
            return receivers, at
        if receivers is None:
            receivers = <object>found
        elif <object>found is not receivers:
            return receivers, at
        last = key
        last_length = length
    return receivers, end


def next_messages(list packets not None, Py_ssize_t start, dict routes not None, type kind not None):
    """See `sbus.runs._next_messages`."""
    cdef object receivers = None
    cdef object packet, key = None, new = tuple.__new__
    cdef PyObject *found
    cdef const char *data
    cdef const char *nul
    cdef Py_ssize_t at, size, length
    cdef list messages = []
    if start < 0:
        raise IndexError("a run lies within its packets")
    for at in range(start, len(packets)):
        packet = packets[at]
        if not PyBytes_Check(packet):
            raise TypeError("a packet is bytes, not %s" % type(packet).__name__)
        size = PyBytes_GET_SIZE(packet) - 4
        data = PyBytes_AS_STRING(packet)
        if size <= 0 or memcmp(data, b"MSG ", 4) != 0:
            break
        data += 4
        nul = <const char *>memchr(data, 0, <size_t>size)
        if nul == NULL:
            break
        length = nul - data
        if key is None or PyBytes_GET_SIZE(key) != length or memcmp(PyBytes_AS_STRING(key), data, <size_t>length) != 0:
            key = PyBytes_FromStringAndSize(data, length)
            found = PyDict_GetItemWithError(routes, key)
            if found == NULL or (receivers is not None and <object>found is not receivers):
                break
            receivers = <object>found
        messages.append(new(kind, (key, PyBytes_FromStringAndSize(nul + 1, size - length - 1))))
    return receivers, messages
