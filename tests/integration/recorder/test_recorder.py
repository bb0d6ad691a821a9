"""The recorder as a process, with a real bus: what is recorded, which gaps there are, how both start and stop."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sbus.client.blocking import connect
from sbus.errors import JournalError
from sbus.syscalls.polling import is_readable
from tests.integration.recorder.conftest import QUICK, Recorder
from tests.support.disks import fill, mounted
from tests.support.harness import TIMEOUT, Bus, Client, Process, environment_with, run, twistd
from tests.support.journals import rows
from tests.support.original import OriginalServer
from tests.support.waiting import paused, wait_until


def there(journal: Path) -> list[dict[str, Any]]:
    """Return the rows that readers see; none while there is no journal."""
    try:
        return rows(journal)
    except JournalError:
        return []


def wait_rows(journal: Path, condition: Callable[[list[dict[str, Any]]], Any]) -> list[dict[str, Any]]:
    """Poll the files until the rows meet a condition; no event announces new rows."""
    return wait_until(lambda: there(journal), condition)


def kinds(found: list[dict[str, Any]]) -> list[str]:
    """Return the kinds of rows; each run of messages counts once."""
    texts = [row["kind"] for row in found]
    return [text for text, before in zip(texts, [None, *texts], strict=False) if text != before or text != "message"]


def packets(found: list[dict[str, Any]]) -> list[bytes]:
    """Return the messages among the rows, as packets."""
    return [b"MSG %b\0%b" % (row["key"], row["payload"]) for row in found if row["kind"] == "message"]


def ends_with(packet: bytes) -> Callable[[list[dict[str, Any]]], bool]:
    return lambda found: packets(found)[-1:] == [packet]


def details(row: dict[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(row["payload"])
    return fields


@pytest.mark.slow
def test_everything_in_order(
    bus: Callable[..., Bus],
    recorder: Callable[..., Recorder],
    journal: Path,
    directory: Path,
) -> None:
    """Matching messages are recorded once, in order and byte for byte; secrets are not.

    A second recorder is refused. Only the owner can read the files.
    """
    started = bus()
    process = recorder("--pattern=", "--pattern=a/", "--pattern=a/*", "--sync=1h", "--batch-time=1h")
    second = run([*twistd(), "-n", "--pidfile=", "sbus-recorder", f"--socket={directory}/bus", f"--journal={journal}"])
    assert second.returncode == 1
    assert re.fullmatch(rf"sbus-recorder: .*process {process.pid} writes this journal.*\n", second.stderr)
    client = started.client()
    published = [
        client.msg(b"a/b", b"\0\xff"),
        client.msg(b"", b""),
        client.msg(b"a/\xff\\", bytes(100_000)),
        *[client.msg(b"load/%d" % i, b"%d" % i) for i in range(5_000)],
    ]
    client.msg(b"!/cred////secret", b"hidden")
    client.sync()
    process.kill(signal.SIGUSR2)
    process.wait_log(r"recorded \d+ messages \(\d+ bytes\) and 1 gaps; \d+ bytes of memory wait for the disk")
    assert process.stop() == 0
    found = rows(journal)
    assert packets(found) == published
    assert kinds(found) == ["start", "message", "stop"]
    assert [row["seq"] for row in found] == list(range(len(published) + 2))
    fields = details(found[0])
    assert (fields["patterns"], fields["socket"], fields["ended"]) == (["", "a/", "a/*"], f"{directory}/bus", "new")
    assert details(found[-1]) == {}
    assert re.search(r"recorded 5003 messages \(\d+ bytes\) and 2 gaps;.* lost 0 messages", process.log)
    assert {stat.S_IMODE(path.stat().st_mode) for path in journal.iterdir()} == {0o600}
    assert stat.S_IMODE(journal.stat().st_mode) == 0o700


def test_a_lone_message_and_a_crash(bus: Callable[..., Bus], recorder: Callable[..., Recorder], journal: Path) -> None:
    """A lone message is visible soon; visible rows survive kill -9, and recording continues behind them."""
    client = bus().client()
    published: list[bytes] = []
    ended = "new"
    for number in range(2):
        process = recorder("--mode=0640")
        for i in range(3):
            published.append(client.msg(b"lone", b"%d" % (3 * number + i)))
            found = wait_rows(journal, ends_with(published[-1]))
        assert packets(found) == published
        assert details([row for row in found if row["kind"] == "start"][-1])["ended"] == ended
        ended = "crash"
        client.msg(b"torn", bytes(1000))
        process.kill(signal.SIGKILL)
        process.wait()
        found = rows(journal)
        assert packets(found)[: len(published)] == published
        published = packets(found)
    assert [row["seq"] for row in found] == list(range(len(found)))
    assert stat.S_IMODE(journal.stat().st_mode) == 0o750


def test_bus_that_comes_and_goes(
    bus: Callable[..., Bus],
    spawn: Callable[..., Any],
    directory: Path,
    journal: Path,
) -> None:
    """Without a bus the recorder keeps trying and logs why; a bus that returns is a row between the messages."""
    process: Recorder = spawn(Recorder, directory, directory / "bus", journal, *QUICK)
    process.wait_log(r"nothing is recorded: no bus at .*/bus: No such file or directory: .*; trying again")
    started = bus()
    process.wait_recording()
    before = started.client().msg(b"key", b"before")
    wait_rows(journal, lambda found: packets(found) == [before])
    lost = time.time_ns() // 1000
    assert started.stop() == 0
    process.wait_log("nothing is recorded: the server disconnected this client: the server is stopping")
    again = bus("--reuse")
    process.wait_recording(2)
    back = time.time_ns() // 1000
    after = again.client().msg(b"key", b"after")
    found = wait_rows(journal, lambda found: packets(found) == [before, after])
    assert kinds(found) == ["start", "message", "reconnect", "message"]
    fields = details(found[2])
    assert lost <= fields["since"] <= found[2]["time"].timestamp() * 1e6 + 1 <= back + 1e6
    assert fields["reason"] == f"the server disconnected this client: the server is stopping ({directory}/bus)"
    assert again.stop() == 0
    process.wait_log("nothing is recorded", 3)
    assert process.stop() == 0
    [*_, stop] = rows(journal)
    assert stop["kind"] == "stop"
    assert "the server is stopping" in details(stop)["reason"]


def test_too_slow(bus: Callable[..., Bus], recorder: Callable[..., Recorder], journal: Path) -> None:
    """With --hard=error, messages that the bus drops for a slow recorder are a gap."""
    started = bus("--queue-messages=500")
    process = recorder("--hard=error")
    client = started.client()
    with paused(process.pid):
        published = [client.msg(b"flood", b"%d" % i) for i in range(50_000)]
        client.sync()
        started.wait_log(r"disconnected: pid .*: its queue was full, and it had chosen blocking/hard/error")
    process.wait_recording(2)
    last = client.msg(b"last")
    found = wait_rows(journal, ends_with(last))
    assert kinds(found) == ["start", "message", "lost", "reconnect", "message"]
    got = packets(found)[:-1]
    assert 0 < len(got) < len(published)
    assert got == published[: len(got)]
    (receipt,) = [row["payload"].split() for row in found if row["kind"] == "lost"]
    assert receipt[3] == b"disconnect"
    assert process.stop() == 0


def test_dropped_messages_are_accounted_for(
    bus: Callable[..., Bus], recorder: Callable[..., Recorder], journal: Path
) -> None:
    """With --hard=discard each message is in the journal, or counted by a row in its place."""
    started = bus("--queue-messages=500")
    process = recorder("--hard=discard")
    client = started.client()
    client.send(b"CMSG probe\0flood")
    assert client.recv() == b"CMSG probe\x000 flood"  # a recorder is an observer
    with paused(process.pid):
        published = [client.msg(b"flood", b"%d" % i) for i in range(50_000)]
        client.sync()

    def dropped(row: dict[str, Any]) -> int:
        return int(row["payload"].split()[0]) if row["kind"] == "lost" else 0

    def accounted(found: list[dict[str, Any]]) -> bool:
        return sum(dropped(row) or row["kind"] == "message" for row in found) == len(published)

    missing = recorded = 0
    for row in wait_rows(journal, accounted)[1:]:
        missing += dropped(row)
        if row["kind"] == "lost":
            assert row["payload"].split()[2:] == [b"%d" % missing, b"queue-full"]
        else:
            assert int(row["payload"]) - recorded <= missing, "a gap came before its row"
            recorded += 1
    assert missing > 0
    assert process.stop() == 0
    assert f"the bus dropped {missing}" in process.log


def test_nothing_is_lost_by_default(
    bus: Callable[..., Bus], recorder: Callable[..., Recorder], journal: Path, directory: Path
) -> None:
    """A recorder that was stopped for a moment in a burst holds the publisher, and records the burst whole."""
    started = bus("--queue-messages=500")
    process = recorder()
    program = (  # of a process of its own, because the bus holds it
        "import sys; from sbus.client.blocking import connect\n"
        "with connect(sys.argv[1]) as bus:\n"
        "    for first in range(0, 40000, 1000):\n"
        "        bus.publish_many([(b'flood', b'%d' % i) for i in range(first, first + 1000)])\n"
        "    bus.fence(30)\n"
    )
    with paused(process.pid):
        publisher = subprocess.Popen([sys.executable, "-c", program, str(directory / "bus")])
        with pytest.raises(subprocess.TimeoutExpired):
            publisher.wait(1.5)
    try:
        assert publisher.wait(TIMEOUT) == 0
    finally:
        publisher.kill()
    last = started.client().msg(b"last")
    found = wait_rows(journal, ends_with(last))
    assert kinds(found) == ["start", "message"]
    assert [row["payload"] for row in found[1:-1]] == [b"%d" % i for i in range(40_000)]
    assert process.stop() == 0


def test_a_disk_that_stays_full_holds_nobody(
    bus: Callable[..., Bus], spawn: Callable[..., Any], directory: Path, small_disk: Path
) -> None:
    """Past --max-lag the publishers go on; memory is bounded, and each loss is a row that counts it."""
    started = bus("--queue-messages=500")
    journal, ballast = small_disk / "journal", small_disk / "ballast"
    limits = ("--max-lag=500ms", "--buffer-bytes=300000", "--batch-bytes=100000")
    process: Recorder = spawn(Recorder, directory, directory / "bus", journal, *QUICK, *limits)
    process.wait_recording()
    fill(ballast)
    client = started.client()
    published = [client.msg(b"key", b"%0100d" % i) for i in range(20_000)]
    client.sync()  # it returns, so the publisher is not held
    process.wait_log("the journal .* cannot be written: No space left on device")
    process.wait_log(r"s behind \(--max-lag\)")
    process.kill(signal.SIGUSR2)
    [waiting] = process.wait_log(r"(\d+) bytes of memory wait for the disk")
    assert int(waiting[1]) < 600_000
    ballast.unlink()
    process.wait_log("the recorder has caught up")

    def goes_on(found: list[dict[str, Any]]) -> bool:
        """Whether later messages are recorded; the bus drops them until the recorder's new choice has reached it."""
        if found and found[-1]["key"] == b"later":
            return True
        published.append(client.msg(b"later", b"%d" % len(published)))
        return False

    found = wait_rows(journal, goes_on)
    lost = [row["payload"].split() for row in found if row["kind"] == "lost"]
    got = packets(found)
    assert lost, (len(got), kinds(found)[-3:])
    assert len(got) + sum(int(receipt[0]) for receipt in lost) == published.index(got[-1]) + 1
    assert sorted(got) == got
    assert "full" in kinds(found)
    assert process.stop() == 0


@pytest.fixture
def small_disk(directory: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    with mounted(directory / "small") as place:
        yield place


def test_full_disk(
    bus: Callable[..., Bus],
    spawn: Callable[..., Any],
    directory: Path,
    small_disk: Path,
) -> None:
    """On a full disk the recorder logs the error and keeps its messages; with space it continues without a loss."""
    client = bus().client()
    journal, ballast = small_disk / "journal", small_disk / "ballast"
    process: Recorder = spawn(Recorder, directory, directory / "bus", journal, *QUICK, "--hard=block")
    process.wait_recording()
    published = []
    for size in (150_000, 200):  # one message that does not fit and is the last; then many small ones
        fill(ballast)
        process.mark()
        published += [client.msg(b"key/%d" % i, bytes(size)) for i in range(1 if size > 1000 else 1000)]
        client.sync()
        process.wait_log("the journal .* cannot be written: No space left on device: messages wait")
        if size < 1000:
            published += [client.msg(b"key/%d" % i, bytes(size)) for i in range(1000, 1500)]
            client.sync()
        ballast.unlink()
        process.wait_log("can be written again")
        found = wait_rows(journal, ends_with(published[-1]))
        assert packets(found) == published
    assert process.stop() == 0
    found = rows(journal)
    assert packets(found) == published
    assert [kind for kind in kinds(found) if kind != "message"] == ["start", "full", "full", "stop"]
    assert {details(row)["reason"] for row in found if row["kind"] == "full"} == {"No space left on device"}


@pytest.mark.slow
def test_a_bug(bus: Callable[..., Bus], spawn: Callable[..., Any], directory: Path, journal: Path) -> None:
    """A recorder with a bug exits with status 1, and logs the traceback."""
    bus()
    program = (
        "import sys; sys.argv[:] = sys.argv[2:]; from sbus.journal.writer import JournalWriter; "
        "JournalWriter.append_gap = None; "
        "from twisted.scripts.twistd import run; run()"
    )
    before = [sys.executable, "-c", program]
    process: Recorder = spawn(Recorder, directory, directory / "bus", journal, before=before)
    assert process.wait() == 1
    assert "the recorder cannot go on" in process.log
    assert "TypeError: 'NoneType' object is not callable" in process.log
    assert "Server Shut Down" in process.log


@pytest.mark.slow
def test_a_clock_beyond_2286(
    bus: Callable[..., Bus], spawn: Callable[..., Any], directory: Path, journal: Path
) -> None:
    """A recorder ends with one line that says what is wrong."""
    bus()
    program = (
        "import sys; sys.argv[:] = sys.argv[2:]; import sbus.journal.writer; from sbus.journal import clock; "
        "clock.now = lambda: 10**16; from twisted.scripts.twistd import run; run()"
    )
    before = [sys.executable, "-c", program]
    process: Recorder = spawn(Recorder, directory, directory / "bus", journal, before=before)
    assert process.wait() == 1
    assert "a journal has room for those from 1970 to November 2286: set the clock" in process.log
    assert "Traceback" not in process.log


# --- twistd sbus --record -------------------------------------------------------------------------


def child_of(process: Process) -> int:
    """Return the process ID of the newest recorder of a bus."""
    return int(process.wait_log(r"recorder (\d+) was started")[-1][1])


def wait_gone(pid: int) -> None:
    """Wait until a process has exited."""
    with contextlib.suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        assert is_readable(fd, TIMEOUT), "it is still there"
        os.close(fd)


def test_recorded_bus(bus: Callable[..., Bus], journal: Path) -> None:
    """A bus with --record restarts a recorder that was killed, and waits for it when it stops.

    Everything published before the stop is in the journal, and the recorder is gone.
    """
    started = bus(f"--record={journal}", "--record-options=--sync=0 --batch-time=10ms", "--max-clients=1")
    first = child_of(started)
    started.wait_log("recorder: recording '' of ")
    client = started.client()
    before = client.msg(b"key", b"before")
    wait_rows(journal, lambda found: packets(found) == [before])
    os.kill(first, signal.SIGTERM)  # as systemd would to all processes of a unit: only the bus stops its recorder
    os.kill(first, signal.SIGINT)
    published = [client.msg(b"key", b"%d" % i) for i in range(100)]
    wait_rows(journal, lambda found: packets(found) == [before, *published])
    os.kill(first, signal.SIGKILL)
    started.wait_log(rf"recorder {first} has exited by signal 9, and nothing is recorded: it is started again in 0.5 s")
    started.wait_log("recorder: recording '' of ", 2)
    last = [client.msg(b"key", b"last %d" % i) for i in range(5_000)]
    client.sync()
    second = child_of(started)
    assert first != second
    assert started.stop() == 0
    assert not Path(f"/proc/{second}").exists()
    found = rows(journal)
    assert packets(found) == [before, *published, *last]
    assert kinds(found) == ["start", "message", "start", "message", "stop"]
    assert f"recorder {second} has exited with status 0" in started.log
    assert "recorder: recorded 5000 messages" in started.log


def test_bus_that_is_killed(bus: Callable[..., Bus], journal: Path) -> None:
    """The recorder exits when its bus is killed, and everything that it had received is in the journal."""
    started = bus(f"--record={journal}")
    recorder = child_of(started)
    started.wait_log("recorder: recording '' of ")
    client = started.client()
    published = [client.msg(b"key", b"%d" % i) for i in range(100)]
    client.sync()
    started.kill(signal.SIGKILL)
    started.wait()
    wait_gone(recorder)
    found = rows(journal)
    assert packets(found) == published
    assert kinds(found) == ["start", "message", "stop"]


@pytest.mark.slow
def test_auto_close_counts_no_recorder(bus: Callable[..., Bus], journal: Path) -> None:
    """A bus with --auto-close stops with its last client, although its recorder is connected."""
    started = bus(f"--record={journal}", "--auto-close", address=f"@sbus-recorder-test-{os.getpid()}")
    started.wait_log("recorder: recording '' of @sbus-recorder-test-")
    client = started.client()
    published = client.msg(b"only")
    client.sync()
    started.disconnect()
    assert started.wait() == 0
    found = rows(journal)
    assert packets(found) == [published]
    assert kinds(found) == ["start", "message", "stop"]


@pytest.fixture
def for_all(directory: Path) -> list[str]:
    """A command prefix with which every user can run this interpreter.

    The interpreter may be below a directory that only root may enter, such as root's home. In a mount namespace, the
    prefix covers that directory by one that all may enter, and mounts the interpreter below it.
    """
    if os.geteuid():
        pytest.skip("only root can give up root")
    interpreter = Path(sys.executable).resolve()
    closed = [path for path in interpreter.parents if not path.stat().st_mode & 0o001]
    if not closed:
        return ["env"]
    below = interpreter.parents[interpreter.parents.index(closed[0]) - 1]
    (directory / "aside").mkdir()
    script = (
        'set -e; mount --bind "$1" "$3"; mount -t tmpfs -o mode=755 tmpfs "$2"; mkdir "$1"; mount --bind "$3" "$1"; '
        'shift 3; exec "$@"'
    )
    command = ["unshare", "-m", "sh", "-c", script, "sh", str(below), str(closed[0]), str(directory / "aside")]
    if len(closed) > 1 or subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("another user cannot run this interpreter")
    return command


@pytest.mark.slow
def test_privileges_are_given_up(bus: Callable[..., Bus], directory: Path, for_all: list[str]) -> None:
    """The recorder of a bus that drops root runs as the same user as the bus, and can connect to it."""
    user = pwd.getpwuid(1)
    journal = directory / "owned" / "journal"
    journal.parent.mkdir()
    os.chown(journal.parent, user.pw_uid, user.pw_gid)
    flags = ["-n", "--pidfile=", f"--uid={user.pw_uid}", f"--gid={user.pw_gid}"]
    started = bus(f"--record={journal}", flags=flags, before=for_all)
    started.wait_log("recorder: recording '' of ")
    published = started.client().msg(b"key")
    started.client().sync()
    assert started.stop() == 0
    assert packets(rows(journal)) == [published]
    assert {path.stat().st_uid for path in (journal, *journal.iterdir())} == {user.pw_uid}


@pytest.mark.slow
def test_address_without_a_name_of_its_own(
    bus: Callable[..., Bus],
    directory: Path,
    journal: Path,
) -> None:
    """The recorder connects to a socket that was passed to the bus, and uses the dialect of the bus."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as passed:
        passed.bind(bytes(directory / "passed"))
        passed.listen()
        options = (f"--record={journal}", "--dialect=early")
        started = bus(*options, address=f"/dev/fd/{passed.fileno()}", pass_fds=[passed.fileno()])
        started.wait_log(f"recorder: recording '' of {directory}/passed into")
        with Client(directory / "passed") as client:
            [published] = [client.msg(b"early.key", b"value")]
            client.echo()
        assert started.stop() == 0
    found = rows(journal)
    assert packets(found)[0] == published
    assert kinds(found) == ["start", "message", "stop"]


def test_recorder_that_cannot_work(bus: Callable[..., Bus], directory: Path) -> None:
    """A bus whose recorder cannot start serves nevertheless, and logs why nothing is recorded."""
    (directory / "file").touch()
    started = bus(f"--record={directory}/file/journal")
    started.wait_log(r"recorder: sbus-recorder: the journal .*/file/journal cannot be written: Not a directory: ")
    started.wait_log(r"recorder \d+ has exited with status 1, and nothing is recorded: it is started again in")
    assert started.client().sync() == []
    assert started.stop() == 0


def test_server_loads_neither_client_nor_arrow() -> None:
    """A bus with --record imports neither the client nor PyArrow."""
    program = (
        "import sys; from sbus.server.run.twistd import Options; o = Options(); "
        "o.parseOptions(['--socket=/nowhere/bus', '--record=there']); print(*sys.modules)"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment_with({})
    )
    assert {"sbus.client", "pyarrow", "sbus.journal", "sbus.recorder"}.isdisjoint(loaded.stdout.split())


def test_publishers(bus: Callable[..., Bus], recorder: Callable[..., Recorder], journal: Path) -> None:
    """Each message has its true publisher, however publishers take turns."""
    server = bus()
    recorder()
    clients = [server.client(), server.client()]
    expected = []
    for number in range(40):
        client = number // 3 % 2
        clients[client].msg(b"who/%d" % client, b"%d" % number)
        clients[client].sync()
        expected.append((b"%d" % number, client))
    found = wait_rows(journal, ends_with(b"MSG who/1\x0039"))
    messages = [row for row in found if row["kind"] == "message"]
    numbers = sorted({row["sender_number"] for row in messages})
    assert [(row["payload"], numbers.index(row["sender_number"])) for row in messages] == expected
    assert {(row["sender_uid"], row["sender_gid"], row["sender_pid"], row["sender_chain"]) for row in messages} == {
        (os.getuid(), os.getgid(), os.getpid(), None)
    }
    assert all(row["sender_number"] is None for row in found if row["kind"] != "message")


def test_publishers_that_the_bus_does_not_name(
    directory: Path, recorder: Callable[..., Recorder], journal: Path
) -> None:
    """The original server names nobody, and is recorded all the same; the columns are null."""
    with contextlib.closing(OriginalServer(directory / "bus")):
        recorder()
        with connect(str(directory / "bus")) as client:
            client.publish(b"k", b"1")
            found = wait_rows(journal, ends_with(b"MSG k\x001"))
    assert [row["sender_number"] for row in found] == [None] * len(found)


def test_patterns_that_a_policy_refuses(
    bus: Callable[..., Bus], recorder: Callable[..., Recorder], journal: Path, directory: Path
) -> None:
    """A recorder that may no longer see all that it records says so, records a gap, and goes on when it may again."""
    policy, lax = directory / "policy.toml", "version = 1\n"
    policy.write_text(lax)
    started = bus(f"--policy={policy}")
    process = recorder()
    client = started.client()
    first = client.msg(b"k", b"1")
    wait_rows(journal, ends_with(first))
    policy.write_text(lax + '[[rule]]\nname = "no.reading"\ndeny_subscribe = ["hidden/"]\n')
    started.kill(signal.SIGHUP)
    process.wait_log(
        r"nothing is recorded: this client may not subscribe to '': the policy .* \(rule: no.reading\); ask the "
        "administrator of the bus: .*; trying again"
    )
    policy.write_text(lax)
    started.kill(signal.SIGHUP)
    process.wait_recording(2)
    found = wait_rows(journal, ends_with(client.msg(b"k", b"2")))
    assert kinds(found) == ["start", "message", "reconnect", "message"]
    assert "(rule: no.reading)" in details(found[2])["reason"]
    assert process.stop() == 0
