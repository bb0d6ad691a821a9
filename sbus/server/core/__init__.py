"""The basis of every part of the server: its interfaces, users, limits, sockets and counters."""
