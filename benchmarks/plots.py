"""Plots of the results, for the documentation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.measure import BASE, Results
from benchmarks.report import title_of
from benchmarks.servers import OURS, SERVERS
from benchmarks.workloads import MATRIX, WORKLOADS

__all__ = ["draw"]

_OURS, _BASE, _OTHERS = "#0b6e99", "#d1782c", "#9aa5ab"
_PALE = {_OURS: "#86bcd3", _BASE: "#edc19c", _OTHERS: "#d3d9dc"}
_LINES = ["#0b6e99", "#d1782c", "#5a8f3c", "#8c5fa8", "#b5493f", "#6b6b6b", "#b59a2e", "#3f9e98", "#303030"]


def draw(results: Results, folder: Path) -> list[Path]:
    """Draw every plot that has figures, and return the files.

    :raises ImportError: without matplotlib.
    """
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    style: Any = {
        "svg.fonttype": "none",  # the text stays text: small files
        "svg.hashsalt": "sbus",  # and the same figures make the same file
        "font.family": "sans-serif",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 10,
        "figure.facecolor": "white",
    }
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    with pyplot.rc_context(style):
        for name, picture in (
            ("summary", _summary),
            ("throughput", _throughput),
            ("cpu", _cpu),
            ("growth", _growth),
            ("latency", _latency),
        ):
            figure = picture(results, pyplot)
            if figure is not None:
                path = folder / f"{name}.svg"
                figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
                pyplot.close(figure)
                files.append(path)
    return files


def _color(server: str) -> str:
    return _OURS if server in OURS else _BASE if server == BASE else _OTHERS


# --- bars -----------------------------------------------------------------------------------------


def _summary(results: Results, pyplot: Any) -> Any:
    """Draw one bar for each server: the first workload, as fast as its clients can send."""
    case = f"{MATRIX[0].name}/pipelined"
    medians = {server: results.median(server, case, "per_second") for server in results.servers if server != BASE}
    found = sorted(((value, server) for server, value in medians.items() if value is not None and server in SERVERS))
    found = [(value, server) for value, server in found if SERVERS[server].runs]
    if not found:
        return None
    whole, panel = pyplot.subplots(figsize=(6.8, 0.6 + 0.28 * len(found)))
    for place, (value, server) in enumerate(found):
        panel.barh(place, value / 1e6, 0.7, color=_color(server))
        panel.text(value / 1e6, place, f" {value / 1e6:.2f}", va="center")
    panel.set_yticks(range(len(found)), [title_of(server) for _, server in found])
    panel.set_xlabel("million messages delivered a second, one publisher, one subscriber, 64 bytes")
    whole.tight_layout()
    return whole


def _throughput(results: Results, pyplot: Any) -> Any:
    return _bars(results, pyplot, "per_second", 1e-3, "thousand messages delivered a second", results.servers)


def _cpu(results: Results, pyplot: Any) -> Any:
    servers = [server for server in results.servers if server not in SERVERS or SERVERS[server].runs]
    return _bars(results, pyplot, "cpu_us", 1, "CPU of the server, µs a message delivered", servers)


def _bars(results: Results, pyplot: Any, figure: str, scale: float, label: str, servers: list[str]) -> Any:
    """Draw a panel for each workload of the matrix, with two bars for each server."""
    workloads = [w for w in MATRIX if any(results.has(s, c.name) for s in servers for c in w.cases)]
    if not workloads:
        return None
    across = min(3, len(workloads))
    down = -(-len(workloads) // across)
    height = 0.8 + 0.26 * len(servers)
    whole, panels = pyplot.subplots(down, across, figsize=(3.2 * across, height * down), sharey=True, squeeze=False)
    flat = [panel for row in panels for panel in row]
    for panel in flat[len(workloads) :]:
        panel.set_visible(False)
    for panel, workload in zip(flat, workloads, strict=False):
        for place, server in enumerate(servers):
            for offset, mode in ((-0.2, "unbatched"), (0.2, "pipelined")):
                value = results.median(server, f"{workload.name}/{mode}", figure)
                if value is not None:
                    color = _color(server) if mode == "pipelined" else _PALE[_color(server)]
                    panel.barh(place + offset, value * scale, 0.38, color=color)
        panel.set_title(workload.title)
        panel.set_yticks(range(len(servers)), [title_of(server) for server in servers])
        panel.locator_params(axis="x", nbins=5)
    flat[0].invert_yaxis()
    whole.supxlabel(f"{label} (pale: unbatched, dark: pipelined)", fontsize=9)
    whole.tight_layout()
    return whole


# --- growth ---------------------------------------------------------------------------------------


def _growth(results: Results, pyplot: Any) -> Any:
    panels: list[tuple[str, str, str, str, Callable[[float, float], float]]] = [
        ("patterns", "patterns of 1,000 idle clients", "CPU, µs a message", "cpu_us", lambda x, y: y),
        ("clients", "idle clients", "CPU, µs a message", "cpu_us", lambda x, y: y),
        ("sizes", "bytes in a payload", "MB delivered a second", "per_second", lambda x, y: x * y / 1e6),
    ]
    measured = [panel for panel in panels if _points(results, "sbus", panel[0], panel[3])]
    if not measured:
        return None
    whole, axes = pyplot.subplots(1, len(measured), figsize=(3.4 * len(measured), 2.9), squeeze=False)
    for axis, (workload, x_label, y_label, figure, to_y) in zip(axes[0], measured, strict=True):
        for server in results.servers:
            if points := _points(results, server, workload, figure):
                xs = [x for x, _ in points]
                axis.plot(xs, [to_y(x, y) for x, y in points], "o-", ms=4, color=_color(server), label=title_of(server))
        axis.set_xscale("symlog", linthresh=100) if workload == "clients" else axis.set_xscale("log")
        axis.set_yscale("log")
        for scale in (axis.xaxis, axis.yaxis):
            scale.set_major_formatter("{x:,.10g}")
            scale.set_minor_formatter("")
        axis.set_xlabel(x_label)
        axis.set_title(y_label)
        axis.grid(alpha=0.3)
    axes[0][0].legend(frameon=False)
    whole.tight_layout()
    return whole


def _points(results: Results, server: str, workload: str, figure: str) -> list[tuple[float, float]]:
    found = [(float(c.variant), results.median(server, c.name, figure)) for c in WORKLOADS[workload].cases]
    return [(x, y) for x, y in found if y is not None]


# --- latency --------------------------------------------------------------------------------------


def _latency(results: Results, pyplot: Any) -> Any:
    """Draw quantiles of times, with the last percent stretched."""
    panels = [
        ("trip/free", "Round trip"),
        ("sparse/20000", "From one of 1,000 publishers"),
        ("load/pair", "Round trip under load"),
        ("load/pair-first", "The same, the pair first"),
    ]
    measured = [(case, title) for case, title in panels if any(results.times(s, case) for s in results.servers)]
    if not measured:
        return None
    whole, axes = pyplot.subplots(1, len(measured), figsize=(3.4 * len(measured), 3.2), squeeze=False)
    shares = [*range(100), 99.5, 99.9]
    xs = [1 / (1 - share / 100) for share in shares]
    for axis, (case, title) in zip(axes[0], measured, strict=True):
        for color, server in zip(_LINES, results.servers, strict=False):
            if times := results.times(server, case):
                width = 2 if server in OURS else 1
                axis.plot(xs, times[: len(xs)], color=color, lw=width, label=title_of(server))
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xticks([2, 10, 100, 1000], ["50 %", "90 %", "99 %", "99.9 %"])
        axis.yaxis.set_major_formatter("{x:,.10g}")
        axis.minorticks_off()
        axis.set_title(f"{title}, µs")
        axis.grid(alpha=0.3)
    lines = {line.get_label(): line for axis in axes[0] for line in axis.get_lines()}
    whole.supxlabel("share of round trips that took no longer", fontsize=9)
    whole.tight_layout()
    whole.legend(lines.values(), lines.keys(), frameon=False, loc="center left", bbox_to_anchor=(1, 0.55))
    return whole
