"""Requests and replies.

python3 calculator.py serve ADDRESS
python3 calculator.py ask ADDRESS sum 1 2 3
"""

from __future__ import annotations

import math
import sys

import sbus
from sbus.client.api import Request
from sbus.errors import NobodyListens, RequestFailed, TimedOut


def calculate(request: Request) -> bytes:
    numbers = [float(word) for word in request.payload.split()]
    operation = {b"sum": math.fsum, b"product": math.prod}[request.key.rpartition(b"/")[2]]
    return b"%g" % operation(numbers)


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
    {"serve": serve, "ask": ask}[sys.argv[1]](*sys.argv[2:])
