"""What clients ask the bus besides messages: interest, lists of patterns, last values, and its master's answers."""
