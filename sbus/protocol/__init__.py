"""The wire protocol (no I/O): packets, bundles, keys, patterns, control messages."""
