# cython: language_level=3
"""The layout of a bundle, for the compiled modules `sbus.protocol._bundles` and `sbus.protocol._columns`."""

from libc.stdint cimport uint32_t
from libc.string cimport memcmp


cdef inline uint32_t read_length(const unsigned char *at) noexcept:
    return at[0] | at[1] << 8 | at[2] << 16 | <uint32_t>at[3] << 24


cdef inline bint has_magic(const char *data, Py_ssize_t size) noexcept:
    return size >= 4 and memcmp(data, b"BNDL", 4) == 0


cdef inline bint is_framed(const char *data, Py_ssize_t size) noexcept:
    """Check that the lengths add up and that no packet is empty or a bundle."""
    cdef Py_ssize_t at = 4
    cdef uint32_t length
    if size == 4:
        return False
    while at < size:
        if size - at < 4:
            return False
        length = read_length(<const unsigned char *>data + at)
        at += 4
        if length == 0 or length > <size_t>(size - at):  # compared unsigned: a length may exceed what a signed 32-bit index holds
            return False
        if has_magic(data + at, length):
            return False
        at += length
    return True
