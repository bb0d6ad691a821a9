"""Telemetry: many programs measure, some watch, one keeps everything.

python3 telemetry.py measure ADDRESS NAME [SECONDS]
python3 telemetry.py watch ADDRESS
python3 telemetry.py keep ADDRESS FILE
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import sbus
from sbus.errors import TimedOut


def measure(address: str, name: str, interval: str = "1") -> None:
    """Publish the load of this machine at an interval in seconds."""
    # No reading has to be repeated: after a lost connection just continue.
    with sbus.connect(address, reconnect=True) as bus:
        while True:
            reading = f"{time.time():.3f} {os.getloadavg()[0]:.2f}"
            try:
                bus.publish(f"telemetry/{name}/load", reading.encode(), timeout=1)
            except TimedOut:
                pass  # a receiver blocks its publishers: skip a reading rather than fall behind
            time.sleep(float(interval))


def watch(address: str) -> None:
    """Show the current readings: first the last one of each machine, and on a slow terminal only the newest."""

    def report(lost: sbus.Lost) -> None:
        print("readings were lost:", lost.why, flush=True)

    with sbus.connect(address, reconnect=True, on_lost=report) as bus:
        bus.flood_control(soft="latest")
        bus.subscribe("telemetry/*/load", last=True)
        for message in bus:
            taken, load = message.payload.split()
            print(
                message.key.split(b"/")[1].decode(),
                load.decode(),
                f"{time.time() - float(taken):.1f} s ago",
                flush=True,
            )


def keep(address: str, path: str) -> None:
    """Write everything to a file, and block publishers that are too fast for it."""
    with open(path, "ab") as file:

        def report(lost: sbus.Lost) -> None:
            file.write(f"# {lost.messages} readings are missing here: {lost.why}\n".encode())

        with sbus.connect(address, on_lost=report) as bus:
            bus.flood_control(soft="queue", hard="block")
            bus.subscribe("telemetry/")
            bus.fence()
            print("keeping", flush=True)
            while True:
                for message in bus.get_many():
                    file.write(b"%b %b\n" % message)
                file.flush()


if __name__ == "__main__":
    commands: dict[str, Callable[..., None]] = {"measure": measure, "watch": watch, "keep": keep}
    commands[sys.argv[1]](*sys.argv[2:])
