"""Alerts of a report: a command runs for silences that last, and gets the keys as data."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click
import pytest

from sbus.cli.alerts import Alert, AlertRule, run_alerts
from sbus.cli.main import cli
from sbus.errors import SbusError
from tests.unit.report.reports import hostile_report, new_report

UNITS = Path(__file__).parents[3] / "docs/examples/systemd"


def test_a_command_gets_the_silent_keys(tmp_path):
    """It runs once, with a line of JSON for each silence that is longer than the limit; below it, not at all."""
    out = tmp_path / "out"
    run_alerts([Alert(600, f"cat >{out}"), Alert(7200, f"echo never >{out}")], new_report())
    (line,) = out.read_text().splitlines()
    found = json.loads(line)
    assert (found["key"], found["seconds"] > 600, found["usual_seconds"]) == ("plant/stops", True, 10.0)


def test_a_hostile_key_is_data(tmp_path):
    """A key with quotes and shell syntax arrives as it is."""
    out = tmp_path / "out"
    report = hostile_report()
    run_alerts([Alert(0, f"cat >{out}")], report)
    silent = [silence.scope for silence in report.silences if silence.end is None]
    assert [json.loads(line)["key"] for line in out.read_text().splitlines()] == silent


def test_a_command_that_fails():
    """All commands run; then the error names those that failed, and says that the page is there."""
    with pytest.raises(SbusError, match=r"the report is written, but an alert failed: exit 3: .* status 3"):
        run_alerts([Alert(0, "exit 3"), Alert(0, "cat >/dev/null")], new_report())


@pytest.mark.parametrize("text", ["", "silent", "silent>10m", "silent>x:true", "loud>10m:true", "silent>10m:"])
def test_bad_rules(text):
    """A rule that is none is refused, with an example."""
    with pytest.raises(click.BadParameter, match="write it as silent>10m:COMMAND"):
        AlertRule().convert(text, None, None)
    assert AlertRule().convert("silent>10m:mail -s 'a:b' ops", None, None) == Alert(600, "mail -s 'a:b' ops")


def test_the_units_start_commands_that_exist():
    """Each option in the units of systemd is one of the command, and each timer has its service."""
    for unit in UNITS.glob("sbus-*.timer"):
        assert unit.with_suffix(".service").exists()
    checked = 0
    for unit in UNITS.glob("sbus-*.service"):
        for line in re.findall(r"^ExecStart=\S+/sbus (.*)$", unit.read_text(), re.MULTILINE):
            command: click.Command = cli
            context = click.Context(cli)
            arguments = line.split()
            while isinstance(command, click.Group):
                found = command.get_command(context, arguments.pop(0))
                assert found is not None
                command = found
            command.make_context(command.name, arguments)
            checked += 1
    assert checked == 3
