"""The beginning of standard input, as far as the short way of ``sbus pub`` has read it (`sbus.cli.quick`)."""

from __future__ import annotations

__all__ = ["unread"]

unread = bytearray()
"""Bytes that were read from standard input, for others to read."""
