"""A server of object storage (S3), in a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

__all__ = ["object_storage"]

_TIMEOUT = 60.0


@contextmanager
def object_storage() -> Iterator[str]:
    """Run a server with an empty bucket, and set the environment for its clients; yield the URL of the bucket."""
    pytest.importorskip("moto", reason="the extra interop is not installed")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            endpoint = f"http://127.0.0.1:{port}"
            deadline = time.monotonic() + _TIMEOUT
            while True:
                try:
                    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/bucket", method="PUT")).close()
                    break
                except urllib.error.URLError:
                    assert server.poll() is None
                    assert time.monotonic() < deadline
                    time.sleep(0.1)
            with pytest.MonkeyPatch.context() as patch:
                for name in [name for name in os.environ if name.startswith("AWS_")]:
                    patch.delenv(name)
                patch.setenv("AWS_ENDPOINT_URL", endpoint)
                patch.setenv("AWS_ALLOW_HTTP", "true")
                patch.setenv("AWS_ACCESS_KEY_ID", "key")
                patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
                patch.setenv("AWS_REGION", "us-east-1")
                yield "s3://bucket"
        finally:
            server.terminate()
