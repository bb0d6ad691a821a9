"""Clients of a bus: one core without I/O, and three libraries over it."""
