"""The plugin that makes ``twistd`` know ``sbus-queue``."""

from twisted.application.service import ServiceMaker

sbus_queue = ServiceMaker(
    "sbus-queue", "sbus.queue.twistd", "Give each job on a message bus to one worker.", "sbus-queue"
)
