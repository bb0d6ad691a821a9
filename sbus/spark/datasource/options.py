"""The options of the data source, checked as soon as they are seen: a misspelt one must not be ignored.

Spark tells nobody which options a source knows, and hands over all of them in lower case.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NoReturn

from sbus.client.connecting import find_address
from sbus.client.core import find_dialect
from sbus.errors import UsageError, Violation
from sbus.journal.keytext import from_text
from sbus.protocol.keys import CURRENT, Dialect
from sbus.protocol.packets import DEFAULT_MAX_PACKET

__all__ = ["EARLIEST", "LATEST", "ReadOptions", "StreamOptions", "WriteOptions"]

EARLIEST = "earliest"
LATEST = "latest"

_READ = ("journal", "pattern", "gaps", "rawKeys", "dialect", "partitionBytes")
_BATCH = ("since", "until")
_STREAM = ("startingOffsets", "maxRowsPerTrigger", "maxBytesPerTrigger", "failOnDataLoss")
_WRITE = ("socket", "dialect", "maxPacket")
_FOREIGN = frozenset({"checkpointlocation"})
"""Options that Spark takes for itself and hands on."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What is read, in a batch or a stream.

    :ivar journals: paths and globs.
    :ivar pattern: messages whose keys it does not match are left out; None: none are.
    :ivar gaps: whether rows that are not messages are read.
    :ivar raw_keys: whether keys come as bytes instead of text.
    :ivar dialect: whose rules of matching hold.
    :ivar partition_bytes: about how much of a journal one task reads; None: by what there is to do.
    :ivar since: rows before it are left out (µs since 1970, UTC); None: none are.
    :ivar until: this one, and what comes after it, is left out; None: nothing is.
    """

    journals: tuple[str, ...]
    pattern: bytes | None = None
    gaps: bool = True
    raw_keys: bool = False
    dialect: Dialect = CURRENT
    partition_bytes: int | None = None
    since: int | None = None
    until: int | None = None

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> ReadOptions:
        """From the options of a read that is no stream.

        :raises sbus.errors.UsageError: for one that is wrong or unknown; it says what is right.
        """
        given = _Given(options, "read", _READ + _BATCH)
        for name in _STREAM:
            if name.lower() in given.options:
                given.refuse(name, "this is for streams (readStream); here, there are since and until")
        given.end()
        return cls._of(given)

    @classmethod
    def parse_any(cls, options: Mapping[str, str]) -> ReadOptions:
        """From the options of a read of which it is not known yet whether it is a stream.

        :raises sbus.errors.UsageError: for one that is wrong or unknown; it says what is right.
        """
        given = _Given(options, "read", _READ + _BATCH + _STREAM)
        given.end()
        return cls._of(given)

    @classmethod
    def _of(cls, given: _Given) -> ReadOptions:
        parts = given.options.get("journal", "").replace("\n", ",").split(",")
        journals = tuple(path for path in map(str.strip, parts) if path)
        if not journals:
            given.refuse("journal", "name the directory that the recorder writes to, several with commas, or a glob")
        dialect = given.dialect()
        pattern = given.pattern("pattern", dialect)
        return cls(
            journals=journals,
            pattern=pattern,
            gaps=given.flag("gaps", pattern is None),
            raw_keys=given.flag("rawKeys", False),
            dialect=dialect,
            partition_bytes=given.number("partitionBytes"),
            since=given.time("since"),
            until=given.time("until"),
        )


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """How a stream reads.

    :ivar read: what.
    :ivar start: where it starts in a journal that it has not read from yet: `EARLIEST`, `LATEST` or a time
        (µs since 1970, UTC).
    :ivar max_rows: at most so many rows a trigger.
    :ivar max_bytes: about so many bytes of the journals a trigger.
    :ivar fail_on_data_loss: whether rows that are gone before they were read are an error.
    """

    read: ReadOptions
    start: str | int = EARLIEST
    max_rows: int | None = None
    max_bytes: int | None = None
    fail_on_data_loss: bool = True

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> StreamOptions:
        """From the options of a stream.

        :raises sbus.errors.UsageError: for one that is wrong or unknown; it says what is right.
        """
        given = _Given(options, "stream", _READ + _STREAM)
        given.end()
        return cls(
            read=ReadOptions._of(given),
            start=given.start("startingOffsets"),
            max_rows=given.number("maxRowsPerTrigger"),
            max_bytes=given.number("maxBytesPerTrigger"),
            fail_on_data_loss=given.flag("failOnDataLoss", True),
        )


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Which bus is published to.

    :ivar address: where it is.
    :ivar dialect: the revision of the protocol that it speaks.
    :ivar max_packet: bytes in the longest packet that it takes.
    """

    address: str
    dialect: str = CURRENT.name
    max_packet: int = DEFAULT_MAX_PACKET

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> WriteOptions:
        """From the options of a write.

        :raises sbus.errors.UsageError: for one that is wrong or unknown; it says what is right.
        """
        given = _Given(options, "write", _WRITE)
        given.end()
        return cls(
            address=find_address(given.options.get("socket")),
            dialect=given.dialect().name,
            max_packet=given.number("maxPacket") or DEFAULT_MAX_PACKET,
        )


class _Given:
    """The options as they were given, and what to say of those that are wrong.

    :param purpose: what they are for, to be told.
    :param names: the options that there are.
    """

    def __init__(self, options: Mapping[str, str], purpose: str, names: tuple[str, ...]) -> None:
        self.options = {name.lower(): value for name, value in options.items()}
        self.purpose = purpose
        self.names = {name.lower(): name for name in names}

    def refuse(self, name: str, advice: str) -> NoReturn:
        value = self.options.get(name.lower())
        shown = f"the option {name}" + ("" if value is None else f"={value!r}")
        raise UsageError(f"format('sbus'): {shown}: {advice}")

    def end(self) -> None:
        """Refuse what is unknown."""
        for name in sorted(self.options.keys() - self.names.keys() - _FOREIGN):
            close = difflib.get_close_matches(name, self.names, 1)
            meant = f"; {self.names[close[0]]} is meant, perhaps" if close else ""
            if name in ("path", "paths"):
                meant = "; use .option('journal', …).load() instead of load(path)" if "journal" in self.names else ""
            known = ", ".join(self.names.values())
            raise UsageError(
                f"format('sbus'): there is no option {name!r} to {self.purpose} with{meant}; there are: {known}"
            )

    def flag(self, name: str, default: bool) -> bool:
        value = self.options.get(name.lower())
        if value is None:
            return default
        if value.lower() not in ("true", "false"):
            self.refuse(name, "say true or false")
        return value.lower() == "true"

    def number(self, name: str) -> int | None:
        value = self.options.get(name.lower())
        if value is None:
            return None
        if not value.isascii() or not value.isdecimal() or int(value) < 1:
            self.refuse(name, "say a whole number, 1 or more")
        return int(value)

    def dialect(self) -> Dialect:
        try:
            return find_dialect(self.options.get("dialect", CURRENT.name))
        except UsageError:
            self.refuse("dialect", "say 'current' or 'early'")

    def pattern(self, name: str, dialect: Dialect) -> bytes | None:
        value = self.options.get(name.lower())
        if value is None:
            return None
        try:
            pattern = from_text(value)
            secret = dialect.check(pattern)
        except (UsageError, Violation) as e:
            self.refuse(name, str(e))
        if secret:
            self.refuse(name, "secret messages are never recorded, so there is nothing to read")
        return pattern

    def start(self, name: str) -> str | int:
        value = self.options.get(name.lower(), EARLIEST)
        if value.lower() in (EARLIEST, LATEST):
            return value.lower()
        return self._moment(name, value, f"{EARLIEST}, {LATEST} or ")

    def time(self, name: str) -> int | None:
        value = self.options.get(name.lower())
        return None if value is None else self._moment(name, value)

    def _moment(self, name: str, value: str, others: str = "") -> int:
        try:
            time = datetime.fromisoformat(value)
        except ValueError:
            self.refuse(name, f"say {others}a time such as 2026-01-31T12:00:00Z (by default UTC)")
        if time.tzinfo is None:
            time = time.replace(tzinfo=UTC)
        seconds = int(time.replace(microsecond=0).timestamp())
        return seconds * 1_000_000 + time.microsecond
