"""Owner, group, permissions and ACL: what is replaced keeps its own, what is new gets the directory's."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from sbus import ownership
from sbus.errors import UsageError
from sbus.ownership import Access, access_of, adopt, check_replaceable, create, make_directory, replacing
from tests.support.acls import acl, acl_of, set_acl, with_acls

__all__ = ["with_acls"]

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
USER, GROUP = 12345, 12346

_AS_ANOTHER = """
import os, sys
from sbus.ownership import replacing
os.setgroups([]), os.setgid(20001), os.setuid(20000)
for name in sys.argv[1:]:
    with replacing(name) as file:
        file.write(b"new")
"""


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def owner_of(path: Path) -> tuple[int, int]:
    return path.lstat().st_uid, path.lstat().st_gid


def write(path: Path, mode: int | None = None, text: bytes = b"new") -> None:
    with replacing(path, mode) as file:
        file.write(text)


def test_a_new_file_has_the_mode_that_is_asked_for(tmp_path: Path) -> None:
    """The umask does not change explicit permissions, and decides where none are given."""
    before = os.umask(0o027)
    try:
        write(tmp_path / "asked", 0o666)
        write(tmp_path / "left", None)
        os.close(create(tmp_path / "created", 0o644))
        make_directory(tmp_path / "made", 0o775)
    finally:
        os.umask(before)
    assert [mode_of(tmp_path / name) for name in ("asked", "left", "created", "made")] == [0o666, 0o640, 0o644, 0o775]


def test_a_file_that_is_replaced_keeps_its_mode(tmp_path: Path) -> None:
    """Permissions that the operator has set outlive the next writing."""
    path = tmp_path / "page"
    for mode in (0o644, 0o600, 0o640):
        path.write_bytes(b"old")
        path.chmod(mode)
        write(path, 0o600)
        assert (mode_of(path), path.read_bytes()) == (mode, b"new")


def test_a_file_that_is_replaced_keeps_its_acl(with_acls: Path) -> None:
    """So does an ACL, with its mask."""
    path = with_acls / "page"
    path.touch(0o600)
    set_acl(path, acl(USER, own=6, other_user=4, group=0, mask=4))
    before = acl_of(path)
    write(path, 0o600)
    assert (acl_of(path), mode_of(path)) == (before, 0o640)


def test_what_is_new_gets_the_default_acl(with_acls: Path) -> None:
    """A default ACL of the directory takes the place of the permissions; a plain file cannot be executed."""
    set_acl(with_acls, acl(USER), default=True)
    make_directory(with_acls / "made", 0o700)
    os.close(create(with_acls / "made" / "file", 0o600))
    assert acl_of(with_acls / "made", default=True) == acl(USER)
    assert acl_of(with_acls / "made") == acl(USER)
    assert acl_of(with_acls / "made" / "file") == acl(USER, own=6, mask=6)
    assert mode_of(with_acls / "made" / "file") == 0o660


def test_what_was_made_elsewhere_gets_the_acl_of_its_place(with_acls: Path) -> None:
    """A file that moves gets the default ACL of the directory that it moves to, not that of where it was made."""
    for name, user in (("from", 1), ("to", 2)):
        make_directory(with_acls / name, 0o700)
        set_acl(with_acls / name, acl(user), default=True)
    path = with_acls / "from" / "file"
    path.touch()
    adopt(path, ownership.at(with_acls / "to" / "file", 0o600))
    assert acl_of(path) == acl(2, own=6, mask=6)


def test_directories_inherit_the_set_group_id_bit(tmp_path: Path) -> None:
    """A directory that passes its group on, passes on the bit that says so."""
    tmp_path.chmod(0o2750)
    make_directory(tmp_path / "made", 0o750)
    assert mode_of(tmp_path / "made") == 0o2750


@as_root
def test_what_root_makes_belongs_to_the_owner_of_the_directory(tmp_path: Path) -> None:
    """Root leaves nothing in the directory of another user that this user cannot replace."""
    os.chown(tmp_path, USER, GROUP)
    make_directory(tmp_path / "made", 0o700)
    os.close(create(tmp_path / "made" / "file", 0o600))
    os.close(ownership.open_or_create(tmp_path / "made" / "lock", os.O_RDWR, 0o600))
    write(tmp_path / "made" / "page", 0o600)
    for path in (tmp_path / "made", *(tmp_path / "made").iterdir()):
        assert owner_of(path) == (USER, GROUP)


@as_root
def test_what_root_replaces_keeps_its_owner(tmp_path: Path) -> None:
    """The owner of a file may be another one than that of its directory."""
    path = tmp_path / "page"
    path.touch(0o640)
    os.chown(path, USER, GROUP)
    write(path)
    assert (owner_of(path), mode_of(path)) == ((USER, GROUP), 0o640)


@as_root
def test_a_directory_for_all_says_nothing(tmp_path: Path) -> None:
    """Where everyone may write, what root makes stays root's, whoever owns the directory."""
    os.chown(tmp_path, USER, GROUP)
    tmp_path.chmod(0o1777)
    os.close(create(tmp_path / "file", 0o600))
    assert owner_of(tmp_path / "file") == (0, 0)


@as_root
@pytest.mark.parametrize(
    ("above", "mode", "owner", "kept"),
    [
        (0, 0o1777, 20000, False),
        (USER, 0o1777, 20000, False),
        (0, 0o777, 20000, False),
        (0, 0o1777, 0, True),
        (USER, 0o1777, USER, True),
        (0, 0o775, 20000, True),
    ],
)
def test_what_another_user_has_planted(above: int, mode: int, owner: int, kept: bool, tmp_path: Path) -> None:
    """Where everyone may write, what root replaces neither goes to the user who was there first, nor is open to all."""
    os.chown(tmp_path, above, above)
    tmp_path.chmod(mode)
    path = tmp_path / "page"
    path.touch()
    path.chmod(0o666)
    os.chown(path, owner, owner)
    write(path, 0o600)
    assert (owner_of(path), mode_of(path)) == (((owner, owner), 0o666) if kept else ((0, 0), 0o600))


@as_root
def test_root_follows_no_link_of_another_user(tmp_path: Path) -> None:
    """A link that the owner of a directory has put there leads root to no other file."""
    (tmp_path / "mine").mkdir()
    precious = tmp_path / "precious"
    precious.write_bytes(b"old")
    home = tmp_path / "theirs"
    home.mkdir()
    link = home / "page"
    link.symlink_to(precious)
    os.lchown(link, USER, GROUP)
    os.chown(home, USER, GROUP)
    write(link)
    assert (precious.read_bytes(), link.is_symlink(), owner_of(precious)) == (b"old", False, (0, 0))
    (home / "lock").symlink_to(precious)
    with pytest.raises(OSError, match="symbolic links"):
        ownership.open_or_create(home / "lock", os.O_RDWR, 0o600)
    with pytest.raises(OSError, match="symbolic links"):
        adopt(home / "lock", Access(USER, GROUP, 0o600))
    os.link(precious, home / "name")
    adopt(home / "name", Access(USER, GROUP, 0o600))
    assert owner_of(precious) == (0, 0)


@as_root
def test_a_group_that_cannot_be_kept_leaves_no_rights_to_another() -> None:
    """If a user may not keep the group of a file, the user's own group does not get that group's permissions."""
    with tempfile.TemporaryDirectory() as home:  # not below a directory that is closed to that user
        os.chown(home, 0, 20001)
        os.chmod(home, 0o775)
        names = [Path(home, "closed"), Path(home, "open")]
        for path, mode in zip(names, (0o640, 0o664), strict=True):
            path.touch()
            os.chown(path, USER, GROUP)
            path.chmod(mode)
        subprocess.run([sys.executable, "-c", _AS_ANOTHER, *map(str, names)], check=True)
        assert [owner_of(path) for path in names] == [(20000, 20001)] * 2
        assert [mode_of(path) for path in names] == [0o600, 0o644]


def test_a_link_leads_to_the_file_that_is_replaced(tmp_path: Path) -> None:
    """A page whose name is a link of its owner stays one."""
    (tmp_path / "web").mkdir()
    (tmp_path / "page").symlink_to("web/page")
    for text in (b"first", b"second"):
        write(tmp_path / "page", text=text)
        assert (tmp_path / "page").is_symlink()
        assert (tmp_path / "web" / "page").read_bytes() == text
    assert os.listdir(tmp_path / "web") == ["page"]


def test_a_pipe_is_written_and_not_replaced(tmp_path: Path) -> None:
    """A pipe, a device or a terminal in place of the file gets the bytes."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(path.read_bytes()), daemon=True)
    reader.start()
    check_replaceable(path)
    write(path)
    reader.join()
    assert found == [b"new"]
    assert stat.S_ISFIFO(path.lstat().st_mode)


def test_a_failure_leaves_the_old_file(tmp_path: Path) -> None:
    """If the block fails, the old file stays, and no other one is left."""
    path = tmp_path / "page"
    path.write_bytes(b"old")
    with pytest.raises(TypeError), replacing(path) as file:
        file.writelines([b"new", None])  # type: ignore[list-item]
    assert (path.read_bytes(), os.listdir(tmp_path)) == (b"old", ["page"])


def test_a_check_leaves_nothing(tmp_path: Path) -> None:
    """A check reports what writing would, and leaves no file."""
    check_replaceable(tmp_path / "page")
    assert os.listdir(tmp_path) == []
    with pytest.raises(IsADirectoryError):
        check_replaceable(tmp_path)
    with pytest.raises(FileNotFoundError):
        check_replaceable(tmp_path / "nowhere" / "page")


def test_a_mode_must_let_the_owner_work() -> None:
    """Permissions that lock the owner out are refused."""
    assert ownership.check_file_mode(0o640) == 0o640
    with pytest.raises(UsageError, match="--mode=0440: the owner must be able to read and write"):
        ownership.check_file_mode(0o440)
    assert [ownership.directory_mode(mode) for mode in (0o600, 0o640, 0o664)] == [0o700, 0o750, 0o775]


def test_access_is_what_a_file_has(with_acls: Path) -> None:
    """What is read of a file can be given to another one, and is then the same."""
    first, second = with_acls / "first", with_acls / "second"
    first.mkdir(0o700)
    set_acl(first, acl(USER))
    set_acl(first, acl(GROUP), default=True)
    second.mkdir(0o755)
    adopt(second, access_of(first))
    assert access_of(second) == access_of(first)
