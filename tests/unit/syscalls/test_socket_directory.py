"""Temporary directories for sockets."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from pathlib import Path
from unittest import mock

import pytest

from sbus.errors import AddressError
from sbus.syscalls.socket_directory import fits_socket, new_socket_directory


def use(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """Make a directory that of temporary files."""
    directory.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(tempfile, "tempdir", str(directory))


def test_short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The usual directory for temporary files is used if its path is short enough."""
    short = Path(tempfile.mkdtemp(dir="/tmp"))
    use(monkeypatch, short)
    try:
        assert Path(new_socket_directory()).parent == short
    finally:
        shutil.rmtree(short)


@pytest.mark.parametrize("length", range(30, 120, 7))
def test_long(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, length: int) -> None:
    """However long the usual one is, a socket with a name of up to 32 bytes can be bound."""
    use(monkeypatch, tmp_path / ("ä" * (length // 2)))
    directory = new_socket_directory("sbus-bench-")
    try:
        path = os.path.join(directory, "x" * 32)
        assert fits_socket(path)
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(path)
    finally:
        shutil.rmtree(directory)


def test_nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a usable directory the error names the remedy."""
    use(monkeypatch, tmp_path / ("d" * 100))
    with (
        mock.patch("tempfile.mkdtemp", side_effect=PermissionError),
        pytest.raises(AddressError, match="set TMPDIR to a directory with a short path"),
    ):
        new_socket_directory()


def test_longest_path() -> None:
    """A path of 107 bytes fits, and one of 108 does not."""
    assert fits_socket("x" * 107)
    assert not fits_socket("x" * 108)
