"""A plant that sends telemetry: day-time machines, noisy sensors, and two faults.

Each site is a process, ``python -m sbus.spark.demo.plant``. It plays two days in a given number of seconds. On the
second day, the bearing of a machine in Berlin grows hot, and a sensor in Lyon falls silent.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from sbus.client.blocking import Bus, connect
from sbus.errors import Disconnected

__all__ = ["LIMIT", "SITES", "Site", "publish"]

SITES = {"berlin": 4, "lyon": 3, "turin": 3}
"""The sites, with the number of machines at each."""
LIMIT = 75.0
"""The highest normal temperature of a bearing, in degrees Celsius; healthy ones are at 55 to 66."""
HOT_KEY = "plant/berlin/press-2/bearing/temperature"
SILENT_KEY = "plant/lyon/press-1/coolant/flow"
_HOT_AT, _SILENT_AT = 0.58, 0.7
"""The times at which the faults begin, as a part of the two days."""
_PUBLISH_INTERVAL = 0.05
"""Seconds between two batches of messages."""
_RATES = {
    "bearing/temperature": 4.0,
    "bearing/vibration": 10.0,
    "motor/current": 8.0,
    "coolant/flow": 5.0,
    "state": 0.2,
    "camera/still": 0.5,
}


@dataclass
class Site:
    """The machines of one place.

    :ivar seconds: the real time that the two days take.
    """

    name: str
    seconds: float
    seed: int = 6

    def __post_init__(self) -> None:
        self._dice = random.Random(f"{self.name} {self.seed}")
        self._parcels = 0
        self._owed: dict[str, float] = {}
        self._picture = self._dice.randbytes(4_000)

    def activity(self, at: float) -> float:
        """Return how busy the site is, from 0 to 1.

        It is little at night, and much by day with a break at noon.
        """
        hour = at / self.seconds * 48 % 24
        day = 1 / (1 + math.exp(-2.5 * (hour - 6))) / (1 + math.exp(2 * (hour - 20)))
        return 0.12 + 0.88 * day * (0.55 if 12 <= hour < 13 else 1.0)

    def messages(self, start: float, end: float) -> Iterator[tuple[bytes | str, bytes]]:
        """Yield the messages between two times, in real seconds since the first midnight."""
        busy = self.activity(start)
        progress = start / self.seconds
        for machine in range(1, SITES[self.name] + 1):
            for sensor, rate in _RATES.items():
                key = f"plant/{self.name}/press-{machine}/{sensor}"
                if key == SILENT_KEY and progress >= _SILENT_AT:
                    continue
                # The sensors of the bearing always send; the others follow the machine.
                rate *= 1.0 if sensor.startswith("bearing") else busy
                for _ in range(self._due(key, rate * (end - start))):
                    yield key, self._value(sensor, busy, progress if key == HOT_KEY else 0.0)
        for _ in range(self._due("agv", 6 * busy * (end - start))):
            yield f"logistics/{self.name}/agv/position", json.dumps({
                "agv": self._dice.randrange(1, 5), "x": round(self._dice.uniform(0, 80), 2),
                "y": round(self._dice.uniform(0, 40), 2), "battery": self._dice.randrange(20, 100),
            }).encode()  # fmt: skip
        if self._dice.random() < 0.12 * busy * (end - start):
            self._parcels += self._dice.randrange(80, 240)  # a delivery: a burst of parcels
        scanned = min(self._parcels, self._due("parcels", 60 * (end - start)))
        self._parcels -= scanned
        for _ in range(scanned):
            yield f"logistics/{self.name}/scanner", b"%013d" % self._dice.randrange(10**13)

    def _due(self, what: str, expected: float) -> int:
        """Return the number of messages of a kind to send now.

        The fraction is carried over to the next call.
        """
        owed = self._owed.get(what, self._dice.random()) + expected * self._dice.uniform(0.8, 1.2)
        self._owed[what] = owed % 1
        return int(owed)

    def _value(self, sensor: str, busy: float, progress: float) -> bytes:
        noise = self._dice.gauss
        if sensor == "bearing/temperature":
            heat = max(0.0, progress - _HOT_AT) * 130
            return b"%.2f" % (55 + 11 * busy + min(heat, 45) + noise(0, 0.4))
        if sensor == "bearing/vibration":
            rms = abs(0.4 + 1.8 * busy + noise(0, 0.15))
            return json.dumps({"rms": round(rms, 3), "peak": round(rms * self._dice.uniform(2, 4), 3)}).encode()
        if sensor == "motor/current":
            return b"%.1f" % abs(2 + 38 * busy + noise(0, 1.5))
        if sensor == "coolant/flow":
            return b"%.2f" % abs(1 + 7 * busy + noise(0, 0.1))
        if sensor == "state":
            return b"running" if self._dice.random() < busy else b"idle"
        return self._picture[: self._dice.randrange(1_500, 4_000)]


def publish(bus: Bus, site: Site, start: float) -> None:
    """Publish the messages of a site as they are due, until the connection is lost.

    :param start: the first midnight, in seconds since the epoch.
    """
    at = max(0.0, time.time() - start)
    while True:
        now = time.time() - start
        if now > at:
            bus.publish_many(list(site.messages(at, now)))
            at = now
        time.sleep(_PUBLISH_INTERVAL)


def main() -> None:
    """``python -m sbus.spark.demo.plant SOCKET SITE START SECONDS``"""
    socket, name, start, seconds = sys.argv[1:]
    try:
        with connect(socket) as bus:
            publish(bus, Site(name, float(seconds)), float(start))
    except Disconnected:
        os._exit(0)  # the bus stopped first


if __name__ == "__main__":
    main()
