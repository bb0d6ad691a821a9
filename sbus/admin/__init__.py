"""The admin socket: HTTP over a Unix stream socket, for those who operate the bus."""
