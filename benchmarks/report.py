"""The results in tables, for the documentation and for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import BASE, Results
from benchmarks.servers import OURS, SERVERS
from benchmarks.targets import TARGETS, per_client, stalled
from benchmarks.workloads import MATRIX, WORKLOADS

__all__ = ["Table", "ahead", "describe", "fragments", "judge", "notes", "tables", "title_of"]

NONE = "–"
QUIET = 0.5
"""The load average up to which a machine counts as idle."""


@dataclass(frozen=True)
class Table:
    """A table of figures, with a header.

    :ivar name: names the file that the documentation includes.
    """

    name: str
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def rst(self) -> str:
        """Return the table for Sphinx."""
        lines = [f".. list-table:: {self.title}", "   :header-rows: 1", "   :stub-columns: 1", ""]
        for row in (self.header, *self.rows):
            for i, cell in enumerate(row):
                lines.append(f"   {'* -' if i == 0 else '  -'} {cell}".rstrip())
        return "\n".join(lines) + "\n"

    def markdown(self) -> str:
        """Return the table for a terminal, or for the description of a change."""
        widths = [max(map(len, column)) for column in zip(self.header, *self.rows, strict=True)]

        def line(cells: Iterable[str]) -> str:
            first, *others = (
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
            )
            return f"| {' | '.join([first, *others])} |"

        rule = "|".join("-" * (width + 1) + (":" if i else "-") for i, width in enumerate(widths))
        return "\n".join([f"**{self.title}**", "", line(self.header), f"|{rule}|", *map(line, self.rows), ""])


# --- cells ----------------------------------------------------------------------------------------


def thousands(value: float) -> str:
    """612,345 as 612k, and 3,197,000 as 3.20M."""
    if value >= 1e6:
        return f"{value / 1e6:.2f}M"
    return f"{value / 1e3:.0f}k" if value >= 1e5 else f"{value / 1e3:.1f}k"


def two(value: float) -> str:
    return f"{value:.2f}"


def one(value: float) -> str:
    return f"{value:.1f}"


def times(value: float | None) -> str:
    return NONE if value is None else f"×{value:.2f}"


def title_of(server: str) -> str:
    return SERVERS[server].title if server in SERVERS else server


def _cell(results: Results, server: str, case: str, figure: str, show: Callable[[float], str]) -> str:
    """Write a median, with its ratio to the yardstick in brackets."""
    value = results.median(server, case, figure)
    if value is None:
        return NONE
    ratio = results.ratio(server, case, figure) if server != BASE else None
    return show(value) + (f" ({times(ratio)})" if ratio is not None else "")


# --- tables ---------------------------------------------------------------------------------------


def tables(results: Results) -> Iterator[Table]:
    """Return every table that has figures."""
    for mode in ("unbatched", "pipelined"):
        yield from _matrix(
            results, f"throughput-{mode}", f"Messages delivered a second, {mode}", mode, "per_second", thousands
        )
        yield from _matrix(
            results, f"cpu-{mode}", f"CPU of the server, µs a message delivered, {mode}", mode, "cpu_us", two
        )
    yield from _filled(
        "latency",
        "Round trips, µs (ratios: of the median)",
        ["", "median", "99 %", "one CPU: median", "99 %", "CPU of the server"],
        [
            [
                title_of(server),
                _cell(results, server, "trip/free", "p50_us", one),
                _plain(results, server, "trip/free", "p99_us", one),
                _cell(results, server, "trip-1cpu/shared", "p50_us", one),
                _plain(results, server, "trip-1cpu/shared", "p99_us", one),
                _plain(results, server, "trip-1cpu/shared", "cpu_us", one) if _runs(server) else NONE,
            ]
            for server in results.servers
        ],
    )
    yield from _own(results, "patterns", "CPU, µs a message, by patterns of 1,000 idle clients", "cpu_us", two)
    yield from _own(results, "clients", "CPU, µs a message, by idle clients", "cpu_us", two)
    yield from _own(results, "sizes", "Messages delivered a second, by bytes in a payload", "per_second", thousands)
    yield from _own(results, "sparse", "CPU, µs a message, by messages a second of 1,000 clients", "cpu_us", two)
    yield from _own(results, "users", "CPU, µs a message of 16 small publishers, by their users", "cpu_us", two)
    yield from _own(
        results, "senders", "Messages a second, without and with the names of senders", "per_second", thousands
    )
    yield from _own(
        results, "churn", "Messages delivered a second, beside a client that changes", "per_second", thousands
    )
    yield from _keys(results)
    yield from _memory(results)
    yield from _load(results)
    yield from _filled(
        "start",
        "Seconds from exec until a client is served",
        ["", "seconds"],
        [
            [title_of(server), _plain(results, server, "start/exec", "start_seconds", "{:.3f}".format)]
            for server in results.servers
        ],
    )


def _runs(server: str) -> bool:
    return server not in SERVERS or SERVERS[server].runs


def _plain(results: Results, server: str, case: str, figure: str, show: Callable[[float], str]) -> str:
    value = results.median(server, case, figure)
    return NONE if value is None else show(value)


def _filled(name: str, title: str, header: list[str], rows: list[list[str]]) -> Iterator[Table]:
    """Return the table without empty rows, or nothing if no row has figures."""
    rows = [row for row in rows if any(cell != NONE for cell in row[1:])]
    if rows:
        yield Table(name, title, header, rows)


def _matrix(
    results: Results, name: str, title: str, mode: str, figure: str, show: Callable[[float], str]
) -> Iterator[Table]:
    cases = [f"{workload.name}/{mode}" for workload in MATRIX]
    yield from _filled(
        name,
        title,
        ["", *(workload.title for workload in MATRIX)],
        [
            [title_of(server), *(_cell(results, server, case, figure, show) for case in cases)]
            for server in results.servers
            if figure != "cpu_us" or _runs(server)
        ],
    )


def _variants(results: Results, workload: str) -> list[str]:
    """Return the servers that were measured, in their order."""
    return [
        case.variant
        for case in WORKLOADS[workload].cases
        if any(results.has(server, case.name) for server in results.servers)
    ]


def _own(results: Results, workload: str, title: str, figure: str, show: Callable[[float], str]) -> Iterator[Table]:
    """Tabulate a series of cases, for the servers that have it."""
    variants = _variants(results, workload)
    yield from _filled(
        workload,
        title,
        ["", *(f"{int(v):,}" if v.isdigit() else v for v in variants)],
        [
            [title_of(server), *(_cell(results, server, f"{workload}/{v}", figure, show) for v in variants)]
            for server in results.servers
        ],
    )


def _keys(results: Results) -> Iterator[Table]:
    def row(title: str, case: str) -> list[str]:
        return [
            title,
            _plain(results, "sbus", case, "published", "{:,.0f}".format),
            _plain(results, "sbus", case, "cpu_us", two),
            _plain(results, "sbus", case, "peak_kb", lambda kb: f"{kb / 1024:.0f}"),
        ]

    yield from _filled(
        "keys",
        "sbus, by keys",
        ["", "messages", "CPU, µs a message", "memory at most, MiB"],
        [row("one key", "keys/one"), row("each key once", "keys/distinct")],
    )


def _memory(results: Results) -> Iterator[Table]:
    rows = []
    for server in results.servers:
        each = per_client(results, server)
        held = results.median(server, "memory/clients", "held")
        stall = stalled(results, server)
        rows.append(
            [
                title_of(server),
                _plain(results, server, "memory/empty", "rss_kb", lambda kb: f"{kb / 1024:.1f} MiB"),
                NONE if each is None else f"{each / 1024:.1f} KiB (of {held:,.0f})",
                NONE if stall is None else f"{stall / 2**20:.0f} MiB",
            ]
        )
    yield from _filled(
        "memory", "Memory resident", ["", "without clients", "for each idle client", "for a stalled reader"], rows
    )


def _load(results: Results) -> Iterator[Table]:
    rows = [
        [
            title_of(server),
            _cell(results, server, "load/pair", "p50_us", "{:.0f}".format),
            _cell(results, server, "load/pair", "p99_us", "{:.0f}".format),
            _cell(results, server, "load/pair-first", "p50_us", "{:.0f}".format),
            _cell(results, server, "load/pair-first", "p99_us", "{:.0f}".format),
            _cell(results, server, "load/pair", "per_second", thousands),
        ]
        for server in results.servers
    ]
    yield from _filled(
        "load",
        "A round trip between two clients beside a publisher to eight subscribers, µs",
        ["", "median", "99 %", "the pair goes first: median", "99 %", "messages delivered a second meanwhile"],
        rows,
    )


# --- which bus is ahead ---------------------------------------------------------------------------------


def ahead(results: Results) -> Iterator[Table]:
    """By how much the others are faster than sbus, or slower, on each workload of the matrix: packet by packet, and
    when its clients use bundles."""
    yield from _ahead(results, "ahead", "sbus", ("unbatched", "pipelined"))
    yield from _ahead(results, "ahead-bundles", "bundles", ("pipelined",))


def _ahead(results: Results, name: str, ours: str, modes: Sequence[str]) -> Iterator[Table]:
    rows = []
    for workload in MATRIX:
        for mode in modes:
            case = f"{workload.name}/{mode}"
            ratios = {
                server: ratio
                for server in results.servers
                if server not in (*OURS, "kernel") and (ratio := results.ratio(server, case, "per_second", ours))
            }
            if ratios:
                faster = sorted((s for s in ratios if ratios[s] > 1), key=lambda s: -ratios[s])
                slower = sorted((s for s in ratios if ratios[s] <= 1), key=lambda s: -ratios[s])
                rows.append(
                    [
                        f"{workload.title}, {mode}" if len(modes) > 1 else workload.title,
                        ", ".join(f"{title_of(s)} {times(ratios[s])}" for s in faster) or NONE,
                        ", ".join(f"{title_of(s)} {times(ratios[s])}" for s in slower) or NONE,
                    ]
                )
    yield from _filled(
        name,
        f"Messages delivered a second, as multiples of {title_of(ours)}",
        ["", "faster", "slower"],
        rows,
    )


# --- targets --------------------------------------------------------------------------------------


def judge(results: Results) -> Iterator[Table]:
    """Tabulate the targets beside the measured figures."""
    yield from _filled(
        "targets",
        "Targets, against the yardstick where nothing else is said",
        ["", "target", "measured", ""],
        [
            [
                target.what,
                f"{'≥' if target.at_least else '≤'} {target.show(target.bound)}",
                target.show(value),
                target.verdict(value),
            ]
            for target in TARGETS
            if (value := target.measure(results)) is not None
        ],
    )


# --- files ----------------------------------------------------------------------------------------


def notes(results: Results) -> str:
    """Describe the machine, its other load, and the runs that failed."""
    about = results.about
    lines = [".. list-table:: The machine", "   :stub-columns: 1", ""]
    for name, value in about.get("machine", {}).items():
        if value:
            lines += [f"   * - {name}", f"     - {value}"]
    date, rounds, seconds = (about.get(name, "?") for name in ("date", "rounds", "seconds"))
    load = about.get("load", 0)
    lines += [
        "",
        f"Measured on {date}. Rounds: {rounds}; seconds a run: {seconds}; load average before: {load:.1f}.",
        "",
    ]
    if not about.get("whole", True) or load > QUIET:
        why = "This was a quick run" if not about.get("whole", True) else "Other programs ran on the machine meanwhile"
        lines += [".. note::", f"   {why}: compare the ratios rather than the numbers.", ""]
    if results.failures:
        lines += ["Runs that failed and count for nothing:", ""]
        for record in results.failures:
            reason = one_line(record["error"])
            lines.append(f"* {record['case']}, {title_of(record['server'])}, round {record['round'] + 1}: {reason}")
        lines.append("")
    return "\n".join(lines)


def one_line(text: str) -> str:
    """Return a text in one line that fits into the cell of a table."""
    return " ".join(text.split())[:200].replace("*", "").replace("`", "'").replace("|", "/")


def fragments(results: Results, folder: Path) -> list[Table]:
    """Write a file for each table, for the documentation, and return the tables."""
    folder.mkdir(parents=True, exist_ok=True)
    found = [*judge(results), *tables(results), *ahead(results)]
    for table in found:
        (folder / f"{table.name}.inc").write_text(table.rst())
    (folder / "machine.inc").write_text(notes(results))
    return found


def describe(record: dict[str, Any]) -> str:
    """Describe a run in one line, for the terminal."""
    figures = ("per_second", "cpu_us", "p50_us", "p99_us", "rss_kb", "start_seconds")
    shown = record.get("error") or " ".join(f"{name}={record[name]}" for name in figures if name in record)
    return f"{record['round'] + 1:2} {record['case']:22} {record['server']:12} {shown}"
