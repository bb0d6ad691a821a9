"""Import: a journal is there as a whole or not at all, and what cannot be a row is refused."""

from __future__ import annotations

import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from mcap.writer import Writer

from sbus.cli.main import cli
from sbus.journal.schema import Kind
from sbus.journal.writer import JournalWriter
from tests.support.disks import filled, mounted
from tests.support.journals import Clock, messages, rows

BEGIN = 1_700_000_000_000_000


def sbus(*arguments, status=0):
    """Run ``sbus journal`` to its end; return what it printed."""
    done = CliRunner().invoke(cli, ["journal", *map(str, arguments)])
    assert done.exit_code == status, done.output
    return done.output


def lines(path, *objects):
    path.write_text("".join(json.dumps(one) + "\n" for one in objects))
    return path


@pytest.fixture
def one(tmp_path):
    """A file with one message."""
    return lines(tmp_path / "one.jsonl", {"time": 1.5, "key": "a", "payload": "1"})


class TestPlace:
    def test_new(self, one, tmp_path):
        """The journal is in its place, verifies, and is all that was made there."""
        os.mkdir(tmp_path / "new")
        assert sbus("import", one, tmp_path / "new" / "j") == f"{tmp_path}/new/j: 1 row\n"
        assert os.listdir(tmp_path / "new") == ["j"]
        assert "1 row: no problems" in sbus("verify", tmp_path / "new" / "j")
        assert messages(tmp_path / "new" / "j") == [(b"a", b"1")]

    @pytest.mark.parametrize(("options", "host"), [([], ""), (["--host=pump-3"], "pump-3")])
    def test_host(self, options, host, one, tmp_path):
        """The rows come from the machine that the option names, and never from this one by mistake."""
        sbus("import", *options, one, tmp_path / "j")
        assert json.loads((tmp_path / "j" / "journal.json").read_text())["host"] == host

    def test_taken(self, one, tmp_path):
        """A journal that is there, live or not, and any other directory, stays as it is."""
        with JournalWriter.open(tmp_path / "j") as live:
            live.append([(b"k", b"v")])
            assert "there is a journal already" in sbus("import", one, tmp_path / "j", status=1)
            assert "there is something else already" in sbus("import", one, tmp_path, status=1)
        assert messages(tmp_path / "j") == [(b"k", b"v")]

    def test_an_import_that_was_killed(self, one, tmp_path):
        """What a killed import has left is removed by the next one, and refused while the first one still runs."""
        with JournalWriter.open(tmp_path / ".j.importing") as first:
            first.append([(b"k", b"v")])
            assert "writes this journal" in sbus("import", one, tmp_path / "j", status=1)
        sbus("import", one, tmp_path / "j")
        assert messages(tmp_path / "j") == [(b"a", b"1")]
        assert sorted(os.listdir(tmp_path)) == ["j", "one.jsonl"]

    @pytest.mark.parametrize("names", [[], ["lock"]])
    def test_an_import_that_was_killed_as_it_began(self, names, one, tmp_path):
        """A directory that is not a journal yet is taken over, too."""
        (tmp_path / ".j.importing").mkdir(0o700)
        for name in names:
            (tmp_path / ".j.importing" / name).touch(0o600)
        sbus("import", one, tmp_path / "j")
        assert messages(tmp_path / "j") == [(b"a", b"1")]
        assert sorted(os.listdir(tmp_path)) == ["j", "one.jsonl"]

    @pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
    @pytest.mark.parametrize("owner", [0, 4242])
    def test_the_directory_of_another_user(self, owner, one, tmp_path):
        """Where all may write, an import builds nothing in what another user has put there, and leaves it there."""
        shared = tmp_path / "shared"
        shared.mkdir()
        os.chown(shared, owner, owner)
        shared.chmod(0o1777)
        (shared / ".j.importing").mkdir(0o755)
        os.chown(shared / ".j.importing", 4242, 4242)
        text = sbus("import", one, shared / "j", status=1)
        assert f"{shared}/.j.importing: this has the name of an unfinished import, but is not this user's" in text
        assert os.listdir(shared / ".j.importing") == []
        sbus("import", one, shared / "k")
        assert {path.lstat().st_uid for path in (shared / "k", *(shared / "k").iterdir())} == {0}

    @pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
    def test_for_the_owner_of_the_directory(self, one, tmp_path):
        """What root imports into a user's directory is that user's, after an import that was killed too."""
        home = tmp_path / "home"
        home.mkdir()
        os.chown(home, 4242, 4242)
        with JournalWriter.open(home / ".j.importing"):
            pass
        sbus("import", one, home / "j")
        assert {path.lstat().st_uid for path in (home / "j", *(home / "j").iterdir())} == {4242}

    def test_a_link(self, one, tmp_path):
        """A link never leads the rows into another directory, whoever made it."""
        with JournalWriter.open(tmp_path / "other") as other:
            other.append([(b"k", b"v")])
        os.symlink("other", tmp_path / ".j.importing")
        assert "but is not this user's" in sbus("import", one, tmp_path / "j", status=1)
        assert messages(tmp_path / "other") == [(b"k", b"v")]

    def test_a_full_disk(self, one, tmp_path):
        """Import and export name what they cannot write, with the remedy, and leave nothing."""
        sbus("import", one, tmp_path / "j")
        with mounted(tmp_path / "disk", "64k") as disk, filled(disk):
            text = sbus("import", one, disk / "new", status=1)
            assert f"cannot write the journal to {disk}/new: No space left on device: make room there" in text
            text = sbus("export", "-o", disk / "new.jsonl", tmp_path / "j", status=1)
            assert f"cannot write the rows to {disk}/new.jsonl: No space left on device: make room there" in text
            assert os.listdir(disk) == ["_ballast"]

    def test_a_line_that_is_no_row(self, one, tmp_path):
        """The line is named, and nothing is left of the journal."""
        with open(one, "a") as file:
            file.write('\n{"key": "a"}\n')
        assert f"{one}: line 3 is no row" in sbus("import", one, tmp_path / "j", status=2)
        assert os.listdir(tmp_path) == ["one.jsonl"]

    def test_doubles(self, one, tmp_path):
        """A file that is named twice is refused; different ones follow one another."""
        os.symlink(one, tmp_path / "link.jsonl")
        assert "named twice" in sbus("import", one, tmp_path / "link.jsonl", tmp_path / "j", status=2)
        two = lines(tmp_path / "two.jsonl", {"time": 2, "key": "b", "payload": "2"})
        sbus("import", one, two, tmp_path / "j")
        assert messages(tmp_path / "j") == [(b"a", b"1"), (b"b", b"2")]


class TestRows:
    def test_what_sub_prints(self, tmp_path):
        """Lines of ``sbus sub --json`` become rows, a loss among them, with publishers."""
        sender = {"number": 17, "gid": 100, "uid": 1000, "pid": 42, "chain": None}
        message = {"time": 1.0, "key": "/w==", "key_encoding": "base64", "payload": "x", "encoding": "text"}
        loss = {"time": 2.0, "lost": 3, "bytes": None, "total": 5, "why": "queue-full"}
        sbus("import", lines(tmp_path / "s.jsonl", message | {"sender": sender}, loss), tmp_path / "j")
        first, second = rows(tmp_path / "j")
        assert (first["key"], first["sender_uid"], first["sender_number"]) == (b"\xff", 1000, 17)
        assert (second["kind"], second["payload"]) == ("lost", b"3 ? 5 queue-full")

    @pytest.mark.parametrize(
        ("change", "complaint"),
        [
            ({"time": -1}, "r.jsonl: row 1: its time is -1000000 µs after 1970"),
            ({"time": 1e12}, "has times from 1970 to 2286"),
            ({"key": "a\0b"}, "is no key"),
            ({"key": ""}, "is no key"),
            ({"kind": "music", "details": {}}, "no rows of the kind 'music'"),
            ({"payload": "?", "encoding": "base64"}, "line 1 is no row"),
            ({"time": "now"}, "line 1 is no row"),
            ({"sender": {"number": "x", "gid": 1, "uid": 1, "pid": 1, "chain": None}}, "is no publisher"),
            ({"sender": {"number": 1, "gid": 1, "uid": 1, "pid": 2**32, "chain": None}}, "is no publisher"),
            ({"sender": {"number": 1, "gid": 1, "uid": 1, "pid": 1, "chain": "bus"}}, "is no publisher"),
        ],
    )
    def test_refused(self, change, complaint, tmp_path):
        """What a journal cannot hold is refused."""
        row = {"time": 1, "key": "a", "payload": "1"} | change
        assert complaint in sbus("import", lines(tmp_path / "r.jsonl", row), tmp_path / "j", status=2)

    def test_a_clock_without_its_row(self, tmp_path):
        """Times that fall by more than a minute begin an epoch, as in a recording, and a warning says so."""
        fields = {"key": "a", "payload": "1"}
        path = lines(tmp_path / "r.jsonl", *({"time": time} | fields for time in (1000, 1001, 100, 101, 90)))
        assert "the clock was set by -901 s" in sbus("import", path, tmp_path / "j")
        found = [(row["kind"], row["time"].timestamp()) for row in rows(tmp_path / "j")]
        times = [("message", 1000), ("message", 1001), ("clock", 100), ("message", 100), ("message", 101)]
        assert found == [*times, ("message", 101)]
        assert "no problems" in sbus("verify", tmp_path / "j")

    @pytest.mark.parametrize("step", ["x", None, float("nan"), float("inf"), 1e300])
    def test_a_step_that_is_none(self, step, tmp_path):
        """A clock row of another program need not say by how much the clock was set."""
        clock = {"kind": "clock", "time": 1, "details": {"step": step}}
        sbus("import", lines(tmp_path / "c.jsonl", {"time": 1, "key": "a", "payload": "1"}, clock), tmp_path / "j")
        assert [row["kind"] for row in rows(tmp_path / "j")] == ["message", "clock"]

    def test_damaged(self, tmp_path):
        """A row for damaged ones counts as many rows as before, and takes their numbers."""
        message = {"time": 1, "key": "a", "payload": "1"}
        gaps = [
            {"kind": "damaged", "time": 1, "details": {"rows": count, "last": 0, "reason": "damaged on the disk"}}
            for count in (500, 2)
        ]
        sbus("import", lines(tmp_path / "d.jsonl", message, *gaps, message), tmp_path / "j")
        found = [(row["seq"], row["kind"]) for row in rows(tmp_path / "j")]
        assert found == [(0, "message"), (1, "damaged"), (501, "damaged"), (503, "message")]
        assert [json.loads(row["payload"])["rows"] for row in rows(tmp_path / "j")[1:3]] == [500, 2]
        assert "504 rows: no problems" in sbus("verify", tmp_path / "j")

    @pytest.mark.parametrize("type_", [pa.large_binary(), pa.binary_view(), pa.dictionary(pa.int8(), pa.binary())])
    def test_parquet_with_binary_keys(self, type_, tmp_path):
        """Keys of another program may be binary data in each of Arrow's types, such as Polars's large_binary."""
        times = pa.array([0, 0], pa.timestamp("us"))
        keys = pa.array([b"a", b"\\\xff"], pa.binary()).cast(type_)
        pq.write_table(pa.table({"time": times, "key": keys, "payload": ["1", "2"]}), tmp_path / "p.parquet")
        sbus("import", tmp_path / "p.parquet", tmp_path / "j")
        assert messages(tmp_path / "j") == [(b"a", b"1"), (b"\\\xff", b"2")]

    def test_parquet_of_others(self, tmp_path):
        """A Parquet file of another program needs a time, a key and a payload, whatever their types."""
        columns = {
            "time": pa.array([1_500_000_000, 2_500_000_000], pa.timestamp("ns")),
            "key": pa.array(["a", "b\\xff"], pa.large_utf8()),
            "payload": pa.array(["1", "2"]).dictionary_encode(),
        }
        pq.write_table(pa.table(columns), tmp_path / "p.parquet")
        sbus("import", tmp_path / "p.parquet", tmp_path / "j")
        assert messages(tmp_path / "j") == [(b"a", b"1"), (b"b\xff", b"2")]
        assert [row["time"].timestamp() for row in rows(tmp_path / "j")] == [1.5, 2.5]

    @pytest.mark.parametrize(
        ("columns", "complaint"),
        [
            ({"time": pa.array([0], pa.timestamp("us")), "key": ["a"]}, "no column 'payload'"),
            ({"time": [1.5], "key": ["a"], "payload": ["1"]}, "'time' is no timestamp"),
            ({"time": pa.array([0], pa.timestamp("us")), "key": [7], "payload": ["1"]}, "'key' is neither text nor"),
            ({"time": pa.array([0], pa.timestamp("us")), "key": [["a"]], "payload": ["1"]}, "'key' is neither text"),
            ({"time": pa.array([0], pa.timestamp("us")), "key": [None], "payload": ["1"]}, "without time, key or"),
            ({"time": pa.array([None], pa.timestamp("us")), "key": ["a"], "payload": ["1"]}, "without time, key or"),
            (
                {
                    "journal": ["a", "b"],
                    "time": pa.array([0, 0], pa.timestamp("us")),
                    "key": ["a"] * 2,
                    "payload": ["1"] * 2,
                },
                "rows of several journals",
            ),
        ],
    )
    def test_parquet_refused(self, columns, complaint, tmp_path):
        """A Parquet file without rows of a journal is refused, and so is one with those of several."""
        pq.write_table(pa.table(columns), tmp_path / "p.parquet")
        assert complaint in sbus("import", tmp_path / "p.parquet", tmp_path / "j", status=2)

    def test_topics_of_others(self, tmp_path):
        """A topic that an error names cannot harm the terminal."""
        with open(tmp_path / "m.mcap", "wb") as file:
            writer = Writer(file)
            writer.start("sbus", "")
            channel = writer.register_channel("t\x1b[31m", "json", 0, {"kind": "strange"})
            writer.add_message(channel, 1, b"{}", 1, 1)
            writer.finish()
        text = sbus("import", tmp_path / "m.mcap", tmp_path / "j", status=2)
        assert "the topic t\\x1b[31m is of the kind 'strange'" in text

    def test_no_parquet(self, one, tmp_path):
        """A file of another format is refused by its name."""
        assert "one.jsonl: this is no Parquet file" in sbus("import", "--format=parquet", one, tmp_path / "j", status=2)


class TestExport:
    @pytest.fixture
    def recorded(self, tmp_path):
        """A journal with a gap and three messages, a second apart."""
        clock = Clock(BEGIN)
        with JournalWriter.open(tmp_path / "j", clock=clock) as journal:
            journal.append_gap(Kind.START, {})
            for n in range(3):
                clock.time += 1_000_000
                journal.append([(b"a/%d" % n, b"%d" % n)])
        return tmp_path / "j"

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ([], [0, 1, 2, 3]),
            (["--pattern=a/1", "--pattern=a/2"], [0, 2, 3]),
            (["--since=2023-11-14T22:13:21", "--until=2023-11-14T22:13:23"], [1, 2]),
            (["--from=1", "--to=2"], [1, 2]),
        ],
    )
    def test_which_rows(self, options, expected, recorded):
        """Rows are chosen as by ``sbus journal cat``, and printed as by its ``--json``."""
        output = sbus("export", "--format=jsonl", *options, recorded)
        assert [json.loads(line)["seq"] for line in output.splitlines()] == expected
        assert output == sbus("cat", "--json", *options, recorded)

    def test_file(self, recorded, tmp_path):
        """The name says the format; the file is its owner's alone."""
        path = tmp_path / "rows.parquet"
        assert sbus("export", "-o", path, recorded) == f"{path}: 4 rows\n"
        assert os.stat(path).st_mode & 0o777 == 0o600
        assert pq.read_table(path)["key"].to_pylist() == ["", "a/0", "a/1", "a/2"]

    def test_no_sender(self, recorded, tmp_path):
        """Without publishers, a Parquet file has no columns of theirs."""
        sbus("export", "--no-sender", "-o", tmp_path / "rows.parquet", recorded)
        assert not [name for name in pq.read_schema(tmp_path / "rows.parquet").names if name.startswith("sender")]

    def test_no_format(self, recorded):
        """A name without a format is refused with the remedy."""
        for options in ([], ["-o", "rows.bin"]):
            assert "choose one with --format={mcap,jsonl,parquet}" in sbus("export", *options, recorded, status=2)

    def test_failed(self, recorded, tmp_path):
        """An export that fails leaves the file that is there, and nothing else."""
        (tmp_path / "rows.jsonl").write_text("before")
        [segment] = recorded.glob("*.arrows")
        data = bytearray(segment.read_bytes())
        data[-40] ^= 1
        segment.write_bytes(data)
        assert "damaged" in sbus("export", "-o", tmp_path / "rows.jsonl", recorded, status=1)
        assert (tmp_path / "rows.jsonl").read_text() == "before"
        assert sorted(os.listdir(tmp_path)) == ["j", "rows.jsonl"]
