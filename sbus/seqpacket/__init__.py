"""SEQPACKET sockets in Twisted: transport, ports and endpoints, on every reactor."""
