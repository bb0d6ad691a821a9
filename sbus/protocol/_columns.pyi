from sbus.protocol.columns import collect

__all__ = ["collect"]
