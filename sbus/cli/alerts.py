"""Alerts of a report: run a command for keys that are silent now, as ``--alert='silent>10m:COMMAND'``.

Keys are chosen by publishers, so they never become part of the command: it gets them as JSON on standard input.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from sbus.daemon.values import duration
from sbus.errors import SbusError, UsageError
from sbus.journal import clock

if TYPE_CHECKING:
    from sbus.report import Report
    from sbus.report.figures import Silence

__all__ = ["Alert", "AlertRule", "run_alerts"]

_RULE = re.compile(r"silent>([0-9.]+[a-z]*):(.+)", re.DOTALL)
_TIMEOUT = 60.0
"""Seconds that a command may take."""


@dataclass(frozen=True, slots=True)
class Alert:
    """When to run which command.

    :ivar seconds: the length of a silence above which it counts.
    :ivar command: for the shell.
    """

    seconds: float
    command: str


class AlertRule(click.ParamType[Alert]):
    """``silent>TIME:COMMAND``."""

    name = "rule"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Alert:
        if isinstance(value, Alert):
            return value
        match = _RULE.fullmatch(value)
        try:
            if match:
                return Alert(duration("alert")(match[1]), match[2].strip())
        except UsageError:
            pass
        self.fail(f"{value!r} is no alert: write it as silent>10m:COMMAND", param, ctx)


def run_alerts(alerts: Sequence[Alert], report: Report) -> None:
    """Run the command of each alert that has a silence to report.

    A silence is one that the report found unusual for its key, and that is not over.

    :raises sbus.errors.SbusError: if a command fails, after all have been run.
    """
    failures = []
    for alert in alerts:
        found = [_describe(silence) for silence in report.silences if _counts(silence, alert)]
        if not found:
            continue
        lines = "".join(json.dumps(each) + "\n" for each in found)
        try:
            done = subprocess.run(["/bin/sh", "-c", alert.command], input=lines.encode(), timeout=_TIMEOUT)
        except subprocess.TimeoutExpired:
            failures.append(f"{alert.command}: it took longer than {_TIMEOUT:.0f} s")
            continue
        if done.returncode:
            failures.append(f"{alert.command}: it ended with status {done.returncode}")
    if failures:
        raise SbusError(f"the report is written, but an alert failed: {'; '.join(failures)}")


def _counts(silence: Silence, alert: Alert) -> bool:
    return silence.end is None and silence.length - silence.unrecorded > clock.from_seconds(alert.seconds)


def _describe(silence: Silence) -> dict[str, object]:
    return {
        "key": silence.scope,
        "is_prefix": silence.is_prefix,
        "keys": silence.keys,
        "journal": silence.journal,
        "since": clock.format_utc(silence.start),
        "seconds": round(clock.to_seconds(silence.length - silence.unrecorded), 3),
        "usual_seconds": round(clock.to_seconds(silence.interval), 3),
    }
