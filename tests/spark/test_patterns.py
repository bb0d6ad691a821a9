"""Spark selects keys by patterns as the bus does."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import functions as F

from sbus.errors import UsageError
from sbus.journal.keytext import as_text
from sbus.protocol.keys import matches_open
from sbus.spark.jobs.tables import key_matches


def test_patterns_match_as_the_bus_does(spark: Any) -> None:
    """The condition on text matches the same keys as the rules of the bus on bytes."""
    keys = [b"", b"a", b"a/", b"a/b", b"a/bc", b"a/b/c", b"a/b/c/", b"a/b/c/d", b"a/\n/c", b"x.y", b"a\\b/c", b"\xff/b",
            "é/b".encode(), b"a*", b"a/*", b"axx", b"/", b"/a", b"\\E/b", b"a//c"]  # fmt: skip
    patterns = [b"", b"a", b"a/", b"*", b"*/", b"a*", b"a/*", b"a/b*", b"a/*/c", b"a/*/c/", b"a/*b", b"x.*", b"a\\*/c",
                "é*/b".encode(), b"/", b"*/b", b"a**", b"\\E/", b"**/b", b"x?y"]  # fmt: skip
    text = spark.createDataFrame([(as_text(key),) for key in keys], "key string")
    found = text.select([F.collect_list(F.when(key_matches(p), F.col("key"))) for p in patterns]).collect()[0]
    for pattern, matched in zip(patterns, found, strict=True):
        assert sorted(matched) == sorted(as_text(key) for key in keys if matches_open(pattern, key)), pattern
    with pytest.raises(UsageError, match="secret"):
        key_matches("!/cred////x")
    with pytest.raises(UsageError, match="not text"):
        key_matches(b"\xc3*")
