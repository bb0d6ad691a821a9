from sbus.bundles import pack, unbundle

__all__ = ["pack", "unbundle"]
