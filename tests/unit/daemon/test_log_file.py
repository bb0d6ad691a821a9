"""Log files with a bound, on a real disk."""

from __future__ import annotations

import os
import stat
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbus.daemon.log_file import BoundedLogFile, OutputFiles

LINE = b"x" * 99 + b"\n"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "bus.log"


def total(path):
    """Return the contents of all files, the oldest first."""
    numbered = sorted(path.parent.glob("bus.log.*"), key=lambda found: -int(found.suffix[1:]))
    return b"".join(found.read_bytes() for found in [*numbered, path])


def test_rotates_at_the_size_and_keeps_so_many(path):
    """No file is larger than the limit, there are never more files, and the newest lines are in them."""
    file = BoundedLogFile(path, 1_000, 3)
    for number in range(100):
        file.write(b"%099d\n" % number)
        assert len(os.listdir(path.parent)) <= 3
    file.close()
    assert sorted(os.listdir(path.parent)) == ["bus.log", "bus.log.1", "bus.log.2"]
    assert all((path.parent / name).stat().st_size == 1_000 for name in os.listdir(path.parent))
    assert total(path) == b"".join(b"%099d\n" % number for number in range(70, 100))


@given(st.lists(st.integers(1, 400), max_size=30), st.integers(1, 4))
def test_what_is_kept_is_the_end(tmp_path_factory, sizes, files):
    """Whatever is written, the files together are the end of it, and none is larger than the limit or one line."""
    path = tmp_path_factory.mktemp("log") / "bus.log"
    file = BoundedLogFile(path, 300, files)
    written = b""
    for number, size in enumerate(sizes):
        line = b"%0*d\n" % (size, number)
        written += line
        file.write(line)
        assert path.stat().st_size <= max(300, len(line))
    file.close()
    assert written.endswith(total(path))
    assert len(os.listdir(path.parent)) <= files


def test_continues_a_file(path):
    """A file that is there is appended to, and counts toward the size."""
    path.write_bytes(LINE * 9)
    file = BoundedLogFile(path, 1_000, 2)
    file.write(LINE)
    assert len(os.listdir(path.parent)) == 1
    file.write(LINE)
    file.close()
    assert (path.parent / "bus.log.1").stat().st_size == 1_000
    assert path.read_bytes() == LINE


def test_files_beyond_the_number_are_removed(path):
    """Files that an earlier, larger limit has left are removed; other files are not."""
    for name in ("bus.log.1", "bus.log.7", "bus.log.07", "bus.log.old", "bus.log.1.gz"):
        (path.parent / name).write_bytes(b"old")
    file = BoundedLogFile(path, 150, 2)
    file.write(LINE)
    file.write(LINE)
    file.close()
    assert sorted(os.listdir(path.parent)) == ["bus.log", "bus.log.07", "bus.log.1", "bus.log.1.gz", "bus.log.old"]


def test_keeps_the_newer_half_if_it_cannot_rotate(path):
    """Without a place for the older file, the newer half of the lines stays, and the file does not grow."""
    (path.parent / "bus.log.1").mkdir()
    (path.parent / "bus.log.1" / "full").touch()
    file = BoundedLogFile(path, 1_000, 2)
    for number in range(100):
        file.write(b"%099d\n" % number)
        assert path.stat().st_size <= 1_000
    file.close()
    lines = path.read_bytes().splitlines()
    assert lines == [b"%099d" % number for number in range(100 - len(lines), 100)]
    assert len(lines) >= 4


def test_a_file_that_no_call_copies_at_once(path, monkeypatch):
    """Of a long file each call of the kernel brings a part, as of 3 GB the first 2 GiB; all of it is kept."""
    pread, sendfile = os.pread, os.sendfile
    monkeypatch.setattr(os, "pread", lambda fd, size, at: pread(fd, min(size, 150), at))
    monkeypatch.setattr(os, "sendfile", lambda out, fd, at, size: sendfile(out, fd, at, min(size, 150)))
    file = BoundedLogFile(path, 1_000, 2)
    for number in range(11):
        file.write(b"%099d\n" % number)
    file.close()
    assert total(path) == b"".join(b"%099d\n" % number for number in range(11))


def test_rotates_without_a_free_descriptor(path, monkeypatch):
    """Without a descriptor for the older file the newer half stays, in a file that is still open."""
    file = BoundedLogFile(path, 1_000, 2)
    monkeypatch.setattr("sbus.daemon.log_file.BoundedLogFile._copy", _no_descriptor)
    for _ in range(100):
        file.write(LINE)
    file.close()
    assert 400 <= path.stat().st_size <= 1_000


def _no_descriptor(*_):
    raise OSError(24, "Too many open files")


def test_rotated_files_are_as_private_as_the_log(path):
    """An older file has the log's permissions, and a link in its place is not followed."""
    path.touch(0o600)
    file = BoundedLogFile(path, 150, 2)
    (path.parent / "bus.log.1").symlink_to(path.parent / "target")
    file.write(LINE)
    file.write(LINE)
    file.close()
    found = (path.parent / "bus.log.1").lstat()
    assert stat.S_ISREG(found.st_mode)
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert not (path.parent / "target").exists()


def test_one_file_is_emptied(path):
    """With one file, the older lines are gone."""
    file = BoundedLogFile(path, 150, 1)
    file.write(LINE)
    file.write(LINE[::-1])
    file.close()
    assert os.listdir(path.parent) == ["bus.log"]
    assert path.read_bytes() == LINE[::-1]


@pytest.mark.parametrize("how", ["mv", "rm", "create"])
def test_another_program_rotates(path, how):
    """After another program has moved or removed the log, the next lines are at its path; mode and owner stay."""
    path.touch(0o640)
    file = BoundedLogFile(path, 1_000, 3)
    file.write(b"before\n")
    if how == "rm":
        path.unlink()
    else:
        path.rename(path.parent / "moved")
    if how == "create":
        path.touch(0o600)
    file.rotate()
    file.write(b"after\n")
    file.close()
    assert path.read_bytes() == b"after\n"
    assert stat.S_IMODE(path.stat().st_mode) == (0o600 if how == "create" else 0o640)
    assert sorted(os.listdir(path.parent)) == ["bus.log"] if how == "rm" else ["bus.log", "moved"]


def test_a_moved_log_does_not_grow_for_ever(path):
    """Without a signal, a log that was moved away goes on at its path once it is full."""
    file = BoundedLogFile(path, 250, 3)
    file.write(LINE)
    path.rename(path.parent / "moved")
    for _ in range(3):
        file.write(LINE)
    file.close()
    assert (path.parent / "moved").read_bytes() == 2 * LINE
    assert path.read_bytes() == 2 * LINE


def test_goes_on_in_the_old_file(path):
    """If no new file can be opened, rotation fails, and the log goes on in the file that was moved."""
    file = BoundedLogFile(path, 1_000, 3)
    path.rename(path.parent / "moved")
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        file.rotate()
    file.write(LINE)
    file.close()
    assert (path.parent / "moved").read_bytes() == LINE


def test_output_files(tmp_path):
    """Standard output and standard error that are files go on at their paths after these were moved away."""
    code = (
        "import os, sys\nfrom sbus.daemon.log_file import OutputFiles\nfiles = OutputFiles()\n"
        "for name in ('out', 'error'):\n    os.rename(name, name + '.1')\n"
        "files.rotate()\nprint('one')\nprint('two', file=sys.stderr)\n"
    )
    with (tmp_path / "out").open("w") as out, (tmp_path / "error").open("w") as error:
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, stdout=out, stderr=error, check=True)
    assert (tmp_path / "out").read_text() == "one\n"
    assert (tmp_path / "error").read_text() == "two\n"
    assert not (tmp_path / "out.1").stat().st_size


def test_other_outputs_are_left_alone(capfd):
    """Pipes and terminals are not touched."""
    OutputFiles().rotate()
    os.write(1, b"still here")
    assert capfd.readouterr().out == "still here"
