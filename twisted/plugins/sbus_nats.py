"""The plugin that makes ``twistd`` know ``sbus-nats``."""

from twisted.application.service import ServiceMaker

sbus_nats = ServiceMaker("sbus-nats", "sbus.link.nats.twistd", "Join a message bus to others over NATS.", "sbus-nats")
