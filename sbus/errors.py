"""What can go wrong: our exceptions, and the enumerated reasons for a violation and for closing a client.

::

    SbusError
     ├─ Violation            a peer broke a rule of the protocol (carries a ViolationReason)
     ├─ UsageError           a caller asked for something the bus does not offer
     │   ├─ AddressError     an address that cannot be understood or used
     │   ├─ InvalidKey       a key or pattern that the protocol forbids (carries a ViolationReason or None)
     │   ├─ PacketTooLong    a message that does not fit a packet
     │   └─ PluginError      a component that is not installed, or named twice
     ├─ ListenError          the address could not be listened on (carries the remedy)
     ├─ ConnectError         no connection to a bus could be made (carries the remedy)
     ├─ Disconnected         the connection to the bus is gone (and whatever waited for it fails)
     │   └─ Closed           we closed it ourselves
     ├─ JournalError         a journal that cannot be read or written (says which, and the remedy)
     │   └─ JournalLocked    another recorder writes it
     ├─ LakeError            a lake that cannot be read or written (says which, and the remedy)
     ├─ SparkError           what Spark was asked to do has failed
     ├─ TimedOut             something did not happen in time; also a TimeoutError
     └─ RequestFailed        the other side answered a request with an error

Anything else that escapes is a bug of ours.
"""

from __future__ import annotations

import enum

__all__ = [
    "AddressError",
    "CloseReason",
    "Closed",
    "ConnectError",
    "Disconnected",
    "InvalidKey",
    "JournalError",
    "JournalLocked",
    "LakeError",
    "ListenError",
    "PacketTooLong",
    "PluginError",
    "RequestFailed",
    "SbusError",
    "SparkError",
    "TimedOut",
    "UsageError",
    "Violation",
    "ViolationReason",
]


class ViolationReason(enum.Enum):
    """Which rule of the protocol a packet broke; the value is the sentence that is logged."""

    UNKNOWN_VERB = "the packet is none of the message types of this dialect"
    BAD_BUNDLE = "a bundle from a client that has not asked for bundles, or one whose framing is wrong"
    KEY_NOT_ENDED = "MSG without a NUL after the routing key"
    PACKET_TOO_LONG = "the packet is longer than the limit"
    RESERVED_KEY = "'!' is reserved: it may only begin !/cred/<gid>/<uid>/<pid>/"
    BAD_ID = "an ID in a secret key must be empty or a decimal number without leading zeros below 2^32"
    FOREIGN_SECRET = "subscription to a secret key of somebody else's"
    UNPROVEN_IDENTITY = "the peer's IDs are shared by many and prove nothing"
    REFUSED_SUBSCRIPTION = "the credentials policy refuses this subscription"
    REFUSED_PUBLICATION = "the credentials policy refuses this publication"
    TOO_MANY_PATTERNS = "more patterns than a client may hold"
    TOO_MANY_PATTERN_BYTES = "more bytes in patterns than a client may hold"


class CloseReason(enum.Enum):
    """Why the server ended (or lost) a connection; the value is the sentence that is logged."""

    PEER_CLOSED = "the peer closed the connection"
    PEER_RESET = "the connection broke"
    NOT_ALLOWED = "the peer's user is not allowed on this bus"
    TOO_MANY_CLIENTS = "the bus has as many clients as it may have"
    VIOLATION = "the peer broke the protocol"
    SOCKET_FULL = "its socket was full and it had chosen blocking/soft/error"
    QUEUE_FULL = "its queue was full and it had chosen blocking/hard/error"
    BLOCKED_TOO_LONG = "it held publishers back and took nothing for the whole block time-out"
    SERVER_STOPPED = "the server is stopping"
    SERVER_ERROR = "an error in the server"


class SbusError(Exception):
    """The base of every exception that this package raises on purpose."""


class Violation(SbusError):
    """A peer broke a rule of the protocol."""

    def __init__(self, reason: ViolationReason) -> None:
        super().__init__(reason.value)
        self.reason = reason

    def __reduce__(self) -> tuple[type[Violation], tuple[ViolationReason]]:
        return Violation, (self.reason,)


class UsageError(SbusError):
    """A caller asked for something that the bus does not offer; the text says what to do instead."""


class AddressError(UsageError):
    """An address that cannot be understood or used."""


class InvalidKey(UsageError):
    """A routing key or pattern that the protocol forbids; the text says which rule."""

    def __init__(self, message: str, reason: ViolationReason | None = None) -> None:
        super().__init__(message)
        self.reason = reason


class PacketTooLong(UsageError):
    """A message that does not fit a packet, or the socket's send buffer; the text says by which limit."""


class PluginError(UsageError):
    """A component that is not installed, or a name that two components claim."""


class ListenError(SbusError):
    """An address could not be listened on; the text says why and names the remedy."""


class ConnectError(SbusError):
    """No connection to a bus could be made; the text says why and names the remedy."""


class Disconnected(SbusError):
    """The connection to the bus is gone; the text says what is known of why."""


class Closed(Disconnected):
    """We have closed the connection ourselves."""


class JournalError(SbusError):
    """A journal that cannot be read or written; the text says which one, why, and what to do."""


class JournalLocked(JournalError):
    """Another recorder writes this journal; there may be only one."""


class LakeError(SbusError):
    """A lake that cannot be read or written; the text says which one, why, and what to do."""


class SparkError(SbusError):
    """What Spark was asked to do has failed; the text is the line of Spark's that says most."""


class TimedOut(SbusError, TimeoutError):
    """Something did not happen in the time that was given for it."""


class RequestFailed(SbusError):
    """The other side answered a request with an error; the text is its."""
