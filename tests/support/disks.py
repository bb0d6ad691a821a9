"""Real small file systems, and how to fill them."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__ = ["fill", "filled", "mounted"]


@contextlib.contextmanager
def mounted(place: Path, size: str = "4m") -> Iterator[Path]:
    """Mount a small file system for the block; skip the test if that is not permitted.

    :param size: its size, as for tmpfs.
    """
    place.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("only root can mount a small file system")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(ballast: Path) -> None:
    """Fill a file system but for less than 4096 bytes."""
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


@contextlib.contextmanager
def filled(disk: Path) -> Iterator[None]:
    """Keep a file system full for the block."""
    ballast = disk / "_ballast"
    fill(ballast)
    try:
        yield
    finally:
        ballast.unlink()
