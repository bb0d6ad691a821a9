"""The system calls of the bus: packets by the batch, socket addresses and socket options. No Twisted here."""
