"""``sbus top``: the rates of a bus and its clients, again and again."""

from __future__ import annotations

import itertools
import json
import sys
import time
from typing import Any

import click

from sbus.admin.pages import CLIENT_SORTS
from sbus.cli.admin.connection import Admin, admin_option
from sbus.cli.admin.screen import Screen, open_screen
from sbus.cli.admin.words import format_ago, format_bytes, name_of
from sbus.cli.options import Target, connection_options, pass_target
from sbus.cli.output import has_colors, printable_text
from sbus.cli.tables import format_table
from sbus.cli.types import COUNT, SECONDS
from sbus.errors import SbusError
from sbus.syscalls.names import program_name

__all__ = ["View", "top"]

_HEADER = 4
"""The line with the names of the columns."""
_MOST = 1000
_DENIED = 4
"""Users and rules that are shown: as many as fit a line of 80 characters."""
_COLUMNS = (
    "client",
    "pid",
    "uid",
    "user",
    "listener",
    "command",
    "up",
    "subs",
    "queue",
    "bytes",
    "lost",
    "lost/s",
    "state",
)
_SIDES = ">>><<<>>>>>><"


class View:
    """The screen: the last answers, and the choices of the user.

    :ivar sort: the order of clients.
    :ivar filter: text that a row must contain.
    :ivar is_paused: whether new answers are ignored.
    """

    def __init__(self, sort: str, text: str = "") -> None:
        self.sort = sort
        self.filter = text
        self.is_paused = False
        self.typed: str | None = None
        self.error = ""
        self._status: dict[str, Any] = {}
        self._clients: list[dict[str, Any]] = []
        self._rates: dict[str, float] = {}
        self._lost: dict[int, float] = {}

    def update(self, status: dict[str, Any], clients: list[dict[str, Any]]) -> None:
        """Take the newest answers, and find the rates since the last ones."""
        before, lost_before = self._status, {row["client"]: row["lost_messages"] for row in self._clients}
        is_same = before and before["started_at"] == status["started_at"] and before["pid"] == status["pid"]
        seconds = status["time"] - before["time"] if is_same else 0.0
        self._rates, self._lost = {}, {}
        if seconds > 0:
            for name, total in status["counters"].items():
                if not isinstance(total, dict):
                    self._rates[name] = (total - before["counters"].get(name, 0)) / seconds
            for row in clients:
                if row["client"] in lost_before:
                    self._lost[row["client"]] = (row["lost_messages"] - lost_before[row["client"]]) / seconds
        self._status, self._clients = status, clients

    def press(self, key: str) -> bool:
        """Take a key; return whether to continue."""
        if self.typed is not None:
            if key in ("\n", "\r"):
                self.filter, self.typed = self.typed, None
            elif key == "\x1b":
                self.typed = None
            elif key in ("\x7f", "\b"):
                self.typed = self.typed[:-1]
            elif key.isprintable():
                self.typed += key
            return True
        if key in ("q", "Q"):
            return False
        if key in (" ", "p"):
            self.is_paused = not self.is_paused
        elif key == "s":
            self.sort = CLIENT_SORTS[(CLIENT_SORTS.index(self.sort) + 1) % len(CLIENT_SORTS)]
        elif key == "/":
            self.typed = ""
        elif key == "\x1b":
            self.filter = ""
        return True

    def lines(self, height: int) -> list[str]:
        """Return the lines to show."""
        rows = [_COLUMNS, *(row for row in map(self._row, self._clients) if self.filter in " ".join(row))]
        table = [printable_text(line) for line in format_table(rows[: max(1, height - _HEADER - 1) + 1], _SIDES)]
        return [*self._summary(), self._denied(), *table[: height - _HEADER - 1], self._help()][:height]

    def as_json(self) -> dict[str, Any]:
        """Return the same for a program."""
        return {"status": self._status, "rates": self._rates, "clients": self._clients}

    def _summary(self) -> list[str]:
        status, rate = self._status, self._rate
        paused = "  PAUSED" if self.is_paused else ""
        out = self._rates.get("routed", 0) - self._rates.get("dropped", 0) - self._rates.get("conflated", 0)
        return [
            f"sbus {status['version']}  process {status['pid']}  up {format_ago(status['started_at'])}  "
            f"{time.strftime('%H:%M:%S', time.localtime(status['time']))}{paused}{self.error and '  ' + self.error}",
            f"in {rate('published')} messages/s, {format_bytes(self._rates.get('published_bytes', 0))}/s   "
            f"out {max(out, 0):,.0f}/s   unrouted {rate('unrouted')}/s   dropped {rate('dropped')}/s   "
            f"conflated {rate('conflated')}/s",
            f"clients {status['clients']:,} of {status['clients_limit']:,}   behind {status['queues']:,}   "
            f"held {status['held_publishers']:,}   queues {status['queue_messages']:,} messages, "
            f"{format_bytes(status['queue_bytes'])} of {format_bytes(status['queue_limit_bytes'])}   "
            f"memory {format_bytes(status['memory_bytes'])} of {format_bytes(status['memory_limit_bytes'])}",
        ]

    def _denied(self) -> str:
        """Return what users were not allowed to do last, by user and rule."""
        denied = self._status.get("denied", [])[:_DENIED]
        rows = [f"{name_of(row['uid']) or row['uid']} {row['rule']} {row['count']:,}" for row in denied]
        return printable_text(f"denied {self._rate('denied')}/s: {', '.join(rows)}") if rows else ""

    def _rate(self, name: str) -> str:
        return f"{self._rates.get(name, 0):,.0f}"

    def _help(self) -> str:
        if self.typed is not None:
            return f"filter: {self.typed}_   (Return: apply, Esc: leave)"
        printed = f" ({self.filter}; Esc: all)" if self.filter else ""
        return f"q quit   space pause   s sort ({self.sort})   / filter{printed}"

    def _row(self, row: dict[str, Any]) -> tuple[str, ...]:
        state = "behind" if row["is_congested"] else ""
        if row["blocked_by"]:
            state = f"held by {','.join(map(str, row['blocked_by']))}"
        return (
            str(row["client"]),
            str(row["pid"]),
            str(row["uid"]),
            name_of(row["uid"]) or "-",
            row["listener"],
            program_name(row["pid"]) or "-",
            format_ago(row["connected_at"]),
            str(row["patterns"]),
            str(row["queue_messages"]),
            format_bytes(row["queue_bytes"]),
            str(row["lost_messages"]),
            f"{self._lost.get(row['client'], 0):,.0f}",
            state or "-",
        )


@click.command(
    short_help="Watch the rates and the clients of a bus.",
    epilog="""\
\b
Keys: q quits, space pauses, s sorts by the next column, / filters, Esc shows all again.

\b
Examples:
  sbus top --sort=lost
  sbus top --json -n 2 | tail -n 1 | jq .rates
""",
)
@click.option(
    "--sort",
    type=click.Choice(CLIENT_SORTS),
    default="queue",
    show_default=True,
    help="Sort clients by this; the highest first.",
)
@click.option("--filter", "text", default="", metavar="TEXT", help="Show only rows with this text.")
@click.option(
    "--delay", "-d", type=SECONDS, default=1.0, show_default=True, metavar="SECONDS", help="Time between two updates."
)
@click.option("--count", "-n", type=COUNT, metavar="N", help="Stop after N updates.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each update.")
@admin_option
@connection_options
@pass_target
def top(
    target: Target, sort: str, text: str, delay: float, count: int | None, as_json: bool, admin: str | None
) -> None:
    """Show the rates of the bus and its clients, every second.

    On a terminal it takes the whole screen; otherwise it prints each update. The name of a command is
    a hint: a program can set it.
    """
    bus, view = Admin(target, admin), View(sort, text)
    _update(bus, view)
    if as_json or not (sys.stdout.isatty() and sys.stdin.isatty()):
        for number in itertools.count(1):
            click.echo(json.dumps(view.as_json()) if as_json else "\n".join(view.lines(_MOST)[:-1]) + "\n")
            if number == count:
                return
            time.sleep(delay)
            _update(bus, view)
    with open_screen(has_colors()) as screen:
        _show(bus, view, screen, delay, count)


def _show(bus: Admin, view: View, screen: Screen, delay: float, count: int | None) -> None:
    """Draw until the user quits, or for a number of updates."""
    updates = 1
    due = time.monotonic() + delay
    while True:
        screen.draw(view.lines(screen.size()[1]), _HEADER)
        keys = screen.keys(due)
        sort = view.sort
        if not all(map(view.press, keys)):
            return
        if time.monotonic() < due and view.sort == sort:
            continue
        due = time.monotonic() + delay
        if updates == count:
            return
        updates += 1
        if view.is_paused and view.sort == sort:
            continue
        try:
            _update(bus, view)
            view.error = ""
        except SbusError as e:
            view.error = str(e)


def _update(bus: Admin, view: View) -> None:
    status = bus.get("/v1/status")
    view.update(status, bus.get("/v1/clients", sort=view.sort, limit=_MOST)["clients"])
