"""Notices: control messages that the server sends unasked, to clients that have asked for their kind.

A *receipt* (``CMSG lost``) stands where messages were dropped, and a *bye* (``CMSG bye``) is the last packet of a
connection that the server ends. Protocol: "Receipts" and "Bye".
"""

from __future__ import annotations

import enum

from sbus.protocol.packets import CMSG, build

__all__ = ["BYE", "LOST", "LossReason", "bye", "lost"]

LOST = b"lost"
"""The key of a receipt."""

BYE = b"bye"
"""The key of a bye."""


class LossReason(enum.Enum):
    """Why a message did not reach a receiver. The value is the word in a receipt."""

    DISCARD = "discard"
    QUEUE_FULL = "queue-full"
    SHARE = "share"
    TOO_LARGE = "too-large"
    DISCONNECT = "disconnect"
    RESTART = "restart"
    SEVERAL = "several"

    __hash__ = object.__hash__  # `enum.Enum` hashes the name, with a call in Python


def lost(messages: int, size: int, total: int, why: LossReason) -> bytes:
    """Return the packet of a receipt.

    :param messages: messages that were dropped here.
    :param size: bytes of their packets.
    :param total: messages that were dropped since the connection began, these included.
    """
    return build(CMSG, LOST, f"{messages} {size} {total} {why.value}".encode())


def bye(reason: str, text: str, longest: int) -> bytes:
    """Return the packet of a bye.

    :param reason: the name of a `sbus.errors.CloseReason`.
    :param text: one line for people; it is cut if the packet is too long.
    :param longest: bytes in the longest packet.
    """
    return build(CMSG, BYE, f"{reason.lower().replace('_', '-')} {text}".encode())[:longest]
