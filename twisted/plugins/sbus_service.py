"""The plugin that makes ``twistd`` know ``sbus``."""

from twisted.application.service import ServiceMaker

sbus = ServiceMaker("sbus", "sbus.server.run.twistd", "A local message bus over Unix SEQPACKET sockets.", "sbus")
