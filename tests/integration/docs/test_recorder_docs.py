"""What the page on the recorder shows and promises, tried for real."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sbus.journal.schema import GAPS
from sbus.recorder.settings import Settings
from sbus.recorder.twistd import Options
from tests.integration.docs.test_docs import EXAMPLES, literals, page, rows
from tests.support import servers as conftest
from tests.support.harness import Bus, Process
from tests.support.journals import messages

directory, spawn = conftest.directory, conftest.spawn
PAGE = "pipeline/2-recorder.rst"
UNIT = EXAMPLES / "systemd" / "sbus-recorder.service"


def described() -> dict[str, str]:
    """The options of the page, each with its text in one line."""
    parts = re.split(r"^\.\. option:: --([a-z-]+).*\n", page(PAGE), flags=re.MULTILINE)[1:]
    return {name: " ".join(text.split()) for name, text in zip(parts[::2], parts[1::2], strict=True)}


def test_every_option_is_described() -> None:
    """The page has every option, and no other."""
    accepted = {name.rstrip("=") for name in Options().longOpt if len(name.rstrip("=")) > 1}
    assert set(described()) == accepted


def test_defaults_of_options() -> None:
    """The page and the help state the same defaults, which are those in force."""
    defaults, words = Settings(), {0.1: "100ms", 1.0: "1s", 3600.0: "1h", 0o600: "0600", None: None}
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


def test_unit() -> None:
    """The unit of the page has options that the recorder takes."""
    [command] = re.findall(r"^ExecStart=(.*)$", UNIT.read_text(), re.MULTILINE)
    twistd, _, arguments = command.partition(" sbus-recorder ")
    assert twistd.split()[1:] == ["--nodaemon", "--pidfile="]
    options = Options()
    options.parseOptions(arguments.split())
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
