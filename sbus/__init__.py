"""A local message bus: routing keys, wildcards and secrets over Unix-domain SOCK_SEQPACKET sockets."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
