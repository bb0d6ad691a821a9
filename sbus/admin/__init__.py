"""The admin socket: HTTP over a Unix stream socket, for operators."""
