"""The components of ``acme_bus`` for Twisted's plugin system."""

from acme_bus import HouseRulesPolicy, MakeRoom, Recent, SmallestFirst

houseRules = HouseRulesPolicy()
recent = Recent()
ensure_max_packet = MakeRoom()
smallestFirst = SmallestFirst()
