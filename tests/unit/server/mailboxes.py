"""Mailboxes with several readers."""

from __future__ import annotations

from typing import Any

from sbus.fair.lines import QUANTUM
from sbus.server.bus.handover import OF_OTHERS
from sbus.server.bus.mail import Letter
from sbus.server.core.limits import Limits
from tests.support.buses import Bus, Peer

MANY = OF_OTHERS + 7
READER, PUBLISHER, OTHER = 2, 1, 3
TICK = QUANTUM // 5
WHOAMI = b"CMSG !/cred/whoami"


def message(number: int = 0, key: bytes = b"k", size: int = 0) -> bytes:
    return b"MSG %b\0%d" % (key, number) + bytes(size)


def messages(*numbers: int) -> list[bytes]:
    return [message(number) for number in numbers]


def readers_of(bus: Bus, *packets: bytes, count: int = MANY, uid: int = READER) -> list[Peer]:
    """Connect clients that have sent these packets; then several users are active."""
    readers = [bus.connect(uid=uid) for _ in range(count)]
    for reader in readers:
        reader.send(*(packets or (b"SUB k",)))
        reader.take()
    bus.registry.scheduler.is_busy = True
    return readers


def lines_of(bus: Bus, uid: int = READER) -> Any:
    return bus.registry.users[uid].lines


def kinds(bus: Bus, uid: int = READER) -> list[str]:
    """Return what stands in a user's mail."""
    return [entry.kind if isinstance(entry, Letter) else type(entry).__name__ for entry in lines_of(bus, uid).mail]


def taken(readers: list[Peer]) -> list[list[bytes]]:
    return [reader.take() for reader in readers]


def is_clean(bus: Bus, uid: int = READER) -> bool:
    """Return whether nothing of any mail is left, in no account."""
    lines, scheduler, user = lines_of(bus, uid), bus.registry.scheduler, bus.registry.users[uid]
    is_empty = not (lines.mail or lines.waiting or lines.letters or lines._shares or lines.held)
    beside_clients = user.memory - sum(client.memory() for client in user.clients)
    sums = lines.work, lines.bytes, scheduler.mail_copies, scheduler.mail_bytes, beside_clients
    return is_empty and not any(sums)


def tight_bus(**limits: Any) -> Bus:
    """A bus whose users have room for 10,000 bytes of mail each."""
    return Bus(limits=Limits(block_timeout=30.0, user_memory=320_000, **limits))


def receipts(packets: list[bytes]) -> list[tuple[int, int, int, bytes]]:
    """Return messages, bytes, total and cause of each receipt."""
    found = []
    for packet in packets:
        if packet.startswith(b"CMSG lost\0"):
            lost, size, total, why = packet.partition(b"\0")[2].split(b" ", 3)
            found.append((int(lost), int(size), int(total), why))
    return found
