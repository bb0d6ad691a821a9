"""The results in tables, with the missed targets."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from benchmarks.attacks.attack import ALL
from benchmarks.attacks.catalogue import ATTACKS
from benchmarks.attacks.measure import PHASES, Record
from benchmarks.report import Table, one_line, thousands

__all__ = ["conditions", "describe", "medians", "missed", "suffix", "tables"]

_NONE = "–"
_TRIP_MS = 20.0
"""Milliseconds of p99 that an attack may add to twice that of the spinners."""
_THROUGHPUT, _THROUGHPUT_ALL = 0.5, 0.4
"""The part of the throughput beside spinners that must remain, for one attack and for all at once."""
_SHUT_SECONDS = 2.0
_LOG_BYTES = 10_000
"""Bytes per second by which the log may grow."""
_MEMORY = 2.0
"""The factor between what the server counts and what its RSS shows."""


def _about(records: Sequence[Record]) -> Record:
    """Return the record of the machine; an empty one if there is none."""
    return next((record for record in records if "machine" in record), {})


def suffix(records: Sequence[Record]) -> str:
    """Return the end of the names of files with these records: plain Python has files of its own."""
    return "-pure" if _about(records).get("pure") else ""


def conditions(records: Sequence[Record]) -> str:
    """Return a note in reStructuredText about the machine and the measurement."""
    about = _about(records)
    machine = about["machine"]
    loads = [record["load"] for record in records if "load" in record]
    rounds = 1 + max((record.get("round", 0) for record in records), default=0)
    build = "plain Python" if about["pure"] else "compiled"
    kernel = ".".join(machine["kernel"].split(".")[:2])
    return (
        ".. note::\n"
        f"   Measured on {about['date']}, {build}, Linux {kernel}, {machine['CPUs']} CPUs, "
        f"{rounds} round{'s' * (rounds > 1)} with\n"
        f"   ``--secs {about['secs']:g}``. The load average was {machine['load']:.1f} before, and up to "
        f"{max(loads, default=machine['load']):.1f} during the measurement, which\n"
        "   takes part in it. On a machine that runs other programs too, a single row is accurate to a factor of about "
        "three.\n"
    )


def tables(records: Sequence[Record]) -> Iterator[Table]:
    """Return the tables that have records; figures are medians over the rounds."""
    end = suffix(records)
    records = medians(records)
    attacks = [record for record in records if "attack" in record]
    if attacks:
        several = len({record["server"] for record in attacks}) > 1
        rows = [_attack_row(record, several) for record in attacks]
        build = ", plain Python" if end else ""
        yield Table(f"attacks{end}", f"A bystander's clients beside an attack{build}", _ATTACK_HEADER, rows)
        titles = [
            [name, ATTACKS[name].title.replace("*", "\\*"), str(len(ATTACKS[name].parts))] for name in _names(attacks)
        ]
        yield Table("attacks-legend", "The attacks", ["", "the attacking user's clients", "processes"], titles)
    if kinds := [record for record in records if "memory" in record]:
        several = len({record["server"] for record in kinds}) > 1
        yield Table(
            f"attacks-memory{end}",
            f"Memory by kind of state, bytes each{', plain Python' if end else ''}",
            ["", "items", "resident", "counted", "resident / counted", "in the kernel"],
            [_memory_row(record, several) for record in kinds],
        )


def medians(records: Sequence[Record]) -> list[Record]:
    """Return one record of medians for each row of a table; records with an error stay rows."""
    groups: dict[tuple[str, ...], list[Record]] = {}
    for number, record in enumerate(records):
        if title := record.get("attack") or record.get("memory"):
            failed = (str(number),) if "error" in record else ()
            groups.setdefault((title, record["server"], *failed), []).append(record)
    return [_median(group) for group in groups.values()]


def _median(values: Sequence[Any]) -> Any:
    """Return the median of numbers (None is the largest), of records by key; of lists all items; else the first."""
    first = values[0]
    if isinstance(first, dict):
        names = dict.fromkeys(name for value in values for name in value)
        return {name: _median([value[name] for value in values if name in value]) for name in names}
    if isinstance(first, list):
        return [item for value in values for item in value]
    if isinstance(first, str):
        return first  # the same in all
    found = median(math.inf if value is None else value for value in values)
    return None if found == math.inf else found


def _names(records: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(record["attack"] for record in records))


def _title(record: Record, kind: str, several: bool) -> str:
    return f"{record[kind]}, {record['server']}" if several else str(record[kind])


# --- attacks --------------------------------------------------------------------------------------

_ATTACK_HEADER = (
    "",
    *(f"p99, ms: {phase}" for phase in PHASES),
    "longest, ms",
    "throughput / spinners'",
    "new clients served",
    "RSS, MiB: before",
    "peak",
    "unread in the kernel, MiB",
    "CPU, %",
    "log, bytes/s",
    "SIGTERM, s: clients shut",
    "process gone",
    "targets missed, remarks",
)


def _attack_row(record: Record, several: bool) -> list[str]:
    title = _title(record, "attack", several)
    if "error" in record:
        return [title, *[_NONE] * (len(_ATTACK_HEADER) - 2), f"**{one_line(record['error'])}**"]
    attack = record["attack_phase"]
    newcomers = attack["newcomers"]
    tried = round(newcomers["count"])
    served = tried - round(newcomers["unanswered"])
    return [
        title,
        *(_milliseconds(phase["trips"], "p99_ms") for phase in _phases(record)),
        _milliseconds(attack["trips"], "max_ms"),
        _throughput(record),
        f"{served} of {tried}, p99 {newcomers['p99_ms']:.0f} ms",
        _mebibytes(record["rss_before"]),
        _mebibytes(record["rss_peak"]),
        _mebibytes(record["kernel_bytes"]),
        f"{attack['cpu'] * 100:.0f}",
        f"{attack['log_per_second']:,.0f}",
        _seconds(record["shut_s"]),
        _seconds(record["gone_s"]),
        one_line("; ".join([*missed(record), *_remarks(record)])) or "none",
    ]


def _remarks(record: Record) -> Iterator[str]:
    """Return the problems besides missed targets."""
    for phase in _phases(record):
        if "error" in phase["trips"]:
            yield phase["trips"]["error"]
    if record["ready"] < record["processes"]:
        yield f"{record['ready']:.0f} of {record['processes']:.0f} attackers finished their set-up"
    if record["attackers_failed"]:
        yield f"{record['attackers_failed']:.0f} attackers failed"
    if ended := record.get("ended"):
        yield f"{ended:.0f} connections have ended unread"
    if record["status"]:
        yield f"exit status {record['status']:.0f}"


def _phases(record: Record) -> list[Record]:
    return [record["idle"], record["spinners"], record["attack_phase"]]


def _milliseconds(trips: Record, figure: str) -> str:
    """Write a figure; a sign marks a lower bound, if messages went without an answer."""
    if "error" in trips:
        return _NONE
    bound = ">" if trips["unanswered"] > trips["count"] * (0 if figure == "max_ms" else 0.01) else ""
    return f"{bound}{trips[figure]:.1f}"


def ratio(record: Record) -> float | None:
    """Return the throughput beside the attack, as a part of that beside the spinners."""
    attack, spinners = (record[phase]["bulk"].get("per_second") for phase in ("attack_phase", "spinners"))
    return attack / spinners if attack is not None and spinners else None


def _throughput(record: Record) -> str:
    found = ratio(record)
    if found is None:
        return _NONE
    return f"{found:.2f} of {thousands(record['spinners']['bulk']['per_second'])}/s"


def _mebibytes(size: float) -> str:
    return f"{size / 2**20:.0f}"


def _seconds(value: float | None) -> str:
    return "**killed**" if value is None else f"{value:.2f}"


def missed(record: Record) -> list[str]:
    """Return the names of the targets that a row without an error misses."""
    attack, spinners = record["attack_phase"], record["spinners"]
    found = ratio(record)
    least = _THROUGHPUT_ALL if record["attack"] == ALL else _THROUGHPUT
    most = _TRIP_MS + 2 * spinners["trips"].get("p99_ms", 0.0)
    checks = {
        "round trip": attack["trips"].get("p99_ms", float("inf")) < most,
        "throughput": not attack["bulk"] or (found is not None and found > least),
        "scrapes": not ATTACKS[record["attack"]].scrapes or attack["newcomers"]["unanswered"] == 0,
        "SIGTERM": record["shut_s"] is not None and record["shut_s"] <= _SHUT_SECONDS,
        "log": attack["log_per_second"] <= _LOG_BYTES,
    }
    return [name for name, is_met in checks.items() if not is_met]


# --- memory ---------------------------------------------------------------------------------------


def _memory_row(record: Record, several: bool) -> list[str]:
    title = _title(record, "memory", several)
    if "error" in record:
        return [title, *[_NONE] * 4, f"**{one_line(record['error'])}**"]
    counted = record["counted"]
    times = record["resident"] / counted if counted else None
    text = _NONE if times is None else f"×{times:.1f}"
    is_missed = times is not None and not 1 / _MEMORY <= times <= _MEMORY
    return [
        title,
        f"{record['items']:,.0f}",
        f"{record['resident']:,.0f}",
        f"{counted:,.0f}" if counted else _NONE,
        f"**{text}**" if is_missed else text,
        f"{record['kernel']:,.0f}" if "kernel" in record else _NONE,
    ]


# --- a line for each run --------------------------------------------------------------------------


def describe(record: Record) -> str:
    """Describe a record in one line, to show progress."""
    name = f"{record['server']:12} {record.get('attack') or record['memory']:24}"
    if "error" in record:
        return f"{name} {one_line(record['error'])}"
    if "memory" in record:
        return f"{name} {record['resident']:,.0f} bytes each"
    p99 = " / ".join(_milliseconds(phase["trips"], "p99_ms") for phase in _phases(record))
    return f"{name} p99 {p99} ms, throughput {_throughput(record)}, missed: {', '.join(missed(record)) or 'none'}"
