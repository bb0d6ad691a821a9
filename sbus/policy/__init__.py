"""Policies: who may publish and subscribe to what. The package reads files, and does no other I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sbus.lazy import lazy_names

if TYPE_CHECKING:
    from sbus.policy.policy import Policy, Rights, Zone
    from sbus.policy.reading import load
    from sbus.policy.rules import ALLOWED, Identity, Rule, UserLimits, Verdict

__all__ = ["ALLOWED", "Identity", "Policy", "Rights", "Rule", "UserLimits", "Verdict", "Zone", "load"]

# Most buses have no policy, and a bus is to start quickly.
__getattr__ = lazy_names(
    __name__,
    {
        **dict.fromkeys(("Policy", "Rights", "Zone"), ".policy"),
        **dict.fromkeys(("ALLOWED", "Identity", "Rule", "UserLimits", "Verdict"), ".rules"),
        "load": ".reading",
    },
)
