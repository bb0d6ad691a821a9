"""The bus itself: connections, the registry, the way of a message, and who pays for it."""
