"""The users and groups that can connect to a bus, and the modes of its socket."""

from __future__ import annotations

import grp
import json
import os
import pwd
import stat
import subprocess
import sys

import pytest

from tests.support.harness import (
    OTHER_USER,
    THIRD_USER,
    Client,
    refusal,
)
from tests.support.waiting import paused


class TestMode:
    """--mode and --group: which users can connect."""

    @pytest.mark.parametrize("mode", ["0700", "0777", "700", "0"])
    def test_final_mode(self, bus, directory, mode):
        """The file has exactly this mode, whatever the umask; without --mode 0700."""
        options = () if mode == "0700" else (f"--mode={mode}",)
        bus(*options, umask=0o077)
        assert stat.S_IMODE((directory / "bus").stat().st_mode) == int(mode, 8)

    @pytest.mark.parametrize(("mode", "umask"), [("0700", 0), ("0750", 0o022), ("0777", 0o777)])
    def test_never_more(self, bus, directory, mode, umask):
        """The file never has more permissions than the mode, not even for a moment, as an observer outside sees."""
        program = (
            "import os, sys\n"
            "path, final, seen = sys.argv[1], int(sys.argv[2], 8), set()\n"
            "stat = os.stat\n"
            "print('watching', flush=True)\n"
            "while True:\n"
            "    try:\n"
            "        mode = stat(path).st_mode & 0o7777\n"
            "    except FileNotFoundError:\n"
            "        continue\n"
            "    seen.add(mode)\n"
            "    if mode == final: break\n"
            "print(sorted(seen))\n"
        )
        command = [sys.executable, "-c", program, str(directory / "bus"), mode]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watcher:
            try:
                assert watcher.stdout is not None
                assert watcher.stdout.readline() == "watching\n"
                bus(f"--mode={mode}", umask=umask)
                seen = json.loads(watcher.stdout.readline())
            finally:
                watcher.kill()
        assert seen[-1] == int(mode, 8)
        assert all(found & ~int(mode, 8) == 0 for found in seen), [oct(found) for found in seen]

    def test_never_more_step_by_step(self, bus, directory):
        """The same at each step of the server: it is looked at before each change of the file."""
        (directory / "sitecustomize.py").write_text(
            "import os, sys\n"
            f"path = {str(directory / 'bus')!r}\n"
            "def hook(event, args):\n"
            "    if event in ('os.chmod', 'os.chown', 'socket.bind', 'socket.listen') and os.path.exists(path):\n"
            "        print('step', event, oct(os.stat(path).st_mode & 0o7777), flush=True)\n"
            "sys.addaudithook(hook)\n"
        )
        path = os.pathsep.join([str(directory), *filter(None, [os.environ.get("PYTHONPATH")])])
        started = bus("--mode=0640", f"--group={os.getegid()}", umask=0, env={"PYTHONPATH": path})
        steps = [match[1] for match in started.wait_log(r"step os\.ch\w+ (0o\d+)", 2)]
        assert set(steps) == {"0o0"}

    @pytest.mark.parametrize("mode", ["", "rwx", "1777"])
    def test_no_mode(self, directory, mode):
        """Text that is not a mode is refused with an example of one."""
        line = refusal(directory, f"--mode={mode}")
        assert f"--mode={mode}: " in line
        assert "such as 770" in line

    def test_others_are_kept_out(self, as_root, bus):
        """With the default mode no other user can connect."""
        started = bus()
        with pytest.raises(PermissionError):
            Client(started.address, user=OTHER_USER)

    @pytest.mark.parametrize("by", ["name", "number"])
    def test_group(self, as_root, bus, directory, by):
        """The file belongs to the group, whose members may connect if the mode says so; others may not."""
        group = next(entry for entry in grp.getgrall() if entry.gr_gid not in (os.getegid(), 65534))
        started = bus("--mode=0770", f"--group={group.gr_name if by == 'name' else group.gr_gid}")
        assert (directory / "bus").stat().st_gid == group.gr_gid
        member = started.client(b"hello", user=(OTHER_USER[0], group.gr_gid))
        packet = member.msg(b"hello")
        assert member.sync() == [packet]
        with pytest.raises(PermissionError):
            Client(started.address, user=OTHER_USER)

    def test_no_such_group(self, directory):
        """A group that does not exist is refused before there is a socket."""
        line = refusal(directory, "--group=no-such-group")
        assert "there is no group 'no-such-group'" in line
        assert "getent group" in line

    def test_group_of_others(self, become, directory):
        """A user who is not a member of the group (nor root) gets an error that says so."""
        directory.chmod(0o777)
        line = refusal(directory, "--group=0", before=become)
        assert "only a member of the group (or root)" in line
        assert "--group" in line


class TestUsers:
    """--allow-user, and policies."""

    def test_only_those(self, as_root, bus):
        """Only the named users and the server's own are admitted; the log names the others."""
        started = bus("--mode=0777", f"--allow-user={OTHER_USER[0]}")
        allowed = started.client(b"hello", user=OTHER_USER)
        own = started.client()
        packet = own.msg(b"hello")
        own.sync()
        assert allowed.sync() == [packet]
        refused = started.client(user=THIRD_USER)
        assert refused.has_ended()
        who = f"pid {refused.pid} uid {refused.uid} gid {refused.gid}"
        started.wait_log(f"warn: refused a connection from {who}: the client's user is not allowed on this bus")

    def test_by_name_and_several(self, as_root, bus):
        """Users can be given by name, and more than one."""
        user = next(entry for entry in pwd.getpwall() if entry.pw_uid not in (0, 65534))
        started = bus("--mode=0777", f"--allow-user={user.pw_name}", "-u", str(THIRD_USER[0]))
        for allowed in ((user.pw_uid, user.pw_gid), THIRD_USER):
            assert started.client(user=allowed).sync() == []
        assert started.client(user=OTHER_USER).has_ended()

    @pytest.mark.parametrize("group", [OTHER_USER[0], 0])
    def test_the_group_does_not_matter(self, as_root, bus, group):
        """The UID decides."""
        started = bus("--mode=0777", f"--allow-user={OTHER_USER[0]}")
        assert started.client(user=(OTHER_USER[0], group)).sync() == []
        assert started.client(user=(THIRD_USER[0], group)).has_ended()

    def test_refused_publisher(self, as_root, bus):
        """Packets that a refused user has sent in the meantime are not handled."""
        started = bus("--mode=0777", f"--allow-user={OTHER_USER[0]}")
        listener = started.client(b"")
        with paused(started.pid):
            refused = Client(started.address, user=THIRD_USER)
            refused.msg(b"hello")
        with refused:
            assert refused.rest() == []
        assert listener.sync() == []

    def test_own_user_is_always_allowed(self, become, bus, directory):
        """The server's own user need not be named; root must be."""
        directory.chmod(0o777)
        started = bus("--mode=0777", f"--allow-user={THIRD_USER[0]}", before=become)
        assert started.client(user=OTHER_USER).sync() == []
        assert started.client(user=THIRD_USER).sync() == []
        assert started.client().has_ended()

    def test_no_such_user(self, directory):
        """A user that does not exist is refused."""
        line = refusal(directory, "--allow-user=no-such-user")
        assert "--allow-user=no-such-user: there is no such user" in line
        assert "getent passwd" in line

    @pytest.mark.parametrize("uid", ["4294967295", "-1"])
    def test_no_uid(self, directory, uid):
        """Text that is not a UID is refused."""
        assert f"--allow-user={uid}: " in refusal(directory, f"--allow-user={uid}")

    def test_own_user_policy(self, as_root, bus):
        """--credentials=own-user refuses every other user, whatever the mode and --allow-user say."""
        started = bus("--mode=0777", "--credentials=own-user", f"--allow-user={OTHER_USER[0]}")
        assert started.client().sync() == []
        assert started.client(user=OTHER_USER).has_ended()

    def test_no_such_policy(self, directory):
        """A policy that is not installed is refused, and the error lists those that are."""
        line = refusal(directory, "--credentials=none-such")
        assert "'none-such'" in line
        assert "kernel, own-user" in line
