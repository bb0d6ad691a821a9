"""What all tests share: property tests have no deadline, as other load on the machine is no failure."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("sbus", deadline=None)
settings.load_profile("sbus")
