from sbus.syscalls._pure import PacketReader, send_packets, try_send_packets

__all__ = ["PacketReader", "send_packets", "try_send_packets"]
