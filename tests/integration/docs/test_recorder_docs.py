"""What the pages on the recorder and the journal state, checked against the code and real processes."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sbus.journal
from sbus.journal import COLUMNS, GAPS, JournalWriter
from sbus.journal.index import RECORD_SIZE
from sbus.journal.schema import FORMAT
from sbus.recorder import Settings
from sbus.recorder.twistd import Options
from tests.integration.docs.pages import EXAMPLES, literals, page, rows
from tests.support.harness import Bus, Process
from tests.support.journals import messages

PAGE = "pipeline/2-recorder.rst"
JOURNAL_PAGE = "pipeline/3-journal.rst"
UNIT = EXAMPLES / "systemd" / "sbus-recorder.service"


def described() -> dict[str, str]:
    """Return the options of the page, each with its text in one line."""
    parts = re.split(r"^\.\. option:: --([a-z-]+).*\n", page(PAGE), flags=re.MULTILINE)[1:]
    return {name: " ".join(text.split()) for name, text in zip(parts[::2], parts[1::2], strict=True)}


def test_every_option_is_described() -> None:
    """The page has every option, and no other."""
    accepted = {name.rstrip("=") for name in Options().longOpt if len(name.rstrip("=")) > 1}
    assert set(described()) == accepted - set(Options.deprecated)


def test_defaults_of_options() -> None:
    """The page and the help state the same defaults, and they are those of the settings."""
    defaults, words = Settings(), {0.1: "100ms", 1.0: "1s", 5.0: "5s", 3600.0: "1h", 0o600: "0600", None: None}
    parameters: Any = Options.optParameters
    texts = described()
    checked = 0
    for name, _, default, help_, *_ in parameters:
        in_help = re.search(r"\[default: ([^\]:]+)", help_)
        shown = in_help[1] if in_help else str(default)
        value = getattr(defaults, name.replace("-", "_"), None)
        if value is not None:
            assert str(words.get(value, value)) == shown
            checked += 1
        if name not in ("socket", "journal"):
            found = re.search(r"Default: (?:``)?([^`.,]+?)(?:``| bytes| messages)?\.", texts[name])
            assert found, name
            assert found[1] == shown
    assert checked > 10


def test_every_gap_is_described() -> None:
    """The page explains each kind of gap."""
    assert {literals(row[0])[0] for row in rows(page(PAGE), ".. list-table:: Gaps")[1:]} == set(GAPS)


def test_columns() -> None:
    """The page on the journal has the table of columns that the code has: names, types and meanings."""
    types = {"dictionary<values=string, indices=int8, ordered=0>": "dictionary<int8, utf8>"}
    expected = [
        [f"``{column.name}``", types.get(str(column.arrow_type), str(column.arrow_type)), column.meaning]
        for column in COLUMNS
    ]
    found = [
        [cell.replace("timestamp[us, UTC]", "timestamp[us, tz=UTC]") for cell in row] for row in table_of_columns()
    ]
    assert found == expected


def table_of_columns() -> list[list[str]]:
    text = page(JOURNAL_PAGE)
    return rows(text[text.index("What a row is") :], ".. list-table::")[1:]


def test_format() -> None:
    """The page describes the newest format, and records of the right size."""
    text = " ".join(page(JOURNAL_PAGE).split())
    assert f"This page describes format {FORMAT}, the newest" in text
    assert f'{{"format": {FORMAT}, "id"' in text
    assert f"Records of {RECORD_SIZE} bytes" in text


def test_python_of_the_journal(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The examples in Python run as the page shows them, on a journal of the test."""
    journal = directory / "journal"
    with JournalWriter.open(journal) as writer:
        writer.append([(b"key", b"payload")] * 3)
    blocks = re.findall(r"(?:::|\.\. code-block:: python)\n\n((?:   .*\n|\n)+)", page(JOURNAL_PAGE))
    examples = [textwrap.dedent(block) for block in blocks if "from sbus.journal import" in block]
    assert len(examples) == 2
    for example in examples:
        exec(example.replace("/var/lib/sbus/journal", str(journal)), {})
    assert capsys.readouterr().out == "3\n"


def test_public_names() -> None:
    """Every public name of `sbus.journal` can be imported from there."""
    assert all(getattr(sbus.journal, name) is not None for name in sbus.journal.__all__)


def test_unit(tmp_path: Path) -> None:
    """The recorder accepts the options in the unit of the page."""
    [command] = re.findall(r"^ExecStart=(.*)$", UNIT.read_text(), re.MULTILINE)
    twistd, _, arguments = command.partition(" sbus-recorder ")
    assert twistd.split()[1:] == ["--nodaemon"]
    options = Options()
    options.parseOptions(arguments.replace("/var/cache/sbus-metrics", str(tmp_path)).split())
    assert options["journal"] == "/var/lib/sbus/journal"
    assert "StateDirectory=sbus\n" in UNIT.read_text()


def test_recorder_in_an_application(spawn: Callable[..., Any], directory: Path) -> None:
    """The application of the page records the weather, and nothing else."""
    bus = spawn(Bus, directory, address=directory / "weather.sock").wait_started()
    shutil.copy(EXAMPLES / "pipeline" / "recorder.py", directory)
    application = spawn(Process, directory, ["-n", "--pidfile=", "-y", "recorder.py"])
    application.wait_log("recording 'weather/' of weather.sock into ")
    client = bus.client()
    client.msg(b"weather/rain", b"3 mm")
    client.msg(b"other", b"")
    client.sync()
    application.stop()
    found = messages(directory / "weather-journal", kinds=["message"])
    assert found == [(b"weather/rain", b"3 mm")]
