"""The examples of the page on interchange, run in order, in the directory of a journal."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from click.testing import CliRunner
from mcap.reader import make_reader
from mcap.writer import Writer

from sbus.cli.main import cli
from sbus.interchange.rows import Selection
from sbus.journal.clock import from_datetime, parse
from sbus.journal.schema import Kind
from sbus.journal.writer import JournalWriter
from tests.integration.docs.pages import page

PAGE = "pipeline/8-interchange.rst"
TIME = from_datetime(parse("2026-01-31T12:00"))


def blocks(kind: str) -> list[str]:
    """Return the blocks of the page in a language; ``""``: those without one."""
    head = rf"\.\. code-block:: {kind}" if kind else r"::"
    return [textwrap.dedent(block) for block in re.findall(rf"{head}\n\n((?:   .*\n|\n)+)", page(PAGE))]


def run(line: str, journal: Path) -> None:
    """Run a line of a shell; ``sbus`` runs in this process, except behind a pipe."""
    words = line.replace("/var/lib/sbus/journal", str(journal)).replace("'", "")
    if "|" in words:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        subprocess.run(
            ["bash", "-c", f"set -o pipefail; {words}"], check=True, timeout=60, env={**os.environ, "PATH": path}
        )
        return
    done = CliRunner().invoke(cli, words.split()[1:])
    assert done.exit_code == 0, (line, done.output)


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A journal of two sensors, in the current directory."""
    monkeypatch.chdir(tmp_path)
    with JournalWriter.open("journal-of-the-bus", clock=lambda: TIME) as writer:
        writer.append_gap(Kind.START, {})
        writer.append([(b"sensors/kitchen", b"21.5"), (b"sensors/attic", b"14"), (b"sensors/kitchen", b"22.5")])
        writer.append([(b"pictures/\xff", b"\xff\xd8")])
    return tmp_path / "journal-of-the-bus"


def test_export_pandas_and_duckdb(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The page's exports make the files that its queries read."""
    for line in blocks("sh")[0].splitlines()[:2]:
        run(line, journal)
    for example in blocks("python"):
        exec(example, {})
    output = capsys.readouterr().out
    assert re.findall(r"sensors/(\w+)\W+([0-9.]+)", output) == [("attic", "14.0"), ("kitchen", "22.0")] * 2
    with open("today.mcap", "rb") as file:
        topics = {channel.topic for _, channel, _ in make_reader(file).iter_messages()}
    assert topics == {"!/start", "sensors/kitchen", "sensors/attic", r"pictures/\xff"}


def test_table_of_payloads(journal: Path) -> None:
    """Payloads are in an MCAP file as the table of the page says."""
    cells = re.findall(r"``([^`]+)``\n     - (?:``([^`]+)``|unchanged)\n     - ``json``", page(PAGE))
    assert len(cells) == 3
    with JournalWriter.open("j") as writer:
        writer.append([(b"k", payload.encode()) for payload, _ in cells])
    run("sbus journal export -o j.mcap j", journal)
    with open("j.mcap", "rb") as file:
        found = [message.data.decode() for _, _, message in make_reader(file).iter_messages(log_time_order=False)]
    assert found == [data or payload for payload, data in cells]


def test_import_of_a_bag(journal: Path) -> None:
    """Two files of rosbag2 become a journal, whose keys are the topics."""
    Path("bag").mkdir()
    for number in (0, 1):
        writer = Writer(f"bag/bag_{number}.mcap")
        writer.start("ros2")
        channel = writer.register_channel("/imu", "cdr", writer.register_schema("sensor_msgs/msg/Imu", "ros2msg", b""))
        writer.add_message(channel, (TIME + number) * 1000, b"\0\1\0\0", 0)
        writer.finish()
    example = next(block for block in blocks("") if "bag_1" in block)
    run(example.splitlines()[0], journal)
    assert [(row.key, row.time - TIME) for row in Selection("journal").rows()] == [(b"/imu", 0), (b"/imu", 1)]


def test_import_of_lines(journal: Path) -> None:
    """Lines that ``sbus sub --json`` prints become a journal, also from a pipe."""
    line = json.dumps({"time": TIME / 1e6, "key": "a", "payload": "1", "encoding": "text"}) + "\n"
    for name in ("seen", "monday", "tuesday"):
        Path(f"{name}.jsonl").write_text(line)
    lines = [*next(block for block in blocks("") if "seen.jsonl" in block).splitlines()[1:2]]
    lines += blocks("sh")[1].splitlines()[1:2]
    for command in lines:
        run(command, journal)
    assert [row.key for row in Selection("seen").rows()] == [b"a"]
    assert [row.key for row in Selection("journal").rows()] == [b"a", b"a"]


@pytest.mark.slow
def test_pipes(journal: Path) -> None:
    """Exported lines pass through gzip, and back into a journal."""
    run(blocks("sh")[0].splitlines()[2], journal)
    run(blocks("sh")[1].splitlines()[2], journal)
    assert list(Selection("journal").rows()) == list(Selection(str(journal)).rows())
