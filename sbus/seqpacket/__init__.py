"""SEQPACKET sockets in Twisted: a transport that keeps packet edges, ports, endpoints; on every reactor."""
