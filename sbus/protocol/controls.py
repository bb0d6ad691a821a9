"""Control messages: their keys, and one table of choices for server, clients, command line and docs.

A control message is ``CMSG <key>``, optionally with a payload. A *choice* has a row in `CONTROLS`, and its effect in
`sbus.server.bus.choices`. It belongs to a *group*; the newest choice of a group is in force.
`sbus.server.asks.requests` handles all other control messages: questions, and messages of links. A plugin adds
strategies and orders without a row: the group of such a key is the part before its last slash.

Protocol: "Control messages", "Flood control", "Echo", "Bundles", "Payloads", "Receipts", "Sender", "Bye", "Denied",
"Interest", and "Last values".
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = [
    "BUNDLE",
    "BUNDLE_OFF",
    "BUNDLE_ON",
    "BYE",
    "BYE_OFF",
    "BYE_ON",
    "CHAIN",
    "CHAIN_OFF",
    "CHAIN_ON",
    "CONTROLS",
    "DENIED",
    "DENIED_OFF",
    "DENIED_ON",
    "ECHO",
    "ECHO_OFF",
    "ECHO_ON",
    "HARD",
    "INTEREST",
    "INTEREST_OFF",
    "INTEREST_ON",
    "INTEREST_PATTERN",
    "INTEREST_PATTERNS",
    "LAST",
    "LAST_DONE",
    "LINK_DOWN",
    "LINK_FENCE",
    "LINK_GAP",
    "LINK_LOST",
    "LINK_PATH",
    "LINK_SENDER",
    "LINK_UP",
    "OBSERVER",
    "OBSERVER_OFF",
    "OBSERVER_ON",
    "ORDER",
    "PAYLOAD",
    "PAYLOAD_OFF",
    "PAYLOAD_ON",
    "PROBE",
    "RECEIPTS",
    "RECEIPTS_OFF",
    "RECEIPTS_ON",
    "SENDER",
    "SENDER_OFF",
    "SENDER_ON",
    "SOFT",
    "WHOAMI",
    "Answer",
    "Control",
    "HardChoice",
    "OrderChoice",
    "SoftChoice",
    "choices",
    "find",
    "group_of",
]


SoftChoice: TypeAlias = Literal["queue", "discard", "block", "error", "latest"]
"""The soft strategies of this package, for annotations; a test compares them with the table."""
HardChoice: TypeAlias = Literal["discard", "block", "error"]
"""The hard strategies of this package."""
OrderChoice: TypeAlias = Literal["queue", "stack", "random"]
"""The orders of this package."""


class Answer(enum.Enum):
    """The payload of the reply, a control message with the key of its question."""

    NONE = "nothing"
    EMPTY = "an empty payload"
    VALUE = "a value"


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """One choice.

    :ivar key: the key, as sent.
    :ivar group: the name of the setting; its newest choice is in force.
    :ivar default: whether it is in force before any message of its group was sent.
    :ivar answer: the server's reply.
    :ivar repeated: whether a client sends it again after reconnecting.
    :ivar refines: whether the earlier choice of its group stays in force beside it, so that a client repeats both.
    :ivar meaning: the request in one line, as the receiving client would phrase it.
    """

    key: bytes
    group: bytes
    default: bool = False
    answer: Answer = Answer.NONE
    repeated: bool = True
    refines: bool = False
    meaning: str


WHOAMI = b"!/cred/whoami"
ECHO_ON, ECHO_OFF = b"echo/on", b"echo/off"
BUNDLE_ON, BUNDLE_OFF = b"bundle/on", b"bundle/off"
PAYLOAD_ON, PAYLOAD_OFF = b"payload/on", b"payload/off"
BYE_ON, BYE_OFF = b"bye/on", b"bye/off"
RECEIPTS_ON, RECEIPTS_OFF = b"receipts/on", b"receipts/off"
SENDER_ON, SENDER_OFF = b"sender/on", b"sender/off"
DENIED_ON, DENIED_OFF = b"denied/on", b"denied/off"
OBSERVER_ON, OBSERVER_OFF = b"observer/on", b"observer/off"
INTEREST, INTEREST_ON, INTEREST_OFF = b"interest", b"interest/on", b"interest/off"
INTEREST_PATTERN, INTEREST_PATTERNS = b"interest/pattern", b"interest/patterns"
PROBE, LAST, LAST_DONE = b"probe", b"last", b"last/done"
CHAIN_ON, CHAIN_OFF = b"chain/on", b"chain/off"
LINK_UP, LINK_DOWN, LINK_FENCE = b"link/up", b"link/down", b"link/fence"
LINK_PATH, LINK_LOST, LINK_GAP, LINK_SENDER = b"link/path", b"link/lost", b"link/gap", b"link/sender"

SOFT, HARD, ORDER, ECHO, BUNDLE = b"blocking/soft", b"blocking/hard", b"order", b"echo", b"bundle"
BYE, RECEIPTS, SENDER, DENIED = b"bye", b"receipts", b"sender", b"denied"
OBSERVER, CHAIN, PAYLOAD = b"observer", b"chain", b"payload"
"""The groups."""

CONTROLS = (
    Control(key=b"blocking/soft/queue", group=SOFT, default=True, meaning="socket full: queue the message"),
    Control(key=b"blocking/soft/discard", group=SOFT, meaning="socket full: drop the message"),
    Control(key=b"blocking/soft/block", group=SOFT, meaning="socket full: queue it and block its publisher"),
    Control(key=b"blocking/soft/error", group=SOFT, meaning="socket full: disconnect me"),
    Control(key=b"blocking/soft/latest", group=SOFT, meaning="socket full: queue only the newest message of each key"),
    Control(key=b"blocking/hard/discard", group=HARD, default=True, meaning="queue full: drop the message"),
    Control(key=b"blocking/hard/block", group=HARD, meaning="queue full: queue it and block its publisher"),
    Control(key=b"blocking/hard/error", group=HARD, meaning="queue full: disconnect me"),
    Control(key=b"order/queue", group=ORDER, default=True, meaning="send the oldest message first"),
    Control(key=b"order/stack", group=ORDER, meaning="send the newest message first"),
    Control(key=b"order/random", group=ORDER, refines=True, meaning="send the largest message first"),
    Control(key=ECHO_ON, group=ECHO, default=True, meaning="send me my own messages, if I subscribed to them"),
    Control(key=ECHO_OFF, group=ECHO, meaning="do not send me my own messages"),
    Control(key=BUNDLE_ON, group=BUNDLE, answer=Answer.VALUE, meaning="take bundles from me, and send me bundles"),
    Control(
        key=BUNDLE_OFF,
        group=BUNDLE,
        default=True,
        answer=Answer.EMPTY,
        repeated=False,
        meaning="accept and send no more bundles",
    ),
    Control(
        key=PAYLOAD_ON, group=PAYLOAD, answer=Answer.VALUE, meaning="take and send large payloads in sealed memory"
    ),
    Control(
        key=PAYLOAD_OFF,
        group=PAYLOAD,
        default=True,
        answer=Answer.EMPTY,
        repeated=False,
        meaning="accept and send no more sealed memory",
    ),
    Control(key=BYE_ON, group=BYE, answer=Answer.EMPTY, meaning="say why, before you disconnect me"),
    Control(
        key=BYE_OFF,
        group=BYE,
        default=True,
        answer=Answer.EMPTY,
        repeated=False,
        meaning="disconnect me without a word",
    ),
    Control(key=RECEIPTS_ON, group=RECEIPTS, answer=Answer.EMPTY, meaning="report each loss where it happened"),
    Control(
        key=RECEIPTS_OFF,
        group=RECEIPTS,
        default=True,
        answer=Answer.EMPTY,
        repeated=False,
        meaning="report no losses",
    ),
    Control(key=SENDER_ON, group=SENDER, answer=Answer.EMPTY, meaning="name the publisher of each message I get"),
    Control(
        key=SENDER_OFF,
        group=SENDER,
        default=True,
        answer=Answer.EMPTY,
        repeated=False,
        meaning="name no publishers",
    ),
    Control(key=DENIED_ON, group=DENIED, answer=Answer.EMPTY, meaning="report refusals to me, and keep me connected"),
    Control(
        key=DENIED_OFF,
        group=DENIED,
        default=True,
        answer=Answer.EMPTY,
        repeated=False,
        meaning="disconnect me if I act without permission",
    ),
    Control(key=OBSERVER_ON, group=OBSERVER, answer=Answer.EMPTY, meaning="count none of my subscriptions as interest"),
    Control(
        key=OBSERVER_OFF,
        group=OBSERVER,
        default=True,
        answer=Answer.EMPTY,
        repeated=False,
        meaning="count my subscriptions as interest",
    ),
    Control(key=CHAIN_ON, group=CHAIN, answer=Answer.EMPTY, meaning="report changes of my credentials"),
    Control(
        key=CHAIN_OFF,
        group=CHAIN,
        default=True,
        answer=Answer.EMPTY,
        repeated=False,
        meaning="do not tell me when my credentials change",
    ),
)
"""Every choice of the protocol, in the order of its documentation."""

_BY_KEY = {control.key: control for control in CONTROLS}


def find(key: bytes) -> Control | None:
    """Return the row of a choice, or None for any other key."""
    return _BY_KEY.get(key)


def group_of(key: bytes) -> bytes:
    """Return the group of a control message.

    For a key without a row, it is the part before the last slash.
    """
    control = _BY_KEY.get(key)
    return control.group if control else key.rpartition(b"/")[0]


def choices(group: bytes) -> tuple[str, ...]:
    """Return the last words of a group's keys, the default first.

    The options of a command line have these names.
    """
    rows = sorted((control for control in CONTROLS if control.group == group), key=lambda control: not control.default)
    return tuple(control.key.rpartition(b"/")[2].decode() for control in rows)
