"""The sockets that systemd has passed to this process: see sd_listen_fds(3)."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["FIRST_DESCRIPTOR", "passed_names"]

FIRST_DESCRIPTOR = 3
"""The first descriptor that systemd passes; the others follow it."""


def passed_names(environ: bytes | None = None) -> tuple[str, ...]:
    """Return the names of the passed sockets, in the order of their descriptors; without names, empty ones.

    :param environ: the environment at the start of this process, as in ``/proc/self/environ``, which is the default:
        Twisted has removed the variables from `os.environ` by now.
    """
    if environ is None:
        try:
            environ = Path("/proc/self/environ").read_bytes()
        except OSError:
            return ()
    variables = dict(line.partition(b"=")[::2] for line in environ.split(b"\0"))
    number = variables.get(b"LISTEN_FDS", b"")
    if variables.get(b"LISTEN_PID") != b"%d" % os.getpid() or not number.isdigit() or len(number) > 6:
        return ()
    names = variables[b"LISTEN_FDNAMES"].split(b":") if b"LISTEN_FDNAMES" in variables else [b""] * int(number)
    return tuple(map(os.fsdecode, names)) if len(names) == int(number) else ()
