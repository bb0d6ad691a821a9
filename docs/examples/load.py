"""A Twisted application with a bus in it: ``twistd -n -y load.py``."""

import os

from twisted.application.internet import TimerService
from twisted.application.service import Application
from twisted.internet import reactor

from sbus.seqpacket.endpoints import SeqpacketServerEndpoint
from sbus.server import BusService, Limits

bus = BusService(
    SeqpacketServerEndpoint(reactor, "load.sock", mode=0o770, reuse=True),
    limits=Limits(max_clients=100, user_clients=50, queue_bytes=1 << 20),
)


def publish_load() -> None:
    bus.registry.publish(b"machine/load", b"%.2f" % os.getloadavg()[0])


application = Application("load")
bus.setServiceParent(application)
TimerService(1.0, publish_load).setServiceParent(application)
