"""System calls of the bus, without Twisted: batches, addresses, socket options."""
