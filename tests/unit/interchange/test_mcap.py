"""MCAP files: what other programs see in ours, and what becomes of theirs."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcap.reader import make_reader
from mcap.writer import CompressionType, IndexType, Writer

from sbus.errors import UsageError
from sbus.interchange import mcap
from sbus.interchange.rows import Selection
from sbus.journal.schema import Kind
from sbus.journal.senders import Senders
from sbus.journal.writer import JournalWriter
from tests.support.journals import Clock

BEGIN = 1_700_000_000_000_000


@pytest.fixture
def exported(tmp_path):
    """The file of a journal with a gap and messages of every form."""
    with JournalWriter.open(tmp_path / "j", clock=Clock(BEGIN)) as journal:
        journal.append_gap(Kind.START, {"patterns": [""]})
        values = pa.array([b'{"c": 21.5}', b"21.5", b"warm", b"\xff"], pa.binary())
        names = Senders(pa.array([b"17 !/cred/100/1000/42", None], pa.binary()), pa.array([3, 4], pa.int32()))
        journal.append_columns(pa.array([b"kitchen"] * 4, pa.binary()), values, [BEGIN + 1], [4], names)
        journal.append_lost(b"3 300 5 queue-full")
    out = io.BytesIO()
    assert mcap.write(out, Selection(str(tmp_path / "j"))) == 6
    out.seek(0)
    return out


def test_what_foxglove_sees(exported):
    """JSON objects are as they were, and other JSON and text are the value of one; all else is no JSON."""
    found = [
        (channel.topic, channel.message_encoding, message.data, message.log_time, message.sequence)
        for _, channel, message in make_reader(exported, validate_crcs=True).iter_messages()
    ]
    first, later = BEGIN * 1000, (BEGIN + 1) * 1000
    assert found == [
        ("!/start", "json", b'{"patterns": [""]}', first, 0),
        ("kitchen", "json", b'{"c": 21.5}', later, 1),
        ("kitchen", "json", b'{"value":21.5}', later, 2),
        ("kitchen", "json", b'{"value":"warm"}', later, 3),
        ("kitchen", "application/octet-stream", b"\xff", later, 4),
        ("!/lost", "json", b'{"value":"3 300 5 queue-full"}', later, 5),
    ]


def test_what_a_channel_says(exported):
    """A channel has the kind, the form and the publisher of its messages; JSON has a schema, as Foxglove wants one."""
    summary = make_reader(exported).get_summary()
    assert summary is not None
    assert [channel.metadata for channel in summary.channels.values()] == [
        {"kind": "start", "form": "object"},
        {"kind": "message", "form": "object", "sender": "17 !/cred/100/1000/42"},
        {"kind": "message", "form": "value", "sender": "17 !/cred/100/1000/42"},
        {"kind": "message", "form": "text", "sender": "17 !/cred/100/1000/42"},
        {"kind": "message", "form": "bytes"},
        {"kind": "lost", "form": "text"},
    ]
    [schema] = summary.schemas.values()
    assert (schema.encoding, json.loads(schema.data)) == ("jsonschema", {"type": "object", "properties": {}})
    assert [channel.schema_id for channel in summary.channels.values()] == [1, 1, 1, 1, 0, 1]
    assert all(index.message_index_offsets for index in summary.chunk_indexes)


def test_too_many_publishers(tmp_path):
    """A journal with more keys and publishers than MCAP can number is refused with the remedy."""
    with JournalWriter.open(tmp_path / "j", clock=Clock(BEGIN)) as journal:
        journal.append([(b"%d" % n, b"text") for n in range(4)])
    chosen = Selection(str(tmp_path / "j"))
    with pytest.raises(UsageError, match=r"more than 3 pairs of a key and a publisher.*--no-sender"):
        mcap.write(io.BytesIO(), chosen, max_channels=3)
    assert mcap.write(io.BytesIO(), chosen, max_channels=4) == 4


def bag(path, **settings):
    """Write a file as rosbag2 does: CDR with a schema, and messages that are not quite in order."""
    with open(path, "wb") as file:
        writer = Writer(file, chunk_size=60, **settings)
        writer.start("ros2", "libmcap")
        schema = writer.register_schema("sensor_msgs/msg/Temperature", "ros2msg", b"float64 temperature")
        topics = [writer.register_channel(topic, "cdr", schema) for topic in ("/kitchen\\x", "/attic")]
        for n in (0, 2, 1, 3):
            writer.add_message(topics[n % 2], BEGIN * 1000 + n * 1_000_999, b"\0\1\0\0%d" % n, 0)
        writer.finish()


@pytest.mark.parametrize(
    "settings",
    [{}, {"compression": CompressionType.LZ4}, {"use_chunking": False}, {"index_types": IndexType.NONE}],
    ids=["usual", "lz4", "no chunks", "no index"],
)
def test_a_bag(settings, tmp_path):
    """A file of rosbag2: topics are keys, byte for byte; times are whole microseconds; the order is that of times."""
    bag(tmp_path / "bag.mcap", **settings)
    found = list(mcap.read(str(tmp_path / "bag.mcap")))
    order = (0, 1, 2, 3) if settings.get("use_chunking", True) and "index_types" not in settings else (0, 2, 1, 3)
    assert [(row.key, row.payload, row.time, row.kind) for row in found] == [
        ((b"/kitchen\\x", b"/attic")[n % 2], b"\0\1\0\0%d" % n, BEGIN + n * 1_000_999 // 1000, "message") for n in order
    ]


@pytest.mark.parametrize("damage", [lambda data: data[:200], lambda data: b"no" + data, lambda data: b""])
def test_a_damaged_file(damage, tmp_path):
    """A file that is cut off, or is no MCAP, is refused by its name."""
    bag(tmp_path / "bag.mcap")
    data = damage((tmp_path / "bag.mcap").read_bytes())
    (tmp_path / "bag.mcap").write_bytes(data)
    with pytest.raises(UsageError, match=r"bag.mcap: this is no MCAP file, or it is cut off or damaged"):
        list(mcap.read(str(tmp_path / "bag.mcap")))


def test_an_own_file_that_is_cut_off(exported, tmp_path):
    """An exported file that is cut off is refused, wherever it ends."""
    data = exported.getvalue()
    for end in (9, len(data) // 2, len(data) - 9):
        (tmp_path / "cut.mcap").write_bytes(data[:end])
        with pytest.raises(UsageError, match="cut off or damaged"):
            list(mcap.read(str(tmp_path / "cut.mcap")))


@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), min_size=1, max_size=4), st.integers(0, 2000))
def test_damage_anywhere(changes, end):
    """A file with damage anywhere is read, or refused with the remedy; nothing else happens."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as home:
        path = f"{home}/bag.mcap"
        bag(path)
        with open(path, "r+b") as file:
            data = bytearray(file.read())
            for at, value in changes:
                data[at % len(data)] = value
            file.seek(0)
            file.truncate()
            file.write(data[: end or None])
        with contextlib.suppress(UsageError):
            assert len(list(mcap.read(path))) <= 8
