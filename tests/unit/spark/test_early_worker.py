"""A Python worker connects before it imports anything."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sbus.spark.runtime.early_worker import launcher

TIMEOUT = 60.0
WORKER = """
import os, sys
print("imported", flush=True)
from pyspark.worker_util import get_sock_file_to_executor
with get_sock_file_to_executor(timeout=None) as connection:
    connection.write(b"hello " + " ".join(sys.argv[1:]).encode())
    connection.flush()
"""


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Start the launcher as Spark starts an interpreter; a module waits for a line of input when Python starts."""
    (tmp_path / "worker.py").write_text(WORKER)
    (tmp_path / "sitecustomize.py").write_text("import sys\nif 'slow' in sys.orig_argv: input()\n")

    def run(*arguments: str, **environ: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [launcher(str(tmp_path)), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), **environ},
        )

    return run


def receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (more := connection.recv(count - len(data))):
        data += more
    return data


def test_a_slow_worker_has_connected(start: Callable[..., subprocess.Popen[str]]) -> None:
    """The connection and the secret are there before the interpreter has started; the worker then uses them once."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(TIMEOUT)
        port = str(server.getsockname()[1])
        with start(
            "-m", "worker", "slow", PYTHON_WORKER_FACTORY_PORT=port, PYTHON_WORKER_FACTORY_SECRET="s3"
        ) as worker:
            connection, _ = server.accept()
            with connection:
                connection.settimeout(TIMEOUT)
                assert receive(connection, 6) == struct.pack("!i", 2) + b"s3"
                assert worker.stdin
                worker.stdin.write("go\n")
                worker.stdin.flush()
                connection.sendall(struct.pack("!i", 2) + b"ok")
                (pid,) = struct.unpack("!i", receive(connection, 4))
                assert pid == worker.pid
                assert receive(connection, 10) == b"hello slow"
                assert connection.recv(1) == b""
        assert worker.returncode == 0


def test_a_unix_socket(start: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    """With Unix sockets there is no secret."""
    path = str(tmp_path / "jvm")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(path)
        server.listen()
        server.settimeout(TIMEOUT)
        with start("-m", "worker", PYTHON_WORKER_FACTORY_SOCK_PATH=path) as worker:
            connection, _ = server.accept()
            with connection:
                connection.settimeout(TIMEOUT)
                assert receive(connection, 10) == struct.pack("!i", worker.pid) + b"hello "


def test_other_programs_run_as_ever(start: Callable[..., subprocess.Popen[str]]) -> None:
    """Without a JVM to connect to, and for anything but a module, it is the interpreter."""
    with start("-c", "import sys; print(sys.argv[1:], sys.flags.no_site)", "a b") as other:
        assert other.communicate(timeout=TIMEOUT)[0] == "['a b'] 0\n"
    with start("-m", "worker", PYTHON_WORKER_FACTORY_PORT="1", PYTHON_WORKER_FACTORY_SECRET="x") as alone:
        assert "imported" in alone.communicate(timeout=TIMEOUT)[0]
    assert alone.returncode == 1
