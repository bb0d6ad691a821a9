"""A long report from the counts of hours has the figures of one from all rows."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from click.testing import CliRunner

from sbus.cli import report as command
from sbus.cli.report import report
from sbus.errors import UsageError
from sbus.journal.digests import Digest
from sbus.journal.keytext import as_text
from sbus.lake.cube import PROGRAM, UNKNOWN
from sbus.lake.plain import PlainTable
from sbus.protocol.keys import matches_open
from sbus.report import LakeRows, measure
from sbus.report.figures import Publisher
from sbus.report.keys import key_filter
from tests.support.lakes import archive, row

HOURS = 14 * 24
END = datetime(2026, 1, 31, tzinfo=UTC) + timedelta(hours=HOURS)
START = END - timedelta(days=7)


def special(seq, hour, kind, payload, journal="one"):
    """A row that is not a message."""
    return (journal, seq, row(journal, seq, hour)[2], kind, "", payload)


class Uncounted(LakeRows):
    """A lake whose reports read its rows."""

    def counted(self, period):
        return nullcontext()


def both(table, pattern=b"", **settings):
    """The report from rows and the one from counts; payload sizes above 63 bytes are rounded in the second."""
    whole = measure(Uncounted(table), wanted=key_filter(pattern), **settings)
    found = measure(LakeRows(table), wanted=key_filter(pattern), **settings)
    assert [each.messages for each in found.sizes] == [each.messages for each in whole.sizes]
    for mine, exact in zip(found.sizes, whole.sizes, strict=True):
        assert (mine.label, mine.mean) == (exact.label, exact.mean)
        for name in ("p50", "p95", "p99", "largest"):
            # Interpolated, and then rounded to a whole byte.
            assert getattr(exact, name) / 1.032 - 1 <= getattr(mine, name) <= getattr(exact, name) + 1
    return whole, replace(found, sizes=whole.sizes)


def rounded(report):
    """The report without the last bits of its sums of rates, which depend on their order."""
    if report.changes is None:
        return report
    lists = {
        name: [
            replace(each, rate=float(f"{each.rate:.10e}"), rate_before=float(f"{each.rate_before:.10e}"))
            for each in getattr(report.changes, name)
        ]
        for name in ("prefixes", "new", "vanished", "up", "down")
    }
    return replace(report, changes=replace(report.changes, **lists))


@pytest.mark.slow
def test_counts_give_the_same_report(tmp_path):
    """Totals, traffic, top keys, silences, gaps and changes are equal; the current hour is counted from its rows."""
    table = PlainTable(tmp_path / "lake")
    rows, seq = [special(0, 0, "start", b'{"reason": "new"}')], 1
    for hour in range(0, HOURS, 6):
        for key in range(4):
            if key == 3 and hour > HOURS - 80:
                continue
            if 198 <= hour < 210:
                continue
            rows.append(row("one", seq, hour, f"plant/{key}", b"x" * (key * 11)))
            seq += 1
        if hour == 216:
            for kind, payload in (
                ("lost", b"70 7000 70 queue-full"),
                ("lost", b"? ? ? reconnect"),
                ("clock", b'{"step": -7200.0}'),
                ("damaged", b'{"rows": 3, "last": 900}'),
            ):
                rows.append(special(seq, hour, kind, payload))
                seq += 1
            rows.append((*row("one", seq, hour)[:3], "digest", "plant/0", Digest(6_220_800, "ab" * 32).pack()))
            seq += 1
        if hour == 210:
            rows.append(special(seq, hour, "reconnect", b'{"reason": "the bus"}'))
            seq += 1
    newest = [each for each in rows if each[2] >= row("one", 0, HOURS - 6)[2]]
    rows = rows[: -len(newest)]
    for batch in range(4):
        archive(table, batch, rows[batch * len(rows) // 4 : (batch + 1) * len(rows) // 4])
    archive(table, 4, newest, done=False)
    whole, found = both(table, start=START, end=END)
    assert len(list((table.state.directory / "cube").glob("*.counts.parquet"))) == HOURS // 6 - 2 - 1
    assert whole.silences
    assert whole.gaps
    assert {(loss.kind, loss.reason): (loss.number, loss.unknown) for loss in whole.losses} == {
        ("lost", "queue-full"): (70, 0),
        ("lost", "reconnect"): (0, 1),
        ("damaged", ""): (3, 0),
    }
    assert [step.step for step in whole.steps] == [-7_200_000_000]
    assert found == whole


def chances(seed, hours):
    """Two weeks of random journals: keys of one to six segments with rhythms of their own, rests, gaps and losses.

    :param hours: rows are in each of so many hours.
    """
    chance = random.Random(seed)
    rows = []
    for journal in ("one", "two", "three")[: chance.randint(1, 3)]:
        sites = [f"site-{n}" for n in range(chance.randint(2, 12))]
        keys = []
        for _ in range(60):
            parts = [chance.choice(sites), *(chance.choice("abc") for _ in range(chance.randint(0, 5)))]
            keys.append("/".join(parts) + chance.choice(["", "", "", "/", "é", "\\xff"]))
        marks = [(chance.uniform(0, HOURS), kind) for kind in chance.choices(
            ["reconnect", "lost", "damaged", "clock", "full"], k=chance.randint(0, 12))]  # fmt: skip
        lost = [(at, at + chance.uniform(1, 20)) for at, kind in marks if kind == "reconnect"]
        messages = []
        for key in set(keys):
            step = chance.choice([0.3, 1, 3, 7, 30, 200])
            begin, stop = sorted(chance.choices([0.0, 100.0, 168.0, 200.0, 300.0, float(HOURS)], k=2))
            rest = chance.uniform(0, HOURS)
            silent = (rest, rest + chance.choice([0, 0, 20, 60]))
            at = begin
            while at < stop:
                if not silent[0] <= at < silent[1] and not any(a <= at < b for a, b in lost):
                    messages.append((at, key))
                at += step * chance.choice([1, chance.expovariate(1)])
        timed = sorted([(at, "message", key) for at, key in messages] + [
            (max([b for a, b in lost if a == at], default=at), kind, "") for at, kind in marks])  # fmt: skip
        payloads = {
            "reconnect": [b'{"reason": "full"}', b"{}", b"not JSON", b"\xff"],
            "lost": [b"3 30 3 queue-full", b"? ? ? restart", b"", b"7 70 7 " + b"x" * 200],
            "damaged": [b'{"rows": 3}', b'{"rows": "four"}', b'{"rows": 3, "last": 40}'],
            "clock": [b'{"step": 60.5}', b"{}", b'{"step": "no"}'],
            "full": [b'{"reason": "disk"}'],
        }
        timed = [each for each in timed if int(each[0]) % hours == 0]
        first = timed[0][0] if timed else 0.0
        timed.insert(0, (first, "start", ""))
        payloads["start"] = [b'{"ended": "new"}', b'{"ended": "crash"}']
        if chance.random() < 0.5:
            timed.append((timed[-1][0], "stop", ""))
            payloads["stop"] = [b""]
        for seq, (at, kind, key) in enumerate(timed):
            payload = (
                bytes(chance.choice([0, 1, 8, 63, 64, 1000])) if kind == "message" else chance.choice(payloads[kind])
            )
            rows.append((journal, seq, row("", 0, 0)[2] + timedelta(hours=min(at, HOURS - 0.001)), kind, key, payload))
    return rows


@pytest.mark.parametrize(
    ("seed", "hours"),
    # Each hour with rows is a file of the lake.
    [
        (0, 12),
        *(
            pytest.param(seed, hours, marks=pytest.mark.slow)
            for seed, hours in [(1, 12), (0, 1), (1, 1), (2, 1), (3, 1)]
        ),
    ],
)
@pytest.mark.slow
def test_random_rows_give_the_same_report(tmp_path, seed, hours):
    """Whatever was recorded, the report from rows and the report from counts agree, with a pattern too."""
    table = PlainTable(tmp_path / "lake")
    rows = chances(seed, hours)
    publishers = (None, (1000, 100, 42, 17, None), (1001, 100, 43, 18, None), (None, None, None, 0, None))
    for batch, sender in enumerate(publishers[: seed + 1]):
        archive(table, batch, rows[batch :: seed + 1], sender=sender)
    patterns = (b"", b"site-*/a/", b"site-1")
    whole, found = both(table, patterns[seed % 3], start=START, end=END, top=50)
    whole, found = rounded(whole), rounded(found)
    assert found == whole
    # Files of one publisher alone, who is not known, give no section.
    assert sum(each.messages for each in found.publishers) == (found.totals.messages if seed else 0)


def test_who_publishes_what(tmp_path):
    """The messages of each user, with their busiest prefixes, from files of before publishers were recorded, too."""
    table = PlainTable(tmp_path / "lake")
    archive(table, 0, [row("one", seq, HOURS - 1 - seq % 3, "old/x") for seq in range(2)])
    for batch, (count, key, sender) in enumerate(
        (
            (5, "plant/a", (1000, 100, 42, 17, None)),
            (4, "plant/b", (1000, 100, 43, 18, "!/cred/0/0/4711")),
            (3, "hall/a", (1000, 100, 42, 17, None)),
            (3, "hall/b", (1001, 100, 44, 19, None)),
            (1, "hall/c", (None, None, None, 0, None)),
        ),
        start=1,
    ):
        archive(table, batch, [row("one", 10 * batch + n, HOURS - 1, key, b"xx") for n in range(count)], sender=sender)
    found = measure(LakeRows(table), start=START, end=END, depth=2)
    limited = measure(LakeRows(table), start=START, end=END, depth=1, top=1)
    assert found.publishers == [
        Publisher(1000, 12, 24, 3, [("plant/a", 5), ("plant/b", 4), ("hall/a", 3)]),
        Publisher(1001, 3, 6, 1, [("hall/b", 3)]),
        Publisher(UNKNOWN, 2, 2, 1, [("old/x", 2)]),
        Publisher(PROGRAM, 1, 2, 1, [("hall/c", 1)]),
    ]
    assert limited.publishers == [Publisher(1000, 12, 24, 3, [("plant/", 9), ("hall/", 3)])]
    assert limited.publisher_count == 4


@pytest.fixture(scope="module")
def plant(tmp_path_factory):
    """A lake with a message of each of four keys in every sixth hour of two weeks."""
    table = PlainTable(tmp_path_factory.mktemp("plant") / "lake")
    archive(table, 0, [row("one", seq, seq // 4 * 6, f"plant/{seq % 4}") for seq in range(4 * HOURS // 6)])
    return table.location


def test_the_command_writes_metrics(plant, tmp_path):
    """The command reports on a week, with the metrics of a job."""
    page, metrics = tmp_path / "report.html", tmp_path / "metrics"
    arguments = [f"--lake={plant}", "--last=7d", f"--output={page}", f"--metrics-file={metrics}"]
    result = CliRunner().invoke(report, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    # The last window is whole, and so is the first.
    assert f"{4 * (7 * 4 + 1)} messages of 4 keys" in result.output
    assert "plant/3" in page.read_text()
    assert f'sbus_job_success{{job="report",lake="{plant}"}} 1.0' in metrics.read_text()


def test_the_start_alone_names_the_hours(plant, tmp_path, monkeypatch):
    """With --since alone, a report has all hours from then on, and as many before them to compare with."""
    seen = []
    monkeypatch.setattr(command, "run_alerts", lambda alerts, found: seen.append(found))
    arguments = [f"--lake={plant}", f"--since={START:%Y-%m-%d}", f"--output={tmp_path / 'report.html'}"]
    result = CliRunner().invoke(report, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    # The period ends with the last message, five hours early, so the one before begins five hours late.
    assert (seen[0].totals.messages, seen[0].before.messages) == (4 * 7 * 4, 4 * (7 * 4 - 1))


def test_a_pattern_selects_the_same_keys_in_python():
    """The condition for Python matches as the bus does, also bytes that are no text."""
    keys = [b"a/b", b"a/b/c", b"a", b"a/", "ä/b".encode(), b"\xff/b", b"a\\/b"]
    for pattern in (b"a/", b"*/b", b"a/*/c", b"a*/b", "ä/".encode()):
        matches = key_filter(pattern)
        assert matches is not None
        assert [matches(as_text(key)) for key in keys] == [matches_open(pattern, key) for key in keys]
    assert key_filter(b"") is None
    with pytest.raises(UsageError):
        key_filter(b"\xff")
