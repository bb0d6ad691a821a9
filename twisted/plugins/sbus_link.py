"""The plugin that makes ``twistd`` know ``sbus-link``."""

from twisted.application.service import ServiceMaker

sbus_link = ServiceMaker("sbus-link", "sbus.link.twistd", "Link a message bus to its master.", "sbus-link")
