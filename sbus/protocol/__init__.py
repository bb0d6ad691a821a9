"""The wire protocol and its rules: packets, bundles, keys, patterns, control messages. No I/O."""
