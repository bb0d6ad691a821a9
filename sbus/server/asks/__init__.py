"""The questions of clients to the bus: interest, lists of patterns, last values, and its master's answers."""
