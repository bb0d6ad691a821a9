"""A camera and its viewers: python camera.py film|watch ADDRESS FRAMES"""

from __future__ import annotations

import sys

import numpy as np

import sbus

SHAPE = (1080, 1920, 3)


def film(address: str, frames: int) -> None:
    """Publish each frame from the same array."""
    frame = np.empty(SHAPE, np.uint8)
    with sbus.connect(address, payloads=True) as bus:
        for number in range(frames):
            frame[:] = number  # here the driver of a camera writes its picture
            bus.publish("camera/front", frame.data)
        bus.fence()


def watch(address: str, frames: int) -> None:
    """Look at each frame where it is."""
    with sbus.connect(address, payloads=True) as bus:
        bus.flood_control(hard="block")  # the camera waits for its viewers
        bus.subscribe("camera/front")
        bus.fence()
        print("watching", flush=True)
        for _ in range(frames):
            message = bus.receive()
            frame = np.frombuffer(message.payload, np.uint8).reshape(SHAPE)
            print(frame.shape, frame.mean(), frame.flags.writeable, flush=True)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    role = {"film": film, "watch": watch}[sys.argv[1]]
    role(sys.argv[2], int(sys.argv[3]))
