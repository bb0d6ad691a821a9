"""Thumbnails by several workers: each picture goes to one of them, and to another one if that worker dies.

twistd sbus-queue --queue=thumbnails,deliveries=3 --directory=/var/lib/thumbnails
python3 thumbnails.py work ADDRESS DIRECTORY    as often as you like
python3 thumbnails.py add ADDRESS PICTURE...    (PPM, the format P6)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from sbus import Bus, SbusError, connect

WIDTH = 32


def thumbnail(picture: bytes) -> bytes:
    fields = picture.split(maxsplit=3)
    if len(fields) < 4 or fields[0] != b"P6" or not fields[3].startswith(b"255\n"):
        raise ValueError("not a PPM of the format P6")
    columns, height, pixels = int(fields[1]), int(fields[2]), fields[3][4:]
    step = max(1, columns // WIDTH)
    lines = [pixels[3 * columns * y : 3 * columns * (y + 1)] for y in range(0, height, step)]
    small = [b"".join(line[3 * x : 3 * x + 3] for x in range(0, columns, step)) for line in lines]
    return b"P6 %d %d 255\n%b" % (len(small[0]) // 3, len(small), b"".join(small))


def work(bus: Bus, directory: str) -> None:
    print("ready", flush=True)
    for job in bus.work("thumbnails"):
        path = Path(os.fsdecode(job.payload))
        print("working on", path.name, flush=True)
        try:
            with job:  # acknowledges the job at the end, or says that it has failed
                part = Path(directory, f".{path.name}.{os.getpid()}")
                part.write_bytes(thumbnail(path.read_bytes()))
                part.rename(Path(directory, path.name))  # two workers may do the same: the result is whole
        except (OSError, ValueError) as error:
            print(path.name, error, file=sys.stderr, flush=True)


def add(bus: Bus, *pictures: str) -> None:
    for picture in pictures:
        path = Path(picture).absolute()
        number = bus.enqueue("thumbnails", b"thumbnails/" + os.fsencode(path.name), os.fsencode(path))
        print(number, path.name)


if __name__ == "__main__":
    commands: dict[str, Callable[..., None]] = {"work": work, "add": add}
    command, address, *arguments = sys.argv[1:]
    try:
        with connect(address, reconnect=True) as bus:
            commands[command](bus, *arguments)
    except SbusError as error:
        sys.exit(str(error))
