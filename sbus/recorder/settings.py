"""The settings of a recorder; each has an option of ``twistd sbus-recorder``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sbus.errors import UsageError
from sbus.ownership import check_file_mode, directory_mode
from sbus.protocol.controls import HardChoice, OrderChoice, SoftChoice
from sbus.protocol.keys import find_dialect
from sbus.protocol.packets import DEFAULT_MAX_PACKET
from sbus.protocol.recorded import check_recorded

__all__ = ["Settings"]

_MAX_BATCH_BYTES = 1 << 30
"""Half of what Arrow can hold in one column of a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a recorder records.

    :ivar patterns: the patterns of the messages to record; the empty pattern matches all that are not secret.
    :ivar dialect: ``current``, or ``early`` for servers of the first revision.
    :ivar max_packet: the length of the longest packet in bytes, as configured at the server.
    :ivar soft: the soft strategy, for when the recorder's socket is full (`sbus.client.api.ClientApi.flood_control`);
        None: the default of the server.
    :ivar hard: the hard strategy, for when the recorder's queue is full. With ``adaptive`` the recorder chooses
        ``block`` while its lag is below `max_lag`, and else ``discard`` (`sbus.recorder.pressure`). The early dialect
        has no flood control.
    :ivar max_lag: the lag in seconds up to which ``adaptive`` blocks publishers.
    :ivar order: the order in which the server sends queued messages; None: the default of the server.
    :ivar batch_rows: the number of messages that completes a batch.
    :ivar batch_bytes: the number of bytes, in keys and payloads, that completes a batch.
    :ivar batch_time: the longest time that a message waits for its batch, in seconds.
    :ivar sync: the seconds between two syncs while there are new rows; 0: a sync after every batch.
    :ivar buffer_bytes: the bytes of memory, in messages that are not written yet, at which the bus is no longer read.
    :ivar max_payload: the bytes in the longest payload that is kept, if it comes in sealed memory; of a longer one, the
        journal has the length and the SHA-256.
    :ivar segment_bytes: the size in bytes at which a new segment begins.
    :ivar segment_age: the age in seconds at which a new segment begins.
    :ivar keep_bytes: the limit on the size of the journal in bytes; None: no limit.
    :ivar keep_days: the limit on the age of a row in days; None: no limit.
    :ivar force: delete segments that no consumer has taken, too.
    :ivar mode: the permissions of the journal's files. A user who may read them may list and enter the directory.

    :raises sbus.errors.UsageError: if a value is not possible, with the remedy.
    """

    patterns: tuple[bytes, ...] = (b"",)
    dialect: str = "current"
    max_packet: int = DEFAULT_MAX_PACKET
    soft: SoftChoice | None = None
    hard: HardChoice | Literal["adaptive"] | None = "adaptive"
    max_lag: float = 5.0
    order: OrderChoice | None = None
    batch_rows: int = 16_384
    batch_bytes: int = 4 << 20
    batch_time: float = 0.1
    sync: float = 1.0
    buffer_bytes: int = 64 << 20
    max_payload: int = 4 << 20
    segment_bytes: int = 128 << 20
    segment_age: float = 3600.0
    keep_bytes: int | None = None
    keep_days: float | None = None
    force: bool = False
    mode: int = 0o600

    def __post_init__(self) -> None:
        dialect = find_dialect(self.dialect)
        for pattern in self.patterns:
            check_recorded(pattern, dialect)
        if not self.patterns:
            raise UsageError("no pattern: nothing would be recorded; the empty pattern records everything")
        if self.batch_bytes > _MAX_BATCH_BYTES:
            raise UsageError(f"a batch of {self.batch_bytes} bytes is too large: at most {_MAX_BATCH_BYTES}")
        if self.buffer_bytes < self.batch_bytes:
            raise UsageError(
                f"a buffer of {self.buffer_bytes} bytes cannot hold a batch of {self.batch_bytes} bytes: "
                "raise --buffer-bytes or lower --batch-bytes"
            )
        if self.max_payload > _MAX_BATCH_BYTES:
            raise UsageError(f"a payload of {self.max_payload} bytes is too large: at most {_MAX_BATCH_BYTES}")
        check_file_mode(self.mode)

    @property
    def keeps_all(self) -> bool:
        """Whether no segment is ever deleted."""
        return self.keep_bytes is None and self.keep_days is None

    @property
    def directory_mode(self) -> int:
        """The permissions of the directory: users who may read the files may enter it."""
        return directory_mode(self.mode)
