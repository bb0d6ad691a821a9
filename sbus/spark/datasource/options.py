"""The options of the data source.

They are checked as soon as Spark hands them over, so that a misspelt one is an error.

Spark does not know the options of a source, and hands over their names in lower case.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from sbus.client.connecting import find_address
from sbus.daemon.moments import moment
from sbus.daemon.values import duration
from sbus.errors import UsageError
from sbus.journal.clock import from_datetime
from sbus.journal.consumers import check_name
from sbus.journal.keytext import from_text
from sbus.journal.layout import is_journal
from sbus.protocol.keys import CURRENT, Dialect, find_dialect
from sbus.protocol.packets import DEFAULT_MAX_PACKET
from sbus.protocol.recorded import check_recorded
from sbus.spark.datasource.payloads import FORMATS
from sbus.spark.datasource.positions import EARLIEST, FROM_THE_FIRST, LATEST, TO_THE_LAST, Positions

__all__ = ["EARLIEST", "LATEST", "ReadOptions", "StreamOptions", "WriteOptions"]

_READ = (
    "journal",
    "pattern",
    "gaps",
    "rawKeys",
    "senders",
    "dialect",
    "partitionBytes",
    "parallelism",
    "startingOffsets",
    "payloadFormat",
    "payloadSchema",
)
_BATCH = ("since", "until", "endingOffsets")
_STREAM = ("maxRowsPerTrigger", "maxBytesPerTrigger", "maxTriggerDelay", "failOnDataLoss", "consumer")
_WRITE = ("socket", "id", "dialect", "maxPacket")
_SPARK_OPTIONS = frozenset({"checkpointlocation", "queryname"})
"""Options that Spark uses itself and hands on."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The rows that a table or a stream reads, and the form they come in.

    :ivar journals: paths and globs.
    :ivar pattern: read only the messages whose keys it matches; None: all messages.
    :ivar gaps: whether to read the rows that are not messages.
    :ivar raw_keys: whether keys come as bytes instead of text.
    :ivar senders: whether a read without a schema has the columns of publishers.
    :ivar dialect: the rules by which the pattern matches.
    :ivar partition_bytes: about how many bytes of journals one task reads; None: the scan decides.
    :ivar parallelism: the tasks that Spark runs at a time; None: as many as this machine has processors.
    :ivar since: leave out the rows before this time (µs since the epoch); None: no limit.
    :ivar until: leave out the rows at or after this time (µs since the epoch); None: no limit.
    :ivar start: where reading starts; of a stream, in a journal that the checkpoint does not know.
    :ivar end: where reading ends; a stream has no end.
    :ivar payload_format: what payloads are parsed as (`sbus.spark.datasource.payloads`); None: they are not.
    :ivar payload_schema: the fields of the values, in Spark's DDL; None: the schema of the read has the type.
    """

    journals: tuple[str, ...]
    pattern: bytes | None = None
    gaps: bool = True
    raw_keys: bool = False
    senders: bool = False
    dialect: Dialect = CURRENT
    partition_bytes: int | None = None
    parallelism: int | None = None
    since: int | None = None
    until: int | None = None
    start: Positions = FROM_THE_FIRST
    end: Positions = TO_THE_LAST
    payload_format: str | None = None
    payload_schema: str | None = None

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> ReadOptions:
        """Check the options of a table.

        :raises sbus.errors.UsageError: if an option is wrong or unknown; the text names the remedy.
        """
        given = _OptionReader(options, "read", _READ + _BATCH)
        for name in _STREAM:
            if name.lower() in given.options:
                given.refuse(name, "this is for streams (readStream); for a table use since, until and endingOffsets")
        given.refuse_unknown()
        return cls._of(given)

    @classmethod
    def parse_any(cls, options: Mapping[str, str]) -> ReadOptions:
        """Check the options of a read that may become a table or a stream.

        :raises sbus.errors.UsageError: if an option is wrong or unknown; the text names the remedy.
        """
        given = _OptionReader(options, "read", _READ + _BATCH + _STREAM)
        given.refuse_unknown()
        return cls._of(given)

    @classmethod
    def _of(cls, given: _OptionReader) -> ReadOptions:
        journals = given.journals()
        dialect = given.dialect()
        pattern = given.pattern("pattern", dialect)
        return cls(
            journals=journals,
            pattern=pattern,
            gaps=given.flag("gaps", pattern is None),
            raw_keys=given.flag("rawKeys", False),
            senders=given.flag("senders", False),
            dialect=dialect,
            partition_bytes=given.number("partitionBytes"),
            parallelism=given.number("parallelism"),
            since=given.time("since"),
            until=given.time("until"),
            start=given.positions("startingOffsets", EARLIEST),
            end=given.positions("endingOffsets", LATEST),
            **given.payload(),
        )


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """The journals that a stream reads, where it starts, and how much it takes at a time.

    :ivar read: the rows and their form.
    :ivar max_rows: the largest number of rows in a batch; None: no limit.
    :ivar max_bytes: about the largest number of bytes of journals in a batch; None: no limit.
    :ivar fail_on_data_loss: whether it is an error if rows were deleted before the stream has read them, or are
        damaged.
    :ivar max_delay: the seconds after a batch from which on the next one starts with whatever is there; before that, it
        starts only if it is as large as it may be. None: a batch starts at each trigger that finds rows.
    :ivar consumer: the name under which retention waits for the stream; None: it does not wait.
    """

    read: ReadOptions
    max_rows: int | None = None
    max_bytes: int | None = None
    fail_on_data_loss: bool = True
    max_delay: float | None = None
    consumer: str | None = None

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> StreamOptions:
        """Check the options of a stream.

        :raises sbus.errors.UsageError: if an option is wrong or unknown; the text names the remedy.
        """
        given = _OptionReader(options, "stream", _READ + _STREAM)
        given.refuse_unknown()
        return cls(
            read=ReadOptions._of(given),
            max_rows=given.number("maxRowsPerTrigger"),
            max_bytes=given.number("maxBytesPerTrigger"),
            max_delay=given.duration("maxTriggerDelay"),
            fail_on_data_loss=given.flag("failOnDataLoss", True),
            consumer=given.consumer(),
        )


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """The bus to publish to.

    :ivar address: where it listens.
    :ivar id: the column whose text becomes the last segment of the key; None: there is none.
    :ivar dialect: the revision of the protocol that it speaks.
    :ivar max_packet: the bytes in the longest packet that it accepts.
    """

    address: str
    id: str | None = None
    dialect: str = CURRENT.name
    max_packet: int = DEFAULT_MAX_PACKET

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> WriteOptions:
        """Check the options of a write.

        :raises sbus.errors.UsageError: if an option is wrong or unknown; the text names the remedy.
        """
        given = _OptionReader(options, "write", _WRITE)
        given.refuse_unknown()
        # A default would hide that Spark has lost the option (`sbus.spark.datasource.catalog`).
        if "socket" not in given.options:
            given.refuse(
                "socket",
                "name the bus, such as /run/sbus.sock. If it is an option of a table: leave out the columns in "
                "CREATE TABLE, and publish a stream with format('sbus') and not with toTable",
            )
        if (name := given.options.get("id")) in ("", "key", "payload"):
            given.refuse("id", "name a third column, such as id")
        return cls(
            address=find_address(given.options["socket"]),
            id=name,
            dialect=given.dialect().name,
            max_packet=given.number("maxPacket") or DEFAULT_MAX_PACKET,
        )


class _OptionReader:
    """The options of one call, by name and type.

    A wrong one raises an error with the remedy.

    :param purpose: what the options are for, a verb for the error text.
    :param names: the options that exist, as they are documented.
    """

    def __init__(self, options: Mapping[str, str], purpose: str, names: tuple[str, ...]) -> None:
        self.options = {name.lower(): value for name, value in options.items()}
        self.purpose = purpose
        self.names = {name.lower(): name for name in names}

    def refuse(self, name: str, advice: str) -> NoReturn:
        value = self.options.get(name.lower())
        option = f"the option {name}" + ("" if value is None else f"={value!r}")
        raise UsageError(f"format('sbus'): {option}: {advice}")

    def refuse_unknown(self) -> None:
        """Raise an error for an option that does not exist."""
        for name in sorted(self.options.keys() - self.names.keys() - _SPARK_OPTIONS - self._paths):
            close = difflib.get_close_matches(name, self.names, 1)
            hint = f"; did you mean {self.names[close[0]]}?" if close else ""
            known = ", ".join(self.names.values())
            raise UsageError(
                f"format('sbus'): there is no option {name!r} to {self.purpose} with{hint}; the options are: {known}"
            )

    @property
    def _paths(self) -> frozenset[str]:
        """The names under which Spark hands over the argument of ``load``."""
        return frozenset({"path", "paths"} if "journal" in self.names else ())

    def journals(self) -> tuple[str, ...]:
        """Return the paths and globs of the option ``journal``, or of ``load``."""
        paths = [self.options["path"]] if "path" in self.options else []
        if "paths" in self.options:
            paths += json.loads(self.options["paths"])
        named = self.options.get("journal", "")
        if paths and named:
            self.refuse("journal", "give it or load(path), not both")
        journals = tuple(journal for line in paths or named.split("\n") for journal in _journals(line))
        if not journals:
            self.refuse(
                "journal", "name the directory that the recorder writes to, several separated by commas, or a glob"
            )
        return journals

    def payload(self) -> dict[str, str | None]:
        """Return the fields of `ReadOptions` about payloads."""
        format_, schema = self.options.get("payloadformat"), self.options.get("payloadschema")
        if format_ is not None and format_.lower() not in FORMATS:
            self.refuse("payloadFormat", f"use {', '.join(FORMATS)}")
        if schema is not None and (format_ is None or format_.lower() == "text"):
            self.refuse("payloadSchema", "this is for payloadFormat json and msgpack")
        return {"payload_format": format_ and format_.lower(), "payload_schema": schema}

    def flag(self, name: str, default: bool) -> bool:
        value = self.options.get(name.lower())
        if value is None:
            return default
        if value.lower() not in ("true", "false"):
            self.refuse(name, "use true or false")
        return value.lower() == "true"

    def number(self, name: str) -> int | None:
        value = self.options.get(name.lower())
        if value is None:
            return None
        if not value.isascii() or not value.isdecimal() or int(value) < 1:
            self.refuse(name, "use a whole number, 1 or more")
        return int(value)

    def duration(self, name: str) -> float | None:
        value = self.options.get(name.lower())
        if value is None:
            return None
        try:
            return duration(name)(value)
        except UsageError:
            self.refuse(name, "use a time such as 500ms, 10s or 5m")

    def consumer(self) -> str | None:
        value = self.options.get("consumer")
        if value is not None:
            try:
                check_name(value)
            except UsageError as e:
                self.refuse("consumer", str(e))
        return value

    def dialect(self) -> Dialect:
        try:
            return find_dialect(self.options.get("dialect", CURRENT.name))
        except UsageError:
            self.refuse("dialect", "use 'current' or 'early'")

    def pattern(self, name: str, dialect: Dialect) -> bytes | None:
        value = self.options.get(name.lower())
        if value is None:
            return None
        try:
            pattern = from_text(value)
            check_recorded(pattern, dialect)
        except UsageError as e:
            self.refuse(name, str(e))
        return pattern

    def positions(self, name: str, default: str) -> Positions:
        value = self.options.get(name.lower(), default)
        try:
            return Positions.parse(value, default)
        except (ValueError, OverflowError):
            self.refuse(
                name,
                f"use {EARLIEST}, {LATEST} or a time such as 2026-01-31T12:00:00Z (by default UTC) or -15m, or a JSON "
                'object with a row or a time for each journal, such as {"<journal>": 1000}',
            )

    def time(self, name: str) -> int | None:
        value = self.options.get(name.lower())
        if value is None:
            return None
        try:
            return from_datetime(moment(value))
        except (ValueError, OverflowError):
            self.refuse(
                name, "use a time such as 2026-01-31T12:00:00Z (by default UTC), or one before now such as -15m"
            )


def _journals(line: str) -> list[str]:
    """Return the paths and globs in a line, separated by commas; a line that is the path of a journal is that alone."""
    if is_journal(line := line.removeprefix("file:")):
        return [line]
    return [path.removeprefix("file:") for path in map(str.strip, line.split(",")) if path]
