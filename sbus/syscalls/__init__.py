"""The system calls of the bus: batches of packets, addresses and socket options; without Twisted."""
