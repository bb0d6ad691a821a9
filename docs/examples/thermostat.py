"""Switch the heating of each room by the temperatures published: ``python3 thermostat.py ADDRESS``."""

from __future__ import annotations

import sys

import sbus


def back(why: Exception) -> None:
    print("back on the bus:", why, flush=True)


def main(address: str) -> None:
    heated: dict[bytes, bool] = {}
    with sbus.connect(address, reconnect=True, on_gap=back) as bus:
        bus.subscribe("temperature/*")
        bus.fence()
        print("regulating", flush=True)
        for message in bus:
            room = message.key.rpartition(b"/")[2]
            try:
                cold = float(message.payload) < 20
            except ValueError:
                continue
            if heated.get(room) != cold:
                heated[room] = cold
                bus.publish(b"heating/" + room, b"on" if cold else b"off")


if __name__ == "__main__":
    main(sys.argv[1])
