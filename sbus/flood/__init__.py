"""Flood control: what becomes of messages that a receiver cannot take at once.

A receiver has one `SendQueue`. Packets for it gather there while a batch is handled, and are
flushed when the batch ends. As long as the socket takes everything nothing else happens. What a
flush leaves behind *is* the blocked state, and only then the receiver's strategies and order count:
the soft strategy decides about a message whose receiver's socket is full, the hard strategy about
one for whose queue is at a limit, the order about which of the waiting messages goes first.

This module does no I/O. A queue acts on the world through its `Receiver`.
"""

from __future__ import annotations

from sbus.flood.budget import QueueLimits, SharedBudget
from sbus.flood.interfaces import Verdict
from sbus.flood.orders import ORDERS, Order, Reply
from sbus.flood.send_queue import Receiver, SendQueue
from sbus.flood.strategies import HARD_STRATEGIES, SOFT_STRATEGIES, Strategy

__all__ = [
    "HARD_STRATEGIES",
    "ORDERS",
    "SOFT_STRATEGIES",
    "Order",
    "QueueLimits",
    "Receiver",
    "Reply",
    "SendQueue",
    "SharedBudget",
    "Strategy",
    "Verdict",
]
