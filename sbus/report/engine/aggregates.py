"""The sums of a report by window, prefix, key, size and publisher: queries on its database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sbus.lake.cube import UNKNOWN
from sbus.report.engine.sizes import sizes_of
from sbus.report.engine.store import Database
from sbus.report.engine.windows import MAX_DEPTH, MAX_LABELS, Windows, choose_depth, traffic_of
from sbus.report.figures import Publisher, Sizes, Totals, Traffic

__all__ = ["Aggregates"]

_MAX_PREFIXES = 3
"""The most prefixes of each publisher."""


class Aggregates:
    """Asks a database that has its tables from `sbus.report.engine.store` and `sbus.report.engine.changes`."""

    def __init__(self, database: Database, windows: Windows) -> None:
        self._database = database
        self._windows = windows

    def messages(self) -> int:
        """Return the number of the period's messages, of all keys."""
        [(number,)] = self._database.execute("SELECT coalesce(sum(n), 0)::BIGINT FROM sent WHERE now").fetchall()
        return int(number)

    def totals(self, recorded: tuple[int, int]) -> tuple[Totals, Totals]:
        """Return the totals of the period before and of this one.

        :param recorded: the µs of each in which at least one journal was written.
        """
        [(n, n_before, *rest)] = self._database.execute(
            "SELECT coalesce(sum(n), 0)::BIGINT, coalesce(sum(n_before), 0)::BIGINT, "
            "coalesce(sum(keys.bytes), 0)::BIGINT, coalesce(sum(bytes_before), 0)::BIGINT, "
            "count(*) FILTER (n > 0), count(*) FILTER (n_before > 0), "
            "coalesce(fsum(rate), 0), coalesce(fsum(rate_before), 0), "
            "coalesce(fsum(byte_rate), 0), coalesce(fsum(byte_rate_before), 0) "
            "FROM rated JOIN keys USING (id, n, n_before)"
        ).fetchall()
        size, size_before, keys, keys_before, rate, rate_before, byte_rate, byte_rate_before = rest
        return (
            Totals(n_before, size_before, keys_before, recorded[0], rate_before, byte_rate_before),
            Totals(n, size, keys, recorded[1], rate, byte_rate),
        )

    def appeared(self) -> tuple[int, int]:
        """Return the numbers of new and of vanished keys."""
        [counts] = self._database.execute(
            "SELECT count(*) FILTER (n_before = 0 AND was_heard), count(*) FILTER (n = 0 AND is_heard) FROM rated"
        ).fetchall()
        return counts[0], counts[1]

    def depth(self) -> int:
        """Choose the number of segments of a prefix."""
        found = self._database.execute(
            "SELECT depth, count(*), max(n) / sum(n)::DOUBLE FROM ("
            "  SELECT depth, shortened(key, depth) AS prefix, sum(n)::BIGINT AS n "
            "  FROM keys, (SELECT unnest(range(1, ? + 1)) AS depth) WHERE n > 0 GROUP BY ALL"
            ") GROUP BY depth",
            [MAX_DEPTH],
        )
        return choose_depth(found.fetchall())

    def busiest(self, depth: int) -> Sequence[tuple[str, int]]:
        """Return the prefixes of the period with the most messages, at most `MAX_LABELS`, and these."""
        return self._database.execute(
            "SELECT shortened(key, ?) AS prefix, sum(n)::BIGINT AS total FROM keys WHERE n > 0 GROUP BY prefix "
            f"ORDER BY total DESC, prefix LIMIT {MAX_LABELS}",
            [depth],
        ).fetchall()

    def traffic(self, depth: int, labels: Sequence[str], *, has_before: bool) -> Traffic:
        """Sum messages and bytes by window and label."""
        self._label(depth, labels)
        found = self._database.execute(
            "SELECT now, number, CASE WHEN now THEN label END AS label, sum(n)::BIGINT, sum(bytes)::BIGINT "
            "FROM cube JOIN labelled USING (id) GROUP BY ALL"
        )
        return traffic_of(found.fetchall(), self._windows, labels, has_before=has_before)

    def _label(self, depth: int, labels: Sequence[str]) -> None:
        """Give each key its prefix, if that is one of the labels, or else null."""
        self._database.execute(
            "CREATE OR REPLACE TABLE labelled AS "
            "SELECT id, key, CASE WHEN prefix IN (SELECT unnest($labels::VARCHAR[])) THEN prefix END AS label "
            "FROM (SELECT id, key, shortened(key, $depth) AS prefix FROM keys)",
            {"labels": list(labels), "depth": depth},
        )

    def top(self, order: str, top: int) -> list[tuple[str, int, int, float]]:
        """Return the keys with the most ``n`` or ``bytes``: (key, messages, bytes, messages per second)."""
        return self._database.execute(
            "SELECT key, n, bytes, rate FROM keys JOIN rated USING (id, key, n) "
            f"WHERE n > 0 ORDER BY {order} DESC, key LIMIT ?",
            [top],
        ).fetchall()

    def shapes(self, scopes: Sequence[tuple[str, bool]]) -> Mapping[tuple[str, bool], list[int]]:
        """Return the messages per window of each key or prefix: (text, whether it is a prefix)."""
        counts = {scope: [0] * self._windows.count for scope in scopes}
        names = list(counts)
        found = self._database.execute(
            "SELECT scope, number, sum(n)::BIGINT FROM cube JOIN ("
            "  SELECT id, scope FROM keys, ("
            "    SELECT unnest(range(len($texts))) AS scope, unnest($texts::VARCHAR[]) AS text, "
            "    unnest($prefixes::BOOLEAN[]) AS is_prefix"
            "  ) WHERE CASE WHEN is_prefix THEN starts_with(key, text) ELSE key = text END"
            ") USING (id) WHERE now GROUP BY ALL",
            {"texts": [text for text, _ in names], "prefixes": [is_prefix for _, is_prefix in names]},
        )
        for scope, number, n in found.fetchall():
            counts[names[scope]][min(number, self._windows.count - 1)] += n
        return counts

    def sizes(self, depth: int, labels: Sequence[str]) -> tuple[list[Sizes], list[tuple[int, int, int]]]:
        """Return the payload sizes of all messages of the period and of each label, and a histogram."""
        self._label(depth, labels)
        found = self._database.execute(
            "SELECT label, size, sum(n)::BIGINT, sum(bytes)::BIGINT "
            "FROM sent JOIN labelled USING (id) WHERE now GROUP BY ALL"
        )
        return sizes_of(found.fetchall(), labels)

    def publishers(self, depth: int, top: int) -> tuple[list[Publisher], int]:
        """Return the users with the most messages, and how many there are; none if no publisher is known."""
        self._database.execute(
            "CREATE TABLE published AS SELECT publisher, name AS key, n, bytes FROM names JOIN ("
            "  SELECT publisher, id, sum(n)::BIGINT AS n, sum(bytes)::BIGINT AS bytes FROM sent WHERE now GROUP BY ALL"
            ") USING (id)"
        )
        users = self._database.execute(
            "SELECT publisher, sum(n)::BIGINT, sum(bytes)::BIGINT, count(*) FROM published GROUP BY publisher"
        ).fetchall()
        prefixes = self._database.execute(
            "SELECT publisher, prefix, n FROM ("
            "  SELECT publisher, shortened(key, $depth) AS prefix, sum(n)::BIGINT AS n, "
            "  row_number() OVER (PARTITION BY publisher ORDER BY sum(n) DESC, prefix) AS rank "
            "  FROM published GROUP BY publisher, prefix"
            ") WHERE rank <= $most ORDER BY publisher, rank",
            {"depth": depth, "most": _MAX_PREFIXES},
        ).fetchall()
        if all(uid == UNKNOWN for uid, *_ in users):
            return [], 0
        named: dict[int, list[tuple[str, int]]] = {}
        for uid, text, n in prefixes:
            named.setdefault(uid, []).append((text, n))
        found = [Publisher(uid, n, size, keys, named[uid]) for uid, n, size, keys in users]
        found.sort(key=lambda each: (-each.messages, each.uid))
        return found[:top], len(found)
