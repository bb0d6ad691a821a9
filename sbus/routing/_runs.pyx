# cython: language_level=3, boundscheck=False, wraparound=False
"""The compiled twin of `sbus.routing.runs`: it does not copy or hash a key that equals the key before it."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_Check, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_GetItemWithError
from cpython.object cimport PyObject
from cpython.unicode cimport PyUnicode_Check
from libc.string cimport memchr, memcmp, memcpy

from sbus.protocol.packets import Split

cdef extern from "Python.h":
    const Py_ssize_t PY_SSIZE_T_MAX
    ctypedef struct PyTypeObject
    void PyObject_GC_UnTrack(void *)
    const char *PyUnicode_AsUTF8AndSize(object, Py_ssize_t *) except NULL

cdef extern from *:
    """
    #ifdef Py_LIMITED_API
    #define NEW_TUPLE(type, args) ((newfunc)PyType_GetSlot(&PyTuple_Type, Py_tp_new))(type, args, NULL)
    #else
    #define NEW_TUPLE(type, args) PyTuple_Type.tp_new(type, args, NULL)
    #endif
    """
    object NEW_TUPLE(PyTypeObject *, object)


# The last type of messages that was found to be constructed as a tuple is; a client has few.
cdef object _checked = None


def next_run(list packets not None, Py_ssize_t start, Py_ssize_t end, dict routes not None):
    """See `sbus.routing.runs._next_run`."""
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
        if not PyBytes_CheckExact(packet):
            if not PyBytes_Check(packet):
                raise TypeError("a packet is bytes, not %s" % type(packet).__name__)
            return receivers, at
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


def next_messages(list packets not None, Py_ssize_t start, Py_ssize_t end, dict routes not None, type kind not None):
    """See `sbus.routing.runs._next_messages`."""
    cdef object receivers = None
    cdef object packet, message, key = None
    cdef PyObject *found
    cdef const char *data
    cdef const char *nul
    cdef Py_ssize_t at, size, length
    cdef list messages = []
    global _checked
    if start < 0:
        raise IndexError("a run lies within its packets")
    for at in range(start, min(end, len(packets))):
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
        if size == length + 1 and type(packet) is Split:
            message = (key, packet.payload)
        else:
            message = (key, PyBytes_FromStringAndSize(nul + 1, size - length - 1))
        if kind is not _checked:
            message = tuple.__new__(kind, message)  # checks that `kind` can be constructed this way
            _checked = kind
        else:
            message = NEW_TUPLE(<PyTypeObject *>kind, (message,))  # the same without that check
        PyObject_GC_UnTrack(<void *>message)  # bytes cannot be part of a cycle
        messages.append(message)
    return receivers, messages


def build_messages(list messages not None, Py_ssize_t start, Py_ssize_t longest):
    """See `sbus.routing.runs._build_messages`."""
    cdef object key, payload, packet
    cdef object last = None
    cdef const char *data = NULL
    cdef char *into
    cdef Py_ssize_t at, length = 0, size
    cdef list packets = []
    if start < 0:
        raise IndexError("a run lies within its messages")
    for at in range(start, len(messages)):
        if not isinstance(messages[at], tuple) or len(<tuple>messages[at]) != 2:
            break
        key = (<tuple>messages[at])[0]
        payload = (<tuple>messages[at])[1]
        if not PyBytes_Check(payload):
            break
        if data == NULL or key is not last:
            if PyBytes_Check(key):
                data = PyBytes_AS_STRING(key)
                length = PyBytes_GET_SIZE(key)
            elif PyUnicode_Check(key):
                try:
                    data = PyUnicode_AsUTF8AndSize(key, &length)
                except UnicodeEncodeError:
                    break
            else:
                break
            if memchr(data, 33, <size_t>length) != NULL or memchr(data, 0, <size_t>length) != NULL:
                break
            last = key  # keeps the bytes alive that `data` points to
        size = PyBytes_GET_SIZE(payload)
        if length > longest - 5 or size > longest - 5 - length:
            break
        packet = PyBytes_FromStringAndSize(NULL, 5 + length + size)
        into = PyBytes_AS_STRING(packet)
        memcpy(into, b"MSG ", 4)
        memcpy(into + 4, data, <size_t>length)
        into[4 + length] = 0
        memcpy(into + 5 + length, PyBytes_AS_STRING(payload), <size_t>size)
        packets.append(packet)
    return packets


cdef inline Py_ssize_t _length(object packet) except -1:
    """Return the length of a packet, which may be more than its bytes (`sbus.flood.payloads`)."""
    if PyBytes_CheckExact(packet):
        return PyBytes_GET_SIZE(packet)
    if not PyBytes_Check(packet):
        raise TypeError("a packet is bytes, not %s" % type(packet).__name__)
    return len(packet)


cdef Py_ssize_t _size(list packets) except -1:
    cdef object packet
    cdef Py_ssize_t size = 0
    for packet in packets:
        size += _length(packet)
    return size


def untracked(list packets not None):
    """See `sbus.routing.runs._untracked`."""
    PyObject_GC_UnTrack(<void *>packets)
    return packets


def total_size(list packets not None):
    """See `sbus.routing.runs._total_size`."""
    return _size(packets)


def find_type(list items not None, type kind not None, Py_ssize_t start):
    """See `sbus.routing.runs._find_type`."""
    cdef Py_ssize_t at
    cdef object item
    for at in range(max(start, 0), len(items)):
        item = items[at]
        if type(item) is kind or (not PyBytes_CheckExact(item) and isinstance(item, kind)):
            return at
    return -1


def shortest(list packets not None):
    """See `sbus.routing.runs._shortest`."""
    cdef object packet
    cdef Py_ssize_t size = PY_SSIZE_T_MAX
    for packet in packets:
        size = min(size, _length(packet))
    if not packets:
        raise ValueError("there is no packet")
    return size


def newest(list packets not None):
    """See `sbus.routing.runs._newest`."""
    cdef dict found = {}
    cdef object packet, key = None, last = None
    cdef const char *data
    cdef const char *nul
    cdef const char *before = NULL
    cdef Py_ssize_t length, size = -1
    for packet in packets:
        if not PyBytes_Check(packet):
            raise TypeError("a packet is bytes, not %s" % type(packet).__name__)
        data = PyBytes_AS_STRING(packet)
        nul = <const char *>memchr(data, 0, <size_t>PyBytes_GET_SIZE(packet))
        length = nul - data if nul != NULL else PyBytes_GET_SIZE(packet)
        if length != size or memcmp(data, before, <size_t>length) != 0:
            if last is not None:
                found[key] = last
            key = PyBytes_FromStringAndSize(data, length)
            if key not in found:
                found[key] = packet  # its place is that of its first message
            size = length
        before = data
        last = packet  # keeps the bytes alive that `before` points to
    if last is not None:
        found[key] = last
    return list(found.values())


cdef enum:
    SMALL = 10  # see `sbus.routing.runs._SMALL`


cdef class Tally:
    """See `sbus.routing.runs._Tally`."""

    cdef readonly long long messages, size, copies, copied_size

    def add(self, list packets not None, Py_ssize_t copies):
        """See `sbus.routing.runs._Tally.add`."""
        cdef Py_ssize_t size = _size(packets)
        self.count(len(packets), size, copies)
        size -= len(packets) << SMALL
        return size >> SMALL if size > 0 else 0

    cpdef count(self, Py_ssize_t messages, Py_ssize_t size, Py_ssize_t copies):
        """See `sbus.routing.runs._Tally.count`."""
        self.messages += messages
        self.size += size
        self.copies += messages * copies
        self.copied_size += size * copies
