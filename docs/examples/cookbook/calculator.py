"""Requests and replies.

python3 calculator.py serve ADDRESS
python3 calculator.py ask ADDRESS sum 1 2 3
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import sbus
from sbus import NobodyListens, Request, RequestFailed, TimedOut

OPERATIONS: dict[bytes, Callable[[list[float]], float]] = {b"sum": math.fsum, b"product": math.prod}


def calculate(request: Request) -> bytes:
    operation = OPERATIONS.get(request.key.rpartition(b"/")[2])
    if operation is None:
        raise RequestFailed("it can do sum and product")
    try:
        return b"%g" % operation([float(word) for word in request.payload.split()])
    except ValueError as error:
        raise RequestFailed(str(error)) from None


def serve(address: str) -> None:
    with sbus.connect(address) as bus:
        bus.respond("calculator/*", calculate)
        bus.fence()
        print("at your service", flush=True)
        for _ in bus:
            pass  # the client answers requests while it reads the connection


def ask(address: str, operation: str, *numbers: str) -> None:
    with sbus.connect(address) as bus:
        try:
            print(bus.request(f"calculator/{operation}", " ".join(numbers).encode(), timeout=2).decode())
        except RequestFailed as error:
            sys.exit(f"the calculator says: {error}")
        except (NobodyListens, TimedOut):
            sys.exit("no calculator is there, or it does not answer")


if __name__ == "__main__":
    commands: dict[str, Callable[..., None]] = {"serve": serve, "ask": ask}
    commands[sys.argv[1]](*sys.argv[2:])
