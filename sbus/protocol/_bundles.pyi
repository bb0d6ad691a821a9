from sbus.protocol.bundles import pack, unbundle

__all__ = ["pack", "unbundle"]
