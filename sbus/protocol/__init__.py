"""The wire protocol and its rules: packets, bundles, keys, patterns. No input or output."""
