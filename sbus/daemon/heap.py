"""The heap of a process that is ours: freed memory is kept for the next batch of large messages."""

from __future__ import annotations

import ctypes

__all__ = ["keep_memory"]

_KEPT_FREE_BYTES = 16 << 20
"""Bytes of freed memory that the process keeps for the next batch."""
_LARGEST_HEAP_BLOCK_BYTES = 1 << 20
"""Bytes of the largest block that is allocated from the memory it keeps: the longest packet fits."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_memory() -> None:
    """Keep freed memory for the next batch instead of returning it to the kernel.

    By default the C library returns free memory beyond 128 KiB at the end of the heap. Each batch of large packets (or
    bundles) then made the kernel take its pages away and clear them again for the next: most of the server's time. See
    mallopt(3). C libraries other than glibc lack it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _KEPT_FREE_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_HEAP_BLOCK_BYTES)
