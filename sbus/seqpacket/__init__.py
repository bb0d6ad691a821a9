"""SEQPACKET sockets in Twisted: a transport that keeps packet edges, ports and endpoints, on every reactor."""
