"""The targets of sbus, as figures."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.measure import BASE, Results
from benchmarks.workloads import MATRIX

__all__ = ["TARGETS", "Target", "per_client", "stalled"]

NEAR = 0.05
"""The tolerance: a target missed by less counts as met, because measurements vary by that."""

Measure = Callable[[Results], "float | None"]


@dataclass(frozen=True)
class Target:
    """A target of sbus.

    :ivar measure: the figure, from the results; None if it was not measured.
    :ivar at_least: whether more is better.
    """

    what: str
    bound: float
    unit: str
    measure: Measure
    at_least: bool = False

    def show(self, value: float) -> str:
        return f"×{value:.2f}" if self.unit == "×" else f"{value:.3g} {self.unit}"

    def verdict(self, value: float) -> str:
        missed_by = (self.bound - value if self.at_least else value - self.bound) / self.bound
        return "met" if missed_by <= 0 else "met, within 5 %" if missed_by <= NEAR else "**missed**"


def per_client(results: Results, server: str) -> float | None:
    """Return the resident bytes for each idle client."""
    return _median_growth(results, server, "memory/clients", "held")


def stalled(results: Results, server: str) -> float | None:
    """Return the resident bytes for a client that reads nothing."""
    return _median_growth(results, server, "memory/stalled")


def _median_growth(results: Results, server: str, case: str, per: str | None = None) -> float | None:
    found = [(r["rss_kb"] - r["before_kb"]) * 1024 / (r[per] if per else 1) for r in results.runs(server, case)]
    return statistics.median(found) if found else None


def _ratio(case: str, figure: str, base_case: str | None = None) -> Measure:
    """Return the ratio to the yardstick in the same round, or to another case of sbus."""
    return lambda results: results.ratio("sbus", case, figure, "sbus" if base_case else BASE, base_case)


_STREAMS = ("redis", "nats", "zmq")
"""The servers that put many messages into one write."""


def _to_the_best(case: str, figure: str, *, at_least: bool) -> Measure:
    """Return the ratio of sbus with bundles to the best server with many messages in a write."""

    def measure(results: Results) -> float | None:
        ratios = [r for s in _STREAMS if (r := results.ratio("bundles", case, figure, s)) is not None]
        return (min if at_least else max)(ratios, default=None)

    return measure


def _bundled_trip(results: Results) -> float | None:
    return results.ratio("bundles", "trip-1cpu/shared", "p50_us", "sbus")


def _median(case: str, figure: str, scale: float = 1) -> Measure:
    def measure(results: Results) -> float | None:
        value = results.median("sbus", case, figure)
        return None if value is None else value * scale

    return measure


def _client_kilobytes(results: Results) -> float | None:
    value = per_client(results, "sbus")
    return None if value is None else value / 1e3


def _targets() -> Iterator[Target]:
    least = {"1-1": 1.0, "1-8": 1.3, "1-64": 2.5, "8-1": 1.0, "1-1-4k": 1.05, "1-1-idle": 2.2}
    most = {"1-1": 1.05, "1-8": 0.8, "1-64": 0.5, "8-1": 1.1, "1-1-4k": 1.2, "1-1-idle": 0.45}
    for workload in MATRIX:
        for case in workload.cases:
            what = f"{workload.title}, {case.variant}: messages a second"
            yield Target(what, least[workload.name], "×", _ratio(case.name, "per_second"), at_least=True)
    for workload in MATRIX:
        for case in workload.cases:
            what = f"{workload.title}, {case.variant}: CPU a message"
            yield Target(what, most[workload.name], "×", _ratio(case.name, "cpu_us"))
    bundled = {"1-1": 2.5, "8-1": 2.5, "1-8": 3.5, "1-64": 4, "1-1-4k": 1.25}
    for workload in MATRIX:
        if workload.name in bundled:
            what = f"{workload.title}, bundles: messages a second, to the best of redis, nats and zmq"
            measure = _to_the_best(f"{workload.name}/pipelined", "per_second", at_least=True)
            yield Target(what, bundled[workload.name], "×", measure, at_least=True)
    for workload in MATRIX:
        if workload.name in bundled and workload.name != "1-1-4k":
            what = f"{workload.title}, bundles: CPU a message, to the best of redis, nats and zmq"
            measure = _to_the_best(f"{workload.name}/pipelined", "cpu_us", at_least=False)
            yield Target(what, 1 / 3, "×", measure)
    # On one CPU: where the scheduler is free to choose, it decides more than the server does.
    yield Target("Round trip, one CPU, bundles: median, to that without", 1, "×", _bundled_trip)
    yield Target("Round trip, one CPU: median", 1.5, "×", _ratio("trip-1cpu/shared", "p50_us"))
    yield Target("Many small publishers: CPU a message", 1.5, "×", _ratio("sparse/20000", "cpu_us"))
    few = "patterns/10"
    yield Target("100,000 patterns: CPU a message, to that with 10", 1.2, "×", _ratio("patterns/100000", "cpu_us", few))
    one = "keys/one"
    yield Target("Each key once: CPU a message, to that of one key", 3, "×", _ratio("keys/distinct", "cpu_us", one))
    for variant, what in (("subscriptions", "5,000 subscriptions"), ("connections", "500 connections")):
        measure = _ratio(f"churn/{variant}", "per_second", "churn/none")
        yield Target(f"Beside {what} a second: messages a second, to those without", 0.7, "×", measure, at_least=True)
    yield Target("Memory without clients", 45, "MB", _median("memory/empty", "rss_kb", 1024e-6))
    yield Target("Memory for each idle client", 6, "KB", _client_kilobytes)
    yield Target("Round trip under load: 99 %", 1, "×", _ratio("load/pair", "p99_us"))
    yield Target("From exec until a client is served", 0.8, "s", _median("start/exec", "start_seconds"))


TARGETS = tuple(_targets())
