"""``sbus journal`` lists, prints, follows and verifies journals."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner

from sbus.cli.main import cli
from sbus.journal.consumers import advance, consumers
from sbus.journal.digests import Digest
from sbus.journal.layout import list_segments
from sbus.journal.reader import JournalReader, read
from sbus.journal.schema import Kind
from sbus.journal.senders import Senders
from sbus.journal.summary import read_summary
from sbus.journal.writer import JournalWriter
from tests.support.journals import Clock

BEGIN = 1_700_000_000_000_000  # 2023-11-14T22:13:20Z
SBUS = [sys.executable, "-m", "sbus.cli", "journal"]
ENVIRONMENT = {**os.environ, "TZ": "UTC", "LC_ALL": "C.UTF-8"}


def sbus(*arguments, status=0):
    """Run ``sbus journal`` to its end; return its output."""
    done = CliRunner().invoke(cli, ["journal", *map(str, arguments)])
    assert done.exit_code == status, done.output
    return done.stdout or done.stderr


@pytest.fixture(autouse=True)
def _in_utc(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A closed journal of two segments, with a gap at each end and a consumer."""
    clock = Clock(BEGIN)
    directory = tmp_path_factory.mktemp("journals") / "j"
    with JournalWriter.open(directory, clock=clock) as journal:
        journal.append_gap(Kind.START, {"patterns": [""]})
        for n in range(4):
            clock.time += 1_000_000
            journal.append([(b"a/%d" % n, b"payload %d" % n), (b"b", b"\xff")])
            if n == 1:
                journal.roll()
        journal.append_gap(Kind.STOP, {})
    advance(directory, "archive", 3)
    return directory


class TestLs:
    def test_text(self, recorded):
        """Each segment is a line of a table, and each consumer is a line."""
        first, header, *lines = sbus("ls", recorded).splitlines()
        assert first.startswith(f"{recorded}: journal ")
        assert first.endswith(", rows 0 to 9")
        assert header.split() == ["first", "row", "rows", "bytes", "from", "(UTC)", "to", "(UTC)", "gaps"]
        sizes = [str(os.path.getsize(segment.path())) for segment in list_segments(recorded)]
        times = ["2023-11-14", "22:13:20", "2023-11-14", "22:13:22"], ["2023-11-14", "22:13:23"]
        assert lines[0].split() == ["0", "5", sizes[0], *times[0], "1", "start"]
        assert lines[1].split() == ["5", "5", sizes[1], *times[1], "2023-11-14", "22:13:24", "1", "stop"]
        assert lines[2] == "consumer archive: next row 3, 7 rows left"

    def test_json(self, recorded, tmp_path):
        """As JSON there is one object per journal; an open segment has what readers see of it."""
        with JournalWriter.open(tmp_path / "k") as journal:
            journal.append([(b"k", b"1")])
            journal.sync()
            journal.append([(b"k", b"2")])
            lines = sbus("ls", "--json", recorded, f"{tmp_path}/*").splitlines()
        info, other = sorted(map(json.loads, lines), key=lambda info: info["end"], reverse=True)
        assert (info["start"], info["end"], info["consumers"]) == (0, 10, {"archive": 3})
        assert [segment["gaps"] for segment in info["segments"]] == [{"start": 1}, {"stop": 1}]
        assert [segment["closed"] for segment in info["segments"] + other["segments"]] == [True, True, False]
        assert (other["segments"][0]["rows"], other["end"]) == (1, 1)

    def test_names_of_others(self, tmp_path):
        """Names of directories and consumers, which other users choose, cannot harm the terminal; nor can errors."""
        directory = tmp_path / "j\x1b[31m"
        with JournalWriter.open(directory):
            pass
        (directory / "consumers").mkdir()
        (directory / "consumers" / "c\x1b[32m.json").write_text('{"next": 3}')
        first, _, consumer = sbus("ls", f"{tmp_path}/*").splitlines()
        assert first.startswith(f"{tmp_path}/j\\x1b[31m: journal ")
        assert consumer == "consumer c\\x1b[32m: next row 3, 0 rows left"
        (directory / "journal.json").write_text("{}")
        text = sbus("ls", f"{tmp_path}/*", status=1)
        assert text.startswith(f"sbus: {tmp_path}/j\\x1b[31m/journal.json: ")

    @pytest.mark.timeout(60)
    @pytest.mark.parametrize("options", [[], ["--json"]])
    def test_a_damaged_one(self, options, recorded, tmp_path):
        """A journal that is damaged, whatever is wrong with it, hides no other one."""
        shutil.copytree(recorded, tmp_path / "z")
        whole = sbus("ls", *options, f"{tmp_path}/z").splitlines()
        for name, key, value in (("a", "min_time", 10**30), ("b", "max_time", -(10**30)), ("c", "rows", "x")):
            shutil.copytree(recorded, tmp_path / name)
            path = list_segments(str(tmp_path / name))[0].path(".json")
            with open(path, encoding="utf-8") as file:
                fields = json.load(file)
            with open(path, "w", encoding="utf-8") as file:
                json.dump(fields | {key: value}, file)
        (tmp_path / "d").mkdir()
        os.mkfifo(tmp_path / "d" / "journal.json")
        done = CliRunner().invoke(cli, ["journal", "ls", *options, f"{tmp_path}/*"])
        assert done.exit_code == 1
        assert done.stdout.splitlines() == whole
        assert [line.split(": it is damaged")[0][-5:] for line in done.stderr.splitlines()] == [*[".json"] * 4]

    def test_one_that_cannot_be_listed(self, recorded, tmp_path):
        """What hinders the listing of one journal is reported, without control characters; others are listed."""
        shutil.copytree(recorded, tmp_path / "z")
        shutil.copytree(recorded, tmp_path / "a\x1b[31m\nb")
        shutil.rmtree(tmp_path / "a\x1b[31m\nb" / "consumers")
        (tmp_path / "a\x1b[31m\nb" / "consumers").touch()
        (tmp_path / "c").mkdir()
        (tmp_path / "c" / "journal.json").touch()
        whole = sbus("ls", tmp_path / "z")
        for named in ([f"{tmp_path}/*"], sorted(map(str, tmp_path.iterdir()))):
            done = CliRunner().invoke(cli, ["journal", "ls", *named])
            assert (done.exit_code, done.stdout) == (1, whole)
            first, second = done.stderr.splitlines()
            assert first == f"sbus: {tmp_path}/a\\x1b[31m\\x0ab/consumers: Not a directory"
            assert second.startswith(f"sbus: {tmp_path}/c/journal.json: it is damaged")

    def test_empty(self, tmp_path):
        """A journal without rows can be listed, printed and verified."""
        JournalWriter.open(tmp_path).close()
        first, header = sbus("ls", tmp_path).splitlines()
        assert first.endswith(", no rows")
        assert header.startswith("first row")
        assert sbus("cat", tmp_path) == ""
        assert sbus("verify", tmp_path).endswith("0 segments, 0 rows: no problems\n")

    def test_missing(self, tmp_path):
        """A directory that is not a journal is reported by name, and so is a file."""
        (tmp_path / "file").touch()
        assert sbus("ls", tmp_path / "file", status=1).startswith(f"sbus: {tmp_path}/file: this is no journal")
        for name in ("ls", "cat", "tail", "verify", "release"):
            consumer = ["archive"] if name == "release" else []
            assert sbus(name, tmp_path, *consumer, status=1) == (
                f"sbus: {tmp_path}: this is no journal (it has no journal.json): "
                "name the directory that the recorder writes\n"
            )


@pytest.fixture
def published(tmp_path):
    """A journal with a gap, and messages of a client, of one of another bus, of the program, and of nobody known."""
    with JournalWriter.open(tmp_path / "published", clock=Clock(BEGIN)) as journal:
        journal.append_gap(Kind.START, {})
        values = pa.array([b"1", b"2", b"3", b"4"], pa.binary())
        names = [b"17 !/cred/100/1000/42", b"9 !/cred/0/0/7/!/cred/100/1001/43", b"0 -", None]
        ends = pa.array([1, 2, 3, 4], pa.int32())
        journal.append_columns(values, values, [BEGIN], [4], Senders(pa.array(names, pa.binary()), ends))
    return tmp_path / "published"


class TestSenders:
    """Who published the messages."""

    @pytest.mark.parametrize("command", [("cat",), ("tail", "--no-follow")])
    def test_text(self, published, command):
        """With --sender the name stands before the key, and - where there is none; without it, nothing does."""
        assert sbus(*command, "--sender", published).splitlines()[1:] == [
            "!/cred/100/1000/42 1 1",
            "!/cred/0/0/7/!/cred/100/1001/43 2 2",
            "- 3 3",
            "- 4 4",
        ]
        assert sbus(*command, published).splitlines()[1:] == ["1 1", "2 2", "3 3", "4 4"]

    def test_json(self, published):
        """As JSON each message whose publisher is known has it."""
        gap, *found = map(json.loads, sbus("cat", "--json", published).splitlines())
        assert "sender" not in gap
        assert [each.get("sender") for each in found] == [
            {"number": 17, "gid": 100, "uid": 1000, "pid": 42, "chain": None},
            {"number": 9, "gid": 100, "uid": 1001, "pid": 43, "chain": "!/cred/0/0/7"},
            {"number": 0, "gid": None, "uid": None, "pid": None, "chain": None},
            None,
        ]

    def test_formats(self, published):
        """The directives of a format have it, with --sender and without."""
        expected = ["1 1000 !/cred/100/1000/42", "2 1001 !/cred/0/0/7/!/cred/100/1001/43", "3 - -", "4 - -"]
        for options in ((), ("--sender",)):
            assert sbus("cat", "--format=%k %u %f", *options, published).splitlines() == expected

    def test_raw(self, published):
        """Raw output has no place for it."""
        assert "--sender is not for --raw" in sbus("cat", "--raw", "--sender", published, status=2)


class TestDigests:
    """Messages of which the journal has no payload."""

    @pytest.fixture
    def digested(self, tmp_path):
        with JournalWriter.open(tmp_path, clock=Clock(BEGIN)) as journal:
            journal.append([(b"camera/1", b"whole")])
            sender = Senders(pa.array([b"17 !/cred/100/1000/42"], pa.binary()), pa.array([1], pa.int32()))
            journal.append_digest(b"camera/1", Digest(6_220_800, "ab" * 32), senders=sender)
            journal.append_digest(b"camera/2", Digest(5_000_000, "cd" * 32))
        return tmp_path

    def test_text(self, digested):
        """Each is a line like a gap, with its key; a pattern chooses among them; --gaps, raw and formats have none."""
        lines = sbus("cat", "--pattern=camera/1", digested).splitlines()
        assert lines == [
            "camera/1 whole",
            f'# digest 2023-11-14T22:13:20.000+00:00 camera/1 {{"length": 6220800, "sha256": "{"ab" * 32}"}}',
        ]
        assert len(sbus("cat", digested).splitlines()) == 3
        assert sbus("cat", "--gaps", digested) == ""
        assert sbus("cat", "--raw", digested) == "whole"
        assert sbus("cat", "--format=%k", digested) == "camera/1\n"

    def test_json(self, digested):
        """As JSON each has its key and publisher, and the object in place of the payload."""
        _, first, second = map(json.loads, sbus("cat", "--json", digested).splitlines())
        assert first == {
            **{"seq": 1, "kind": "digest", "time": 1_700_000_000.0, "key": "camera/1"},
            "sender": {"number": 17, "gid": 100, "uid": 1000, "pid": 42, "chain": None},
            "details": {"length": 6_220_800, "sha256": "ab" * 32},
        }
        assert "sender" not in second

    def test_others(self, digested):
        """They are neither gaps nor problems, and the summary has their keys."""
        (journal,) = map(json.loads, sbus("ls", "--json", digested).splitlines())
        assert journal["segments"][0]["gaps"] == {}
        assert sbus("verify", digested).endswith("1 segment, 3 rows: no problems\n")
        (segment,) = list_segments(str(digested))
        assert read_summary(segment).keys == [b"camera/1", b"camera/2"]


class TestCat:
    def test_text(self, recorded):
        """Messages are printed as by ``sbus sub``, gaps as lines of their own."""
        lines = sbus("cat", recorded).splitlines()
        assert lines[:3] == [
            '# start 2023-11-14T22:13:20.000+00:00 {"patterns": [""]}',
            "a/0 payload 0",
            r"b \xff",
        ]
        assert lines[-1] == "# stop 2023-11-14T22:13:24.000+00:00 {}"
        assert len(lines) == 10

    def test_json(self, recorded):
        """As JSON, rows have their sequence number, time and kind."""
        rows = list(map(json.loads, sbus("cat", "--json", recorded).splitlines()))
        assert [row["seq"] for row in rows] == list(range(10))
        assert rows[0] == {"seq": 0, "kind": "start", "time": BEGIN / 1e6, "details": {"patterns": [""]}}
        assert rows[2] == {
            "seq": 2,
            "kind": "message",
            "time": BEGIN / 1e6 + 1,
            "key": "b",
            "payload": "/w==",
            "encoding": "base64",
        }

    def test_formats(self, recorded):
        """%n of a format is the sequence number; --format and --raw skip gaps."""
        assert sbus("cat", "--format=%n %k", "--pattern=a/", recorded) == "1 a/0\n3 a/1\n5 a/2\n7 a/3\n"
        assert sbus("cat", "--raw", "-p", "a/0", "-p", "a/3", recorded) == "payload 0payload 3"
        assert sbus("cat", "--format=", recorded) == "\n" * 8

    def test_ranges(self, recorded):
        """Rows can be chosen by time, by sequence number, and as gaps only."""

        def seqs(*options):
            return [json.loads(line)["seq"] for line in sbus("cat", "--json", *options, recorded).splitlines()]

        assert seqs("--since=2023-11-14T22:13:22", "--until=2023-11-14T22:13:24") == [3, 4, 5, 6]
        assert seqs("--since=2023-11-15") == []
        assert seqs("--from=2", "--to=5") == [2, 3, 4, 5]
        assert seqs("--gaps") == [0, 9]


class TestTail:
    def test_reads_little(self, tmp_path, monkeypatch):
        """For the last row few rows are read; for all rows that match, each row is read once."""
        with JournalWriter.open(tmp_path) as journal:
            for number in range(100):
                journal.append([(b"a" if number in (3, 50) else b"b", b"%d" % number)] * 20)
        seen: list[int] = []

        def spy(*args):
            for batch in read(*args):
                seen.append(batch.num_rows)
                yield batch

        monkeypatch.setattr("sbus.interchange.rows.read", spy)
        assert sbus("tail", "--no-follow", "-n", 1, "--format=%p", tmp_path) == "99\n"
        assert sum(seen) <= 100
        seen.clear()
        assert sbus("tail", "--no-follow", "-n", 30, "--pattern=a", "--format=%p", tmp_path) == "3\n" * 10 + "50\n" * 20
        assert sum(seen) <= 2000

    def test_last(self, recorded):
        """The last matching rows are printed, from any segment."""
        assert sbus("tail", "--no-follow", "-n", 2, "--format=%n", recorded) == "7\n8\n"
        assert sbus("tail", "--no-follow", "--pattern=a/", "--format=%n", recorded) == "1\n3\n5\n7\n"
        assert sbus("tail", "--no-follow", "-n", 0, recorded) == ""
        assert sbus("tail", "--no-follow", "-n", "9" * 30, "--format=%n", recorded).split()[-2:] == ["7", "8"]

    def test_follow(self, tmp_path):
        """New rows are printed as soon as they are synced, across segments; Ctrl-C ends it."""
        with JournalWriter.open(tmp_path) as journal:
            journal.append([(b"k", b"old")])
            journal.sync()
            command = [*SBUS, "tail", str(tmp_path)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, env=ENVIRONMENT) as process:
                assert process.stdout
                assert process.stdout.readline() == b"k old\n"
                for n in range(5):
                    journal.append([(b"k", b"%d" % n)])
                    if n % 2:
                        journal.roll()
                    else:
                        journal.sync()
                    assert process.stdout.readline() == b"k %d\n" % n
                process.send_signal(signal.SIGINT)
                assert process.wait(60) == -signal.SIGINT

    def test_another_journal(self, tmp_path):
        """When the journal is moved away, the rows of the one that takes its place follow."""
        place = tmp_path / "journal"
        with JournalWriter.open(place) as journal:
            journal.append([(b"k", b"old")] * 3)
        with subprocess.Popen([*SBUS, "tail", "-n1", str(place)], stdout=subprocess.PIPE, env=ENVIRONMENT) as process:
            assert process.stdout
            assert process.stdout.readline() == b"k old\n"
            place.rename(tmp_path / "moved")
            with JournalWriter.open(place) as journal:
                journal.append([(b"k", b"new")])
            assert process.stdout.readline() == b"k new\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == -signal.SIGINT

    def test_closed_pipe(self, recorded):
        """It ends when the reader of its output has gone, even if no row comes."""
        with subprocess.Popen([*SBUS, "tail", str(recorded)], stdout=subprocess.PIPE, env=ENVIRONMENT) as process:
            assert process.stdout
            process.stdout.readline()
            process.stdout.close()
            assert process.wait(60) == -signal.SIGPIPE


def damage(path, at, data):
    """Overwrite part of a file, from its end if `at` is negative."""
    with open(path, "r+b") as file:
        file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        file.write(data)


@pytest.mark.parametrize(
    "words",
    [
        ["journal", "export", "--format=jsonl"],
        ["journal", "export", "--format=jsonl", "-o/dev/stdout"],
        ["report", "-o/dev/stdout", "--journal"],
    ],
)
def test_an_output_without_a_reader(words, recorded):
    """A command ends as a program does whose reader has gone, also if the pipe is named as a file."""
    theirs, ours = os.pipe()
    os.close(theirs)
    with open(ours, "wb") as output:
        command = [*SBUS[:-1], *words, str(recorded)]
        done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, env=ENVIRONMENT, timeout=60)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, b"")


class TestVerify:
    def test_well(self, recorded):
        """An intact journal has no problems."""
        assert sbus("verify", recorded) == f"{recorded}: 2 segments, 10 rows: no problems\n"

    @pytest.mark.parametrize(
        ("suffix", "at", "data", "said"),
        [
            (".arrows", 100, b"\xaa", r"the bytes 0 to \d+ are damaged"),
            (".arrows", -40, b"\xaa", r"the bytes \d+ to \d+ are damaged \(2 rows from 3\): restore it from a copy"),
            (".arrows", -8, b"\0", "it does not end with the end-of-stream marker"),
            (".idx", 70, b"\xaa", "a record in it is damaged"),
            (".json", 0, b"x", "it is damaged"),
            (".json", 16, b"7", r"it is damaged \(ValueError: its numbers of rows contradict each other\)"),
        ],
    )
    def test_damage(self, recorded, tmp_path, suffix, at, data, said):
        """Damage to any file of a segment is found and reported; the status is 1."""
        shutil.copytree(recorded, tmp_path / "j")
        damage(list_segments(str(tmp_path / "j"))[0].path(suffix), at, data)
        output = sbus("verify", tmp_path / "j", status=1)
        assert re.search(rf"{suffix}: {said}", output), output
        assert re.search(r"\d problems?", output)
        found = [json.loads(line) for line in sbus("verify", "--json", tmp_path / "j", status=1).splitlines()]
        assert any(problem for info in found for problem in info["problems"])

    def test_kinds(self, recorded, tmp_path):
        """The kinds of a summary are printed as in the file."""
        directory = shutil.copytree(recorded, tmp_path / "j")
        path = Path(list_segments(str(directory))[0].path(".json"))
        summary = json.loads(path.read_text())
        kinds = dict(summary["kinds"])
        summary["kinds"]["message"] += 1
        path.write_text(json.dumps(summary))
        assert f"but should be {kinds!r}\n" in sbus("verify", directory, status=1)

    def test_names_of_other_users(self, recorded, tmp_path):
        """Problems show no control characters of names that other users have chosen."""
        directory = shutil.copytree(recorded, tmp_path / "j")
        (directory / "consumers" / "\x1b[31m\n.json").touch()
        assert "consumers/\\x1b[31m\\x0a.json: it is damaged" in sbus("verify", directory, status=1)
        directory = shutil.copytree(recorded, tmp_path / "\x1b[31m")
        overwritten = list_segments(str(directory))[0].path()
        damage(overwritten, -40, b"\xaa")
        for command, status in (("verify", 1), ("repair", 3), ("repair", 0)):
            output = sbus(command, directory, status=status)
            assert output.count("/\\x1b[31m") == len(output.splitlines()), output

    def test_missing_file(self, tmp_path):
        """A missing file of a segment is reported by its name, by every command that needs it."""
        with JournalWriter.open(tmp_path) as journal:
            journal.append([(b"k", b"")])
        path = list_segments(str(tmp_path))[0].path(".idx")
        os.unlink(path)
        missing = (
            f"{path}: it is missing: restore it from a copy, or run 'sbus journal repair', which says what is lost"
        )
        assert sbus("cat", tmp_path, status=1) == f"sbus: {missing}\n"
        assert missing in sbus("verify", tmp_path, status=1)

    def test_missing_segment(self, recorded, tmp_path):
        """A segment that is missing between others is reported."""
        shutil.copytree(recorded, tmp_path / "j")
        with JournalWriter.open(tmp_path / "j") as journal:
            journal.append([(b"k", b"")])
        for suffix in (".arrows", ".idx", ".json"):
            os.unlink(list_segments(str(recorded))[1].path(suffix).replace(str(recorded), str(tmp_path / "j")))
        assert "it begins with row 10, but row 5 should follow" in sbus("verify", tmp_path / "j", status=1)


class TestRepair:
    def test_status(self, recorded, tmp_path):
        """The exit status tells whether nothing was damaged, rows are lost, or a recorder is in the way."""
        directory = shutil.copytree(recorded, tmp_path / "j")
        assert sbus("repair", directory) == f"{directory}: nothing is damaged\n"
        segment = list_segments(str(directory))[0]
        with open(segment.path(), "r+b") as file:
            file.seek(-200, os.SEEK_END)
            file.write(b"\xa5" * 64)
        assert "would be repaired" in sbus("repair", "--dry-run", directory, status=3)
        with JournalWriter.open(directory, warn=lambda text: None):
            assert (
                "writes this journal: stop it first, or, if it is a child process of a bus (--record), the bus"
                in sbus("repair", directory, status=1)
            )
        assert "1 segment repaired" in sbus("repair", directory, status=3)
        assert sbus("repair", directory).endswith("nothing is damaged\n")
        sbus("verify", directory)
        assert "# damaged " in sbus("cat", directory)


def test_release(tmp_path):
    """A consumer is forgotten, even with a damaged file; an unknown name is an error that lists the names."""
    directory = tmp_path / "j"
    JournalWriter.open(directory).close()
    assert "'archive': it has no consumers\n" in sbus("release", directory, "archive", status=1)
    for name in ("archive", "alerts", "report"):
        advance(directory, name, 0)
    (directory / "consumers" / "archive.json").write_text("no object")
    message = f"sbus: {directory}: there is no consumer 'arhcive': its consumers are alerts, archive, report\n"
    assert sbus("release", directory, "arhcive", status=1) == message
    assert "is no name for a consumer" in sbus("release", directory, "../journal", status=2)
    assert sbus("release", directory, "archive") == f"{directory}: the consumer 'archive' is forgotten\n"
    assert consumers(directory) == {"alerts": 0, "report": 0}


@pytest.mark.parametrize(
    "words", ["ls", "ls --json", "verify", "repair", "repair --dry-run", "cat", "tail --no-follow"]
)
def test_a_journal_without_a_segment(tmp_path, words):
    """Every command takes a journal that a recorder has left before its first row: there is nothing in it."""
    JournalWriter.open(tmp_path / "j").close()
    assert list_segments(tmp_path / "j") == []
    output = sbus(*words.split(), tmp_path / "j")
    if words in ("cat", "tail --no-follow"):
        assert output == ""
    if words.startswith("repair"):
        assert output == f"{tmp_path / 'j'}: nothing is damaged\n"


def test_times_in_a_journal_without_a_segment(tmp_path):
    """No row of a journal without a segment is as late as any time."""
    JournalWriter.open(tmp_path / "j").close()
    assert sbus("cat", "--since=2026-01-01", "--until=2026-02-01", tmp_path / "j") == ""
    assert JournalReader(tmp_path / "j").seq_at_time(0) == 0
