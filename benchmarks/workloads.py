"""The workloads: each is one question, and each of its cases one kind of run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

__all__ = ["MATRIX", "WORKLOADS", "Case", "Kind", "Pin", "Scale", "Who", "Workload"]

_MOST_BYTES = 768 << 20
"""The largest number of bytes delivered in one run, so that no server has to hold more."""
_OVERHEAD = 128
"""The approximate bytes of a message besides its payload."""
_PIPELINED = 64


class Kind(Enum):
    """The kind of a run; see c/engine.c for the modes of the generator."""

    FLOW = "flow"
    TRIP = "trip"
    SPARSE = "sparse"
    START = "wait"
    """The time from exec until the server serves a client."""
    EMPTY = "empty"
    """The resident memory of a server without clients."""
    HOLD = "hold"
    """The resident memory of a server with idle clients."""
    STALL = "stall"
    """The resident memory of a server with a stalled reader, under its default limits."""


class Who(Enum):
    """The servers that a workload is for."""

    ALL = "all"
    SERVERS = "all that have a process"
    OWN = "those that speak our protocol"
    OURS = "ours"
    BOTH = "ours, without and with bundles"


class Pin(Enum):
    """The CPUs on which the processes run."""

    FREE = "where the scheduler puts them"
    ONE = "all on one CPU"
    APART = "the server on the first CPU, the clients on the others"


@dataclass(frozen=True)
class Scale:
    """The extent of a measurement.

    :ivar seconds: for how long a run publishes.
    :ivar whole: whether large numbers are as large as the questions want them.
    :ivar files: connections that a process may have.
    """

    seconds: float = 0.5
    whole: bool = True
    files: int = 20_000

    def number(self, wanted: int) -> int:
        """Return a large number, or a tenth of it."""
        return wanted if self.whole else wanted // 10


@dataclass(frozen=True)
class Case:
    """One kind of run.

    :ivar settings: for the generator; ``seconds``, ``limit`` and ``server`` are added.
    :ivar stretch: the factor by which it publishes longer than others.
    :ivar rounds: the largest number of rounds in which it is measured.
    :ivar large: settings that a quick run makes smaller.
    """

    workload: str
    variant: str
    kind: Kind
    settings: dict[str, Any] = field(default_factory=dict)
    who: Who = Who.OWN
    pin: Pin = Pin.FREE
    stretch: float = 1
    rounds: int = 1000
    large: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.workload}/{self.variant}"

    @property
    def needs_root(self) -> bool:
        """Whether the generator connects as several users."""
        return bool(self.settings.get("users"))

    @property
    def needs_priority(self) -> bool:
        """Whether a process of the generator needs real-time priority, which not every user may have."""
        return bool(self.settings.get("first"))

    def scaled(self, scale: Scale) -> dict[str, Any]:
        """Return the settings for the generator."""
        settings = dict(self.settings)
        for name in self.large:
            settings[name] = scale.number(settings[name])
        if "idle" in settings:
            settings["idle"] = min(settings["idle"], scale.files - 500)
        if self.kind in (Kind.FLOW, Kind.TRIP, Kind.SPARSE):
            settings["seconds"] = round(scale.seconds * self.stretch, 3)
        if self.kind is Kind.FLOW:
            copies = settings.get("publishers", 1) * settings.get("subscribers", 1)
            most = _MOST_BYTES // ((settings.get("size", 64) + _OVERHEAD) * copies)
            settings["limit"] = min(settings.get("limit", most), most)
        return settings


@dataclass(frozen=True)
class Workload:
    """A question, and the runs that answer it."""

    name: str
    title: str
    cases: tuple[Case, ...]


def _matrix() -> Iterator[Workload]:
    shapes: list[tuple[str, str, dict[str, Any]]] = [
        ("1-1", "1→1", {}),
        ("1-8", "1→8", {"subscribers": 8}),
        ("1-64", "1→64", {"subscribers": 64}),
        ("8-1", "8→1", {"publishers": 8}),
        ("1-1-4k", "1→1, 4 KiB", {"size": 4096}),
        ("1-1-idle", "1→1, 1000 idle", {"idle": 1000}),
    ]
    for name, title, settings in shapes:
        who = Who.SERVERS if "idle" in settings else Who.ALL
        yield Workload(
            name,
            title,
            (
                Case(name, "unbatched", Kind.FLOW, {**settings, "batch": 1}, who),
                Case(name, "pipelined", Kind.FLOW, {**settings, "batch": _PIPELINED}, who),
            ),
        )


MATRIX = tuple(_matrix())
"""The workloads, each unbatched (a system call for each message) and pipelined (one for 64)."""


def _series(name: str, setting: str, values: tuple[int, ...], rounds: int = 1000, **settings: Any) -> tuple[Case, ...]:
    return tuple(
        Case(name, str(value), Kind.FLOW, {"batch": _PIPELINED, **settings, setting: value}, rounds=rounds)
        for value in values
    )


def _others() -> Iterator[Workload]:
    yield Workload("trip", "Round trip", (Case("trip", "free", Kind.TRIP, who=Who.ALL),))
    yield Workload(
        "trip-1cpu", "Round trip, one CPU", (Case("trip-1cpu", "shared", Kind.TRIP, who=Who.ALL, pin=Pin.ONE),)
    )
    sparse = {"publishers": 1000, "rate": 20_000}
    yield Workload("sparse", "Many small publishers", (Case("sparse", "20000", Kind.SPARSE, sparse, stretch=2),))
    publishers = {"publishers": 16, "batch": 1, "size": 32}
    yield Workload(
        "users",
        "Small publishers of several users",
        (
            Case("users", "1", Kind.FLOW, publishers, Who.OURS),
            Case("users", "16", Kind.FLOW, {**publishers, "users": 16}, Who.OURS),
        ),
    )
    several: dict[str, Any] = {"batch": _PIPELINED, "publishers": 8}
    yield Workload(
        "senders",
        "Names of senders",
        (
            Case("senders", "1→1", Kind.FLOW, {"batch": _PIPELINED}, Who.BOTH),
            Case("senders", "1→1, named", Kind.FLOW, {"batch": _PIPELINED, "senders": 1}, Who.BOTH),
            Case("senders", "8→1", Kind.FLOW, several, Who.BOTH),
            Case("senders", "8→1, named", Kind.FLOW, {**several, "senders": 1}, Who.BOTH),
        ),
    )
    yield Workload("patterns", "Growth with patterns", _series("patterns", "patterns", (10, 1000, 100_000), idle=1000))
    yield Workload("clients", "Growth with clients", _series("clients", "idle", (0, 100, 1000, 10_000), rounds=3))
    yield Workload("sizes", "Growth with size", _series("sizes", "size", (64, 512, 4096, 32_768), rounds=3))
    distinct = {"batch": _PIPELINED, "keys": 1_000_000, "limit": 1_000_000}
    yield Workload(
        "keys",
        "Growth with keys",
        (
            Case("keys", "one", Kind.FLOW, {"batch": _PIPELINED}, Who.OURS, rounds=3),
            Case("keys", "distinct", Kind.FLOW, distinct, Who.OURS, stretch=40, rounds=3, large=("keys", "limit")),
        ),
    )
    yield Workload(
        "churn",
        "Subscribers that come and go",
        (
            Case("churn", "none", Kind.FLOW, {"batch": _PIPELINED}),
            Case("churn", "connections", Kind.FLOW, {"batch": _PIPELINED, "churn": 1, "rate": 500}),
            Case("churn", "subscriptions", Kind.FLOW, {"batch": _PIPELINED, "churn": 2, "rate": 5000}),
        ),
    )
    yield Workload(
        "memory",
        "Memory",
        (
            Case("memory", "empty", Kind.EMPTY, rounds=3),
            Case("memory", "clients", Kind.HOLD, {"idle": 10_000}, rounds=3, large=("idle",)),
            Case("memory", "stalled", Kind.STALL, {"limit": 131_072, "size": 1024, "batch": 64}, Who.OURS, rounds=3),
        ),
    )
    load = {"subscribers": 8, "pair": 1, "batch": _PIPELINED}
    yield Workload(
        "load",
        "Latency under load",
        (
            Case("load", "pair", Kind.FLOW, load, pin=Pin.APART),
            Case("load", "pair-first", Kind.FLOW, {**load, "first": 1}, pin=Pin.APART),
        ),
    )
    yield Workload("start", "Start-up", (Case("start", "exec", Kind.START, who=Who.SERVERS),))


WORKLOADS: dict[str, Workload] = {workload.name: workload for workload in (*MATRIX, *_others())}
