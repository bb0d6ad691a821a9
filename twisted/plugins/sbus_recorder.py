"""The plugin that makes ``twistd`` know ``sbus-recorder``."""

from twisted.application.service import ServiceMaker

sbus_recorder = ServiceMaker(
    "sbus-recorder", "sbus.recorder.twistd", "Record a message bus into a journal.", "sbus-recorder"
)
