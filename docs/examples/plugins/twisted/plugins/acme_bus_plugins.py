"""What Twisted's plugin system finds of ``acme_bus``."""

from acme_bus import HouseRulesPolicy, MakeRoom, Recent, SmallestFirst

houseRules = HouseRulesPolicy()
recent = Recent()
ensure_max_packet = MakeRoom()
smallestFirst = SmallestFirst()
