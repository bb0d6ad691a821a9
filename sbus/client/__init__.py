"""Clients of a bus: one core without I/O, and shells over it for Twisted, asyncio and blocking sockets."""
