# cython: language_level=3, boundscheck=False, wraparound=False
"""The compiled twin of `sbus.routing.trie`: its nodes, and the walk over them."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_GetItemWithError
from cpython.object cimport PyObject
from libc.string cimport memchr


cdef class Node:
    """See `sbus.routing.trie._Node`."""

    cdef public dict literals
    cdef public dict prefixes
    cdef public tuple lengths
    cdef public dict same_length
    cdef public dict here
    cdef public dict below

    def __init__(self):
        self.lengths = ()

    def is_empty(self):
        """See `sbus.routing.trie._Node.is_empty`."""
        return not (self.literals or self.prefixes or self.here or self.below)


def collect(Node root not None, bytes key not None, bytes separator not None, list tables not None):
    """See `sbus.routing.trie._collect`."""
    cdef const char *text = PyBytes_AS_STRING(key)
    cdef const char *end
    cdef Py_ssize_t size = PyBytes_GET_SIZE(key), start = 0, length, cut
    cdef Py_ssize_t steps = 1, probes
    cdef char mark
    cdef list nodes = [root], following
    cdef dict slices
    cdef bytes segment, prefix
    cdef Node node
    cdef PyObject *found
    cdef object number
    if PyBytes_GET_SIZE(separator) != 1:
        raise ValueError("a separator is one byte")
    mark = PyBytes_AS_STRING(separator)[0]
    while True:
        end = <const char *>memchr(text + start, mark, <size_t>(size - start))
        length = (end - (text + start)) if end != NULL else size - start
        segment = PyBytes_FromStringAndSize(text + start, length)
        slices = {}
        following = []
        probes = 0
        for node in nodes:
            if node.literals is not None:
                found = PyDict_GetItemWithError(node.literals, segment)
                if found != NULL:
                    following.append(<object>found)
            if node.prefixes is not None:
                for number in node.lengths:
                    cut = number
                    if cut > length:
                        break
                    probes += 1
                    found = PyDict_GetItemWithError(slices, number)
                    if found == NULL:
                        prefix = PyBytes_FromStringAndSize(text + start, cut)
                        slices[number] = prefix
                    else:
                        prefix = <bytes>found
                    found = PyDict_GetItemWithError(node.prefixes, prefix)
                    if found != NULL:
                        following.append(<object>found)
        steps += probes + len(following)
        if not following:
            return steps
        if end == NULL:
            for node in following:
                if node.here:
                    tables.append(node.here)
            return steps
        for node in following:
            if node.below:
                tables.append(node.below)
        nodes = following
        start += length + 1


def collect_readers(dict table not None, bytes gid not None, bytes uid not None, bytes pid not None, dict found not None):
    """See `sbus.routing.trie._collect_readers`."""
    cdef long empty = (not gid) + 2 * (not uid) + 4 * (not pid)
    cdef Py_ssize_t steps = 0
    cdef tuple ids, holder
    cdef dict holders
    for ids, holders in table.items():
        steps += 1
        if (not gid or <bytes>ids[0] == gid) and (not uid or <bytes>ids[1] == uid) and (not pid or <bytes>ids[2] == pid):
            steps += len(holders)
            for holder in holders:
                if not <long>holder[1] & empty:
                    found[holder[0]] = 1
    return steps
