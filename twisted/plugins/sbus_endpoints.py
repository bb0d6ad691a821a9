"""``seqpacket:`` for `serverFromString` and `clientFromString`."""

from sbus.seqpacket.endpoints import ClientParser, ServerParser

seqpacketServer = ServerParser()
seqpacketClient = ClientParser()
