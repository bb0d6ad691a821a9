"""Patterns of recorded messages: every command refuses or reports those that match nothing, in the same words."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from sbus.cli.main import cli
from sbus.cli.spark.job import Job
from sbus.errors import SbusError
from sbus.journal.writer import JournalWriter
from sbus.lake.plain import PlainTable
from tests.support.lakes import archive, row

COMMANDS = [
    ("journal", "cat", "{journal}", "--pattern"),
    ("journal", "tail", "{journal}", "--no-follow", "--pattern"),
    ("lake", "forget", "{lake}", "--key"),
    ("report", "--lake={lake}", "--output={lake}.html", "--pattern"),
    ("spark", "replay", "--lake={lake}", "--pattern"),
]


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """A journal and a lake with one message each; Spark does not start."""
    with JournalWriter.open(tmp_path / "journal") as journal:
        journal.append([(b"a/b", b"x")])
    archive(PlainTable(tmp_path / "lake"), 0, [row("one", 0, 0)])

    def refuse(*_: object) -> None:
        raise SbusError("no Spark here")

    monkeypatch.setattr(Job, "session", refuse)
    return {"journal": tmp_path / "journal", "lake": tmp_path / "lake"}


def run(places: dict[str, Path], command: tuple[str, ...], pattern: str) -> Result:
    return CliRunner().invoke(cli, [*(part.format(**places) for part in command), pattern])


@pytest.mark.parametrize("command", COMMANDS, ids=[" ".join(command[:2]) for command in COMMANDS])
def test_a_pattern_that_matches_nothing(places: dict[str, Path], command: tuple[str, ...]) -> None:
    """A forbidden pattern or a secret one is an error; one that no key can match is reported, and another is not."""
    for pattern in ("a/!", "!x/!/b", "a/!/"):
        done = run(places, command, pattern)
        assert (done.exit_code, done.output) == (
            2,
            f"sbus: the pattern {pattern} is not allowed: '!' is reserved: "
            "it may only begin !/cred/<gid>/<uid>/<pid>/\n",
        )
    done = run(places, command, "!/cred////inbox")
    assert (done.exit_code, done.output) == (
        2,
        "sbus: the pattern !/cred////... is secret, and secret messages are never recorded: use another\n",
    )
    done = run(places, command, "a/*c")
    assert done.exit_code == (1 if "no Spark here" in done.output else 0)
    assert done.output.startswith("sbus: the pattern a/*c: it can never match: '*' takes everything")
    assert "never match" not in run(places, command, "a/*").output
