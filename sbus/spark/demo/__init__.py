"""Everything at once, to be watched: a plant on a bus, recorded, looked after by a streaming query, and reported on."""

from __future__ import annotations

from sbus.spark.demo.show import Outcome, run

__all__ = ["Outcome", "run"]
