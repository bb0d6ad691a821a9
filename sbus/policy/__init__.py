"""Policies: who may publish and subscribe to what. No I/O but reading their files; the room knows no bus."""

from sbus.policy.policy import Policy, Rights, Zone
from sbus.policy.reading import load
from sbus.policy.rules import ALLOWED, Identity, Rule, UserLimits, Verdict

__all__ = ["ALLOWED", "Identity", "Policy", "Rights", "Rule", "UserLimits", "Verdict", "Zone", "load"]
