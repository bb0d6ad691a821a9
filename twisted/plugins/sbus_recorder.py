"""``twistd sbus-recorder``."""

from twisted.application.service import ServiceMaker

sbus_recorder = ServiceMaker(
    "sbus-recorder", "sbus.recorder.twistd", "Records an sbus into a journal.", "sbus-recorder"
)
