"""Questions of clients to the bus, besides messages: interest, lists of patterns, last values, and its master's
answers."""
