"""The plugins for ``seqpacket:`` in `serverFromString` and `clientFromString`."""

from sbus.seqpacket.endpoints import ClientParser, ServerParser

seqpacketServer = ServerParser()
seqpacketClient = ClientParser()
