"""Start a Python worker of Spark that connects to the JVM before it imports anything.

Spark waits ten seconds for a worker to connect, and nothing can change that (``PythonWorkerFactory``; the worker of a
stream's source is not forked from a daemon that is there already). A worker connects after it has imported pyspark,
which can take longer on a busy machine; then the stream fails. So this program stands in for the interpreter: it
connects with nothing but sockets, which takes some milliseconds, answers the JVM's question for the secret, and then
becomes the interpreter that was asked for, with the connection that is there.

It runs as a program, without the package ``sbus``, and it uses two internals of pyspark: the variables
``PYTHON_WORKER_FACTORY_…``, and the function that proves the secret. If the connection fails, the interpreter runs as
if this program were not there.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from typing import BinaryIO

__all__ = ["launcher", "main"]

_FD = "SBUS_WORKER_CONNECTION"
_TIMEOUT = 9.0
"""Seconds to connect: Spark gives up a second later."""


def launcher(directory: str) -> str:
    """Write the program that stands in for this interpreter.

    :param directory: where to write it.
    :returns: its path.
    """
    path = os.path.join(directory, "python")
    with open(path, "w", encoding="utf-8") as file:
        file.write(f'#!/bin/sh\nexec "{sys.executable}" -SE "{os.path.abspath(__file__)}" "$@"\n')
    os.chmod(path, 0o700)
    return path


def main(arguments: list[str]) -> None:
    """Connect if these arguments start a worker, and become the interpreter."""
    command = [sys.executable, "-P", *arguments]
    if arguments[:1] == ["-m"] and len(arguments) > 1:
        try:
            connection = _connect()
        except OSError:
            connection = None
        if connection is not None:
            os.set_inheritable(connection.fileno(), True)
            os.environ[_FD] = str(connection.fileno())
            command = [sys.executable, "-P", os.path.abspath(__file__), *arguments]
    os.execv(command[0], command)


def _connect() -> socket.socket | None:
    """Connect as pyspark does; None if there is nothing to connect to."""
    path, port = (os.environ.get(f"PYTHON_WORKER_FACTORY_{name}") for name in ("SOCK_PATH", "PORT"))
    if path:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(_TIMEOUT)
        connection.connect(path)
    elif port:
        host = "::1" if os.environ.get("SPARK_PREFER_IPV6", "").lower() == "true" else "127.0.0.1"
        connection = socket.create_connection((host, int(port)), _TIMEOUT)
        secret = os.environ.get("PYTHON_WORKER_FACTORY_SECRET", "").encode()
        connection.sendall(struct.pack("!i", len(secret)) + secret)
    else:
        return None
    connection.settimeout(None)
    return connection


def _run(module: str, arguments: list[str]) -> None:
    """Run a module of pyspark with the connection that is there."""
    import runpy

    import pyspark.util

    fd = int(os.environ.pop(_FD))
    plain = socket.socket

    class Connected(socket.socket):
        """The next socket: to connect it is to take the connection that is there."""

        def connect(self, address: object) -> None:
            os.dup2(fd, self.fileno())
            os.close(fd)
            vars(socket)["socket"] = plain

    def read_reply(connection: BinaryIO, secret: str) -> None:
        # The secret was sent when the connection was made.
        (length,) = struct.unpack("!i", connection.read(4))
        reply = connection.read(length)
        if reply != b"ok":
            raise ConnectionError(f"Spark refused this worker: {reply!r}")

    vars(pyspark.util)["_do_server_auth"] = read_reply
    vars(socket)["socket"] = Connected
    sys.argv = [module, *arguments]
    sys.path[0] = ""
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    if _FD in os.environ and sys.argv[1:2] == ["-m"]:
        _run(sys.argv[2], sys.argv[3:])
    else:
        main(sys.argv[1:])
