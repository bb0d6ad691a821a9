"""What every part of the server knows: its interfaces, users, limits, sockets and counters."""
