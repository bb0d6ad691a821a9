from sbus.syscalls._pure import PacketReader, send_packets, send_split, send_to_each

__all__ = ["PacketReader", "send_packets", "send_split", "send_to_each"]
