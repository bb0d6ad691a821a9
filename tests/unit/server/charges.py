"""A bus with a limit of memory, and prices."""

from __future__ import annotations

from typing import Any

from sbus.protocol.keys import CURRENT
from sbus.server.bus.memory import pattern_memory
from sbus.server.core.limits import Limits
from tests.support.buses import Bus

WHOAMI = b"CMSG !/cred/whoami"
LARGE = 1 << 40


def bus_with(max_memory: int = LARGE, user_memory: int = LARGE, **others: Any) -> Bus:
    given = {name: others.pop(name) for name in ("secrets_go_up",) if name in others}
    return Bus(limits=Limits(max_memory=max_memory, user_memory=user_memory, **others), **given)


def price(pattern: bytes) -> int:
    return pattern_memory(pattern, b"/", CURRENT.check(pattern))


def message(key: bytes, size: int) -> bytes:
    return b"MSG " + key + b"\0" + bytes(size)
