"""``sbus pub --file`` and ``sbus sub`` with messages that fit no packet, and ``sub --save``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.cli.commands import Sbus, failure, misuse, sbus
from tests.support.disks import mounted
from tests.support.harness import Bus
from tests.support.servers import StartBus

LARGE = bytes(range(256)) * 8_000
"""Bytes that fit no packet."""


def test_file_that_fits_no_packet(shared: Bus, directory: Path) -> None:
    """A file of any length is published, several times too, and printed."""
    path = directory / "large"
    path.write_bytes(LARGE)
    with Sbus(shared, "sub", "-v", "--raw", "--count", "2", "camera/raw").wait_subscribed() as reader:
        assert sbus(shared, "pub", "camera/raw", "--file", path, "--repeat", "2") == (b"", "")
        assert reader.end() == (0, LARGE * 2, "")


def test_file_above_the_limit(bus: StartBus, directory: Path) -> None:
    """The error for a file above the limit names the option of the server; standard input has the packet's limit."""
    small = bus("--max-payload=1500000")
    path = directory / "large"
    path.write_bytes(LARGE)
    assert "has more than 1500000 bytes" in (error := failure(small, "pub", "k", "--file", path, status=2))
    assert "--max-payload" in error
    assert "has more than 409600 bytes" in (error := failure(small, "pub", "k", "-", stdin=LARGE, status=2))
    assert "publish it from a file (--file)" in error


def test_payloads_are_saved(shared: Bus, directory: Path) -> None:
    """Each payload goes to a file of its own, whose name has the number and the key, whatever the key contains."""
    saved = directory / "new" / "saved"
    path = directory / "large"
    path.write_bytes(LARGE)
    keys = ["saved/large", "saved/../../etc/passwd", "saved/" + "k" * 500]
    with Sbus(shared, "sub", "-v", "--save", saved, "--count", "3", "saved/").wait_subscribed() as reader:
        sbus(shared, "pub", keys[0], "--file", path)
        sbus(shared, "pub", keys[1], "small")
        sbus(shared, "pub", keys[2], "")
        status, output, errors = reader.end()
    assert (status, errors) == (0, "")
    names = ["000001-saved%2Flarge", "000002-saved%2F..%2F..%2Fetc%2Fpasswd", "000003-saved%2F" + "k" * 192]
    assert sorted(file.name for file in saved.iterdir()) == names
    assert [(saved / name).read_bytes() for name in names] == [LARGE, b"small", b""]
    assert output.decode().splitlines() == [f"{key} {saved / name}" for key, name in zip(keys, names, strict=True)]


def test_files_are_not_overwritten(shared: Bus, directory: Path) -> None:
    """A file that is there already ends the command, and stays as it is."""
    (directory / "000001-saved%2Fagain").write_bytes(b"old")
    with Sbus(shared, "sub", "-v", "--save", directory, "saved/again").wait_subscribed() as reader:
        sbus(shared, "pub", "saved/again", "new")
        status, _, errors = reader.end()
    assert status == 1
    assert "File exists: name an empty directory" in errors
    assert (directory / "000001-saved%2Fagain").read_bytes() == b"old"


def test_payload_that_finds_no_room(shared: Bus, directory: Path) -> None:
    """A full disk ends the command with the file's name and the remedy, and no part of a payload stays."""
    with (
        mounted(directory / "disk", "64k") as disk,
        Sbus(shared, "sub", "-v", "--save", disk, "full/").wait_subscribed() as reader,
    ):
        for _ in range(2):
            sbus(shared, "pub", "full/k", "-", stdin=bytes(40_000))
        status, output, errors = reader.end()
        first, second = disk / "000001-full%2Fk", disk / "000002-full%2Fk"
        assert (status, output.decode()) == (1, f"full/k {first}\n")
        assert f"cannot write a payload to {second}: No space left on device: make room there, or name" in errors
        assert list(disk.iterdir()) == [first]


@pytest.mark.parametrize("option", ["--json", "--raw", "--format=%k"])
def test_saved_names_are_text(option: str) -> None:
    """``--save`` contradicts the other forms of output."""
    assert "leave out --json, --raw and --format" in misuse("sub", "--save", "x", option, "k")
