"""What a recorder can be told: each option of ``twistd sbus-recorder`` is one of these."""

from __future__ import annotations

from dataclasses import dataclass

from sbus.client.core import find_dialect
from sbus.errors import InvalidKey, UsageError, Violation
from sbus.protocol.keys import Dialect
from sbus.protocol.packets import DEFAULT_MAX_PACKET

__all__ = ["Settings"]

_LARGEST_BATCH = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a recorder records.

    :ivar patterns: what is recorded; the empty pattern is everything that is not secret.
    :ivar dialect: ``current``, or ``early`` for servers of the first revision.
    :ivar max_packet: bytes in the longest packet, as at the server.
    :ivar soft: what the server does when the recorder's socket is full (`sbus.client.api.ClientApi.flood_control`);
        None: its default.
    :ivar hard: what it does when the recorder's queue is full. With ``error`` whatever it drops for the recorder
        shows, as it disconnects it. The early dialect has no such settings.
    :ivar order: in which order it sends what has waited; None: its default.
    :ivar batch_rows: messages that make a batch.
    :ivar batch_bytes: bytes in keys and payloads that make a batch.
    :ivar batch_time: seconds after which a batch is written, however small it is.
    :ivar sync: seconds between two syncs while there is something new; 0: one after every batch.
    :ivar buffer_bytes: bytes in messages that wait for the disk before the bus is not read any more.
    :ivar segment_bytes: bytes after which a new segment is begun.
    :ivar segment_age: seconds after which a new segment is begun.
    :ivar keep_bytes: bytes that the journal may have, before the oldest segments are deleted; None: no limit.
    :ivar keep_days: days after which a segment is deleted; None: never.
    :ivar force: delete also what no consumer has taken yet.
    :ivar mode: permissions of the journal's files; who may read these may enter its directory.
    """

    patterns: tuple[bytes, ...] = (b"",)
    dialect: str = "current"
    max_packet: int = DEFAULT_MAX_PACKET
    soft: str | None = None
    hard: str | None = "error"
    order: str | None = None
    batch_rows: int = 16_384
    batch_bytes: int = 4 << 20
    batch_time: float = 0.1
    sync: float = 1.0
    buffer_bytes: int = 64 << 20
    segment_bytes: int = 128 << 20
    segment_age: float = 3600.0
    keep_bytes: int | None = None
    keep_days: float | None = None
    force: bool = False
    mode: int = 0o600

    def __post_init__(self) -> None:
        dialect = find_dialect(self.dialect)
        for pattern in self.patterns:
            _check(pattern, dialect)
        if not self.patterns:
            raise UsageError("there is nothing to record without a pattern: the empty one is everything")
        if self.batch_bytes > _LARGEST_BATCH:
            raise UsageError(f"a batch of {self.batch_bytes} bytes is too large: at most {_LARGEST_BATCH}")
        if self.buffer_bytes < self.batch_bytes:
            raise UsageError(
                f"{self.buffer_bytes} bytes of memory do not hold a batch of {self.batch_bytes}: "
                "raise the one (--buffer-bytes) or lower the other (--batch-bytes)"
            )
        if self.mode & 0o600 != 0o600:
            raise UsageError(f"--mode={self.mode:04o}: the owner must be able to read and write, as with 0600 and 0640")

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is ever deleted."""
        return self.keep_bytes is None and self.keep_days is None

    @property
    def directory_mode(self) -> int:
        """Permissions of the journal's directory: whoever may read its files may list and enter it."""
        return 0o700 | self.mode | (self.mode & 0o444) >> 2


def _check(pattern: bytes, dialect: Dialect) -> None:
    """Refuse a pattern that is wrong, and one that reaches secret messages.

    :raises UsageError: with the remedy.
    """
    if b"\0" in pattern:
        raise InvalidKey(f"the pattern {pattern!r} holds a NUL, which ends a key")
    if dialect.is_secret(pattern):
        raise UsageError(f"the pattern {dialect.shown(pattern)} is secret, and secret messages are never recorded")
    try:
        dialect.check(pattern)
    except Violation as violation:
        raise InvalidKey(f"the pattern {dialect.shown(pattern)} is not allowed: {violation}") from None
