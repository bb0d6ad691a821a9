"""Flood control: the fate of messages that a receiver cannot take at once.

A receiver has one `SendQueue`. Packets for it gather there while a batch is handled, and are flushed when the batch
ends. If the socket takes everything, nothing else happens. The remainder of a flush *is* the backlog, and only then do
the receiver's strategies and order count: the soft strategy decides about a message when the receiver's socket is full,
the hard strategy about one when the queue is at a limit, and the order chooses the message that is sent first.

This package does no I/O. A queue returns its decisions as an `Outcome`, and calls its `QueueOwner` when it has drained;
`sbus.flood.send_queue` explains how it works.
"""

from __future__ import annotations

from sbus.flood.backlogs import ORDERS, Order, Reply
from sbus.flood.budget import (
    UNLIMITED,
    USER_PAYLOADS,
    MemoryAccount,
    PayloadShare,
    QueueLimits,
    SharedBudget,
    UserShare,
)
from sbus.flood.front import Front
from sbus.flood.interfaces import Loss, Outcome, Until, Verdict
from sbus.flood.naming import PROGRAM, SIGNED, Naming, Signature, Signed, sign, sign_from
from sbus.flood.outgoing import QueueOwner, State
from sbus.flood.payloads import PayloadMessage, SharedMemory
from sbus.flood.run import NamedRun, Run
from sbus.flood.send_queue import SendQueue
from sbus.flood.settings import DEFAULT_SETTINGS, ClientSettings
from sbus.flood.strategies import HARD_STRATEGIES, SOFT_STRATEGIES, Strategy

__all__ = [
    "DEFAULT_SETTINGS",
    "HARD_STRATEGIES",
    "ORDERS",
    "PROGRAM",
    "SIGNED",
    "SOFT_STRATEGIES",
    "UNLIMITED",
    "USER_PAYLOADS",
    "ClientSettings",
    "Front",
    "Loss",
    "MemoryAccount",
    "NamedRun",
    "Naming",
    "Order",
    "Outcome",
    "PayloadMessage",
    "PayloadShare",
    "QueueLimits",
    "QueueOwner",
    "Reply",
    "Run",
    "SendQueue",
    "SharedBudget",
    "SharedMemory",
    "Signature",
    "Signed",
    "State",
    "Strategy",
    "Until",
    "UserShare",
    "Verdict",
    "sign",
    "sign_from",
]
