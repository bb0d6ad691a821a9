"""The package's exceptions, and the reasons for violations and disconnections.

::

    SbusError
     ├─ Violation
     ├─ UsageError
     │   ├─ AddressError
     │   ├─ InvalidKey
     │   ├─ PacketTooLong
     │   ├─ PluginError
     │   └─ PolicyError
     ├─ ListenError
     ├─ BufferFull
     ├─ ConnectError
     ├─ Disconnected
     │   ├─ Closed
     │   ├─ Forked
     │   └─ ConnectionLost
     ├─ JournalError
     │   ├─ JournalLocked
     │   ├─ JournalMissing
     │   └─ JournalUnreadable
     ├─ LakeError
     │   └─ StorageError
     ├─ QueueError
     ├─ SparkError
     ├─ TimedOut            (also a TimeoutError)
     ├─ NobodyListens
     ├─ NotAllowed
     └─ RequestFailed

Any other exception that escapes from this package is a bug.
"""

from __future__ import annotations

import enum
import os

__all__ = [
    "AddressError",
    "BufferFull",
    "CloseReason",
    "Closed",
    "ConnectError",
    "ConnectionLost",
    "Disconnected",
    "Forked",
    "InvalidKey",
    "JournalError",
    "JournalLocked",
    "JournalMissing",
    "JournalUnreadable",
    "LakeError",
    "ListenError",
    "NobodyListens",
    "NotAllowed",
    "PacketTooLong",
    "PatternWarning",
    "PluginError",
    "PolicyError",
    "QueueError",
    "RequestFailed",
    "SbusError",
    "SparkError",
    "StorageError",
    "TimedOut",
    "UsageError",
    "Violation",
    "ViolationReason",
]


class ViolationReason(enum.Enum):
    """The rule of the protocol that a packet broke. The value is the text in the log."""

    UNKNOWN_VERB = "unknown message type"
    BAD_BUNDLE = "a bundle from a client that has not asked for bundles, or with bad framing"
    KEY_NOT_ENDED = "MSG without a NUL after the key"
    PACKET_TOO_LONG = "the packet is longer than the limit"
    BAD_RANGE = "FMSG without '<offset> <length>', or its range is empty, above --max-payload, or beyond the memory"
    BAD_MEMORY = "a payload's memory is no memfd, lacks the seal SEAL, SHRINK, GROW or WRITE, or has holes"
    BAD_DESCRIPTORS = "the wrong number of descriptors: FMSG, or a bundle with FMSG, needs one; any other packet none"
    DRIPPING = "packets come in tiny pieces: nine in ten reads completed none; send each packet with one call"
    RESERVED_KEY = "'!' is reserved: it may only begin !/cred/<gid>/<uid>/<pid>/"
    BAD_ID = "an ID in a secret key must be empty, or a decimal number below 2^32 without leading zeros"
    FOREIGN_SECRET = "subscription to another client's secret key"
    UNPROVEN_IDENTITY = "the client's IDs are shared by many processes, so they prove nothing"
    REFUSED_SUBSCRIPTION = "the policy of the bus refuses this subscription"
    REFUSED_PUBLICATION = "the policy of the bus refuses this publication"
    TOO_MANY_PATTERNS = "more patterns than the limit for one client"
    TOO_MANY_PATTERN_BYTES = "more bytes in patterns than the limit for one client"
    TOO_MANY_WATCHED_KEYS = "more than 1024 watched keys, or one of more than 1024 bytes"
    TOO_MANY_MATCH_STEPS = (
        "the wildcards of this user's patterns together make look-ups too slow; use fewer of them, or patterns without "
        "wildcards"
    )
    TOO_MANY_USER_PATTERNS = "more patterns than the limit for all clients of one user (--user-patterns)"
    USER_MEMORY = "the clients of this user hold as much memory as one user may (--user-memory)"

    @property
    def is_user_limit(self) -> bool:
        """Whether the limit is on all clients of a user together, so that others may have used it up."""
        return self in (
            ViolationReason.TOO_MANY_MATCH_STEPS,
            ViolationReason.TOO_MANY_USER_PATTERNS,
            ViolationReason.USER_MEMORY,
        )


class CloseReason(enum.Enum):
    """The cause of the end of a connection. The value is the text in the log."""

    PEER_CLOSED = "the client closed the connection"
    PEER_RESET = "the connection broke"
    NOT_ALLOWED = "the client's user is not allowed on this bus"
    SECOND_LINK = (
        "this bus has a link to another one, or a bridge: there can be one; "
        "stop one of the two (sbus clients lists them)"
    )
    TOO_MANY_CLIENTS = "the bus, or the socket of this client, has reached its limit of clients"
    TOO_MANY_USER_CLIENTS = "its user has as many clients as one user may have (--user-clients)"
    TOO_MANY_USER_CONNECTS = "its user connects more often than one user may (--user-accepts)"
    KEPT_FOR_OTHERS = (
        "its user has a client, and the last places are kept for users without one (--max-clients, ulimit -n)"
    )
    VIOLATION = "the client broke the protocol"
    USER_LIMIT = "the clients of its user together went beyond a limit for one user"
    USER_MEMORY = "the clients of its user together hold as much memory as one user may (--user-memory)"
    OUT_OF_MEMORY = "the bus has reached its limit of memory (--max-memory), and the client's user held most"
    SOCKET_FULL = "its socket was full, and it had chosen blocking/soft/error"
    QUEUE_FULL = "its queue was full, and it had chosen blocking/hard/error"
    BLOCKED_TOO_LONG = "it blocked publishers and received nothing for the whole block time-out"
    REVOKED = "the policy of the bus no longer allows what it was subscribed to"
    OPERATOR = "the operator of the bus disconnected it"
    SERVER_STOPPED = "the server is stopping"
    SERVER_ERROR = "an error in the server"


class SbusError(Exception):
    """The base class of all exceptions that this package raises deliberately."""


class Violation(SbusError):
    """A client broke a rule of the protocol.

    :ivar reason: the rule.
    """

    def __init__(self, reason: ViolationReason) -> None:
        super().__init__(reason.value)
        self.reason = reason

    def __reduce__(self) -> tuple[type[Violation], tuple[ViolationReason]]:
        return Violation, (self.reason,)


class PatternWarning(UserWarning):
    """A pattern that can match no key, or that has other systems' wildcards; it is allowed, and likely a mistake."""


class UsageError(SbusError):
    """A request for something that does not exist or is not allowed.

    The text gives the remedy.
    """


class AddressError(UsageError):
    """An address that is malformed or cannot be used."""


class InvalidKey(UsageError):
    """A key or pattern that the protocol forbids; the text names the rule.

    :ivar reason: the rule, if a server would call it a violation; else None.
    """

    def __init__(self, message: str, reason: ViolationReason | None = None) -> None:
        super().__init__(message)
        self.reason = reason


class PacketTooLong(UsageError):
    """A message that does not fit a packet or the socket's send buffer.

    The text names the limit.
    """


class PluginError(UsageError):
    """A component that is not installed, or a name that two components share."""


class PolicyError(UsageError):
    """A policy that cannot be read, or is wrong; the text begins with the file and the line."""


class ListenError(SbusError):
    """The server cannot listen on an address; the text gives the cause and the remedy."""


class ConnectError(SbusError):
    """The client cannot connect to a bus; the text gives the cause and the remedy."""


class BufferFull(SbusError):
    """A message that was not sent: nothing more can wait for a connection to the bus (``reconnect_buffer``)."""


class Disconnected(SbusError):
    """The connection to the bus is gone.

    The text gives the cause as far as it is known.
    """


class Closed(Disconnected):
    """This program closed the connection."""


class Forked(Disconnected):
    """The connection is that of the process that this one was forked from; each process needs its own."""


class ConnectionLost(Disconnected):
    """The server closed the connection, or it broke.

    :ivar reason: the server's reason; None if it gave none, or one that this version does not know.
    """

    def __init__(self, message: str, reason: CloseReason | None = None) -> None:
        super().__init__(message)
        self.reason = reason


class JournalError(SbusError):
    """A journal that cannot be read or written.

    The text gives the path, the cause and the remedy.
    """


class JournalLocked(JournalError):
    """Another recorder is writing this journal; a journal has at most one."""


class JournalMissing(JournalError):
    """There is no journal in a directory: it was moved away, is not mounted, or the name is wrong."""


class JournalUnreadable(JournalError):
    """This user may not read a file of a journal. That does not mean that its rows are lost."""


class LakeError(SbusError):
    """A lake that cannot be read or written.

    The text gives the path, the cause and the remedy.
    """


class StorageError(LakeError):
    """The storage of a lake cannot be reached, or cannot be written.

    It may be so only for now; the archive tries again.
    """


class QueueError(SbusError):
    """The store of a queue cannot be used.

    The text gives the path, the cause and the remedy.
    """


class SparkError(SbusError):
    """A Spark job failed; the text is the most specific line of Spark's own error."""


class TimedOut(SbusError, TimeoutError):
    """Something did not happen in the given time."""


class NobodyListens(SbusError):
    """Nobody subscribes to the key of a request, so no reply will come."""


class NotAllowed(SbusError):
    """The bus has refused a message or a subscription of this client, which stays connected.

    The text names the rule and the remedy.

    :ivar verb: ``b"MSG"`` for a message, ``b"FMSG"`` for one in sealed memory, ``b"SUB"`` for a subscription.
    :ivar key: the key or pattern; of a long one the first 1,024 bytes.
    :ivar rule: the name of the policy's rule; ``default`` or ``closed`` if no rule allows it, ``secret`` for a secret
        key of another client, ``credentials`` if a plugin of the server refuses it.
    """

    def __init__(self, verb: bytes, key: bytes, rule: str) -> None:
        super().__init__(verb, key, rule)
        self.verb = verb
        self.key = key
        self.rule = rule

    def __str__(self) -> str:
        verb = "subscribe to" if self.verb == b"SUB" else "publish"
        key = repr(self.key.decode("utf-8", "backslashreplace"))
        how = " with its payload in sealed memory" if self.verb == b"FMSG" else ""
        what = f"this client may not {verb} {key}{how}"
        if self.rule == "secret":
            return f"{what}: only the client with that name may, and no policy changes that (rule: secret); see whoami"
        ask = "ask the administrator of the bus"
        if self.rule == "credentials":
            return f"{what}: a plug-in of the server refuses it (rule: credentials); {ask}"
        closed = "it matches closed keys, and no rule allows all of it"
        if self.verb != b"SUB":
            closed = "the key is closed, and no rule allows it"
        why = {"default": "no rule of the policy allows it", "closed": closed}
        command = f"sbus policy explain --user {os.geteuid()} {verb.partition(' ')[0]} {key}"
        return f"{what}: {why.get(self.rule, 'the policy of the bus forbids it')} (rule: {self.rule}); {ask}: {command}"


class RequestFailed(SbusError):
    """The other client answered a request with an error, whose text this is."""
