"""The plugins that make `serverFromString` and `clientFromString` know ``seqpacket:``."""

from sbus.seqpacket.endpoints import ClientParser, ServerParser

seqpacketServer = ServerParser()
seqpacketClient = ClientParser()
