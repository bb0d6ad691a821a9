"""The alert rules and the dashboard: each names figures that exist, and each rule fires when it should."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sbus.admin.pages import Asked
from sbus.cli.job_metrics import ArchiveMetrics, JobMetrics
from sbus.queue.jobs import JobQueue, Settings
from sbus.queue.metrics import families as queue_families
from sbus.queue.service import QueueService
from sbus.recorder.metrics import families
from sbus.recorder.pipeline import Counters
from sbus.recorder.service import RecorderService
from sbus.server.asks.last_values import LastValueRule
from sbus.server.ops.admin_pages import pages
from tests.support.buses import Bus

ROOT = Path(__file__).parents[3]
MONITORING = ROOT / "docs" / "examples" / "monitoring"

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def rules() -> Iterator[dict[str, str]]:
    """Yield the rules of the file: their names, expressions, and what else stands in a line."""
    found: dict[str, str] = {}
    for line in (MONITORING / "alerts.yml").read_text().splitlines():
        match = re.fullmatch(r"""\s+(?:- )?(\w+): ['"]?(.*?)['"]?""", line)
        if match and match[1] == "alert" and found:
            yield found
            found = {}
        if match and match[1] != "name":
            found[match[1]] = match[2]
    yield found


RULES = {rule["alert"]: rule for rule in rules()}


def samples(text: str) -> Samples:
    """Return the figures of one bus, without the label that tells it from others."""
    return {
        (
            sample.name,
            frozenset((label, value) for label, value in sample.labels.items() if label != "bus"),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def recorded() -> Samples:
    """Return the figures of a bus that works, of its recorder, of a queue, of an archive, and of a job."""
    bus = Bus(last_values=(LastValueRule(b"kept"),))
    reader, publisher = bus.connect(), bus.connect()
    reader.send(b"SUB k")
    publisher.send(*[b"MSG k\0x"] * 100)
    reader.drain()
    bus.registry.attached["recorder"] = lambda: True
    bus.registry.upstream.has_link = True
    page, _ = pages(bus.registry)["GET", "/metrics"]
    found = samples("".join(piece or "" for piece in page(Asked({}))))

    class Recorder:
        counters = Counters(rows=100, synced_at=NOW - 30)

    from sbus.daemon.metrics_file import text_of

    found |= samples("".join(map(text_of, families(cast(RecorderService, Recorder())))))
    queue = SimpleNamespace(settings=SimpleNamespace(name="jobs"), problem="", jobs=JobQueue(Settings()))
    found |= samples("".join(map(text_of, queue_families([cast(QueueService, queue)]))))
    archive: Any = SimpleNamespace(rows=9, batches=1, lost=0, upkeep=None, lag=100, damaged=[], done_at=NOW - 30)
    found |= samples("".join(map(text_of, ArchiveMetrics(None, {}).figures(archive, is_up=True))))
    found["sbus_archive_checked_timestamp_seconds", frozenset()] = NOW - 10
    found |= samples("".join(map(text_of, JobMetrics("report", None, {}).figures(True, 1.0))))
    found["up", frozenset({("job", "sbus")})] = 1
    return found


NOW = 1_800_000_000.0


class Figures:
    """Two scrapes, five minutes apart, and the part of PromQL that the rules use."""

    SPAN = 300.0

    def __init__(self, before: Samples, after: Samples) -> None:
        self.before, self.after = before, after

    def total(self, which: Samples, name: str, selector: str) -> float:
        wanted = re.findall(r'(\w+)(=~|!=|=)"([^"]*)"', selector)
        found = 0.0
        is_there = False
        for (sample, labels), value in which.items():
            if sample != name:
                continue
            of = dict(labels)
            if all(self.fits(of.get(label, ""), operator, text) for label, operator, text in wanted if label != "job"):
                found += value
                is_there = True
        assert is_there, f"there is no {name}{selector}"
        return found

    @staticmethod
    def fits(value: str, operator: str, text: str) -> bool:
        if operator == "=~":
            return re.fullmatch(text, value) is not None
        return (value == text) is (operator == "=")

    def fires(self, expression: str) -> bool:
        """Return whether an expression has a value."""
        metric = r"(?!and\b)([a-z_]{2,})((?:\{[^}]*\})?)"
        text = re.sub(r"sum by \([^)]*\)|sum", "", expression)
        text = re.sub(
            rf"rate\({metric}\[\d+m\]\)",
            lambda m: repr((self.total(self.after, m[1], m[2]) - self.total(self.before, m[1], m[2])) / self.SPAN),
            text,
        )
        text = text.replace("time()", repr(NOW))
        text = re.sub(rf"\b{metric}", lambda m: repr(self.total(self.after, m[1], m[2])), text)
        assert re.fullmatch(r"([-+*/().<>=0-9e ]|and)+", text), text
        return bool(eval(text))


CASES: dict[str, dict[tuple[str, str], float]] = {
    "SbusDown": {("up", ""): -1},
    "SbusDropsMessages": {("sbus_dropped_messages_total", "discard"): 10},
    "SbusReceiversLag": {("sbus_clients_lagging", ""): 1},
    "SbusQueuesNearLimit": {("sbus_queue_bytes", ""): 200 << 20},
    "SbusMemoryNearLimit": {("sbus_memory_bytes", ""): 1 << 50},
    "SbusPublishersHeld": {("sbus_publishers_held_seconds_total", ""): 100},
    "SbusClientsThrownOut": {("sbus_clients_disconnected_total", "out-of-memory"): 1},
    "SbusClientsNearLimit": {("sbus_clients", ""): 16_000},
    "SbusRefusesConnections": {("sbus_clients_refused_total", "too-many-clients"): 1},
    "SbusUserAtLimit": {("sbus_users_at_limit", "patterns"): 1},
    "SbusViolations": {("sbus_violations_total", "unknown-verb"): 1},
    "SbusDenies": {("sbus_denied_total", "secret"): 1},
    "SbusReconnecting": {("sbus_clients_connected_total", ""): 10_000},
    "SbusBusy": {("process_cpu_seconds_total", ""): 290},
    "SbusLooksUpKeys": {("sbus_route_cache_misses_total", ""): 1000},
    "SbusNobodyListens": {("sbus_unrouted_messages_total", ""): 1000},
    "SbusDescriptorsNearLimit": {("process_open_fds", ""): 1 << 40},
    "SbusAttachedProgramGone": {("sbus_attached_up", "recorder"): -1},
    "SbusLinkLosesMessages": {("sbus_link_lost_messages_total", "up"): 1},
    "SbusRecorderBehind": {("sbus_recorder_last_sync_timestamp_seconds", ""): -1000},
    "SbusRecorderLosesMessages": {("sbus_recorder_lost_messages_total", ""): 1},
    "SbusQueueRefuses": {("sbus_queue_disk_ok", ""): -1},
    "SbusJobsDie": {("sbus_queue_dead_total", ""): 1},
    "SbusArchiveStopped": {("sbus_archive_checked_timestamp_seconds", ""): -1000},
    "SbusArchiveBehind": {("sbus_archive_last_batch_timestamp_seconds", ""): -1000},
    "SbusArchiveTooSlow": {("sbus_archive_lag_rows", ""): 10_000_000},
    "SbusArchiveLosesRows": {("sbus_archive_lost_rows_total", ""): 1},
    "SbusArchiveWaitsForRepair": {("sbus_archive_damaged_journals", ""): 1},
    "SbusArchiveDoesNotCompact": {("sbus_archive_compaction_failures_total", ""): 1},
    "SbusJobFailed": {("sbus_job_success", "report"): -1},
}
"""What each alert is about: the figures that have risen in five minutes, by name and label."""


@pytest.fixture(scope="module")
def healthy() -> Samples:
    found = recorded()
    found.setdefault(("process_open_fds", frozenset()), 10.0)  # Linux says so from 6.2 on
    return found


def after(before: Samples, changes: dict[tuple[str, str], float]) -> Samples:
    """Return the figures five minutes later."""
    found = dict(before)
    found["sbus_published_messages_total", frozenset()] += 1000
    for (name, label), more in changes.items():
        (at,) = [key for key in found if key[0] == name and (not label or label in dict(key[1]).values())]
        found[at] += more
    return found


def test_each_rule_has_a_case() -> None:
    """Every alert is tested."""
    assert list(RULES) == list(CASES)


@pytest.mark.parametrize("name", CASES)
def test_rule(healthy: Samples, name: str) -> None:
    """A rule is silent on a bus that works, and fires when its figures rise."""
    expression = RULES[name]["expr"]
    assert not Figures(healthy, after(healthy, {})).fires(expression)
    assert Figures(healthy, after(healthy, CASES[name])).fires(expression)


def test_each_alert_is_explained() -> None:
    """The page on operations has a section for each alert, in the order of the file."""
    page = (ROOT / "docs" / "operations.rst").read_text()
    assert re.findall(r"^``(Sbus\w+)``$", page, re.MULTILINE) == list(RULES)


def test_promtool() -> None:
    """Prometheus's own tool accepts the rules."""
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not installed")
    subprocess.run([tool, "check", "rules", MONITORING / "alerts.yml"], check=True, timeout=60)


def test_the_dashboard(healthy: Samples) -> None:
    """Each panel of the dashboard asks for figures that exist."""
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    names = {name for name, _ in healthy}
    asked: set[str] = set()
    for panel in dashboard["panels"]:
        targets: list[dict[str, Any]] = panel["targets"]
        for target in targets:
            asked |= set(re.findall(r"\b((?:sbus|process)_[a-z_]+)", target["expr"]))
    assert len(asked) > 25
    assert asked <= names
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)
