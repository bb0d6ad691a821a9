"""Tensors between processes: python tensors.py send|receive ADDRESS"""

from __future__ import annotations

import sys
import warnings

import torch  # pyright: ignore[reportMissingImports]

import sbus

# A tensor knows no memory that is read-only. Writing to such a tensor ends the process: clone() it first.
warnings.filterwarnings("ignore", message="The given buffer is not writable")


def send(address: str) -> None:
    """Copy a tensor, once, into memory that receivers can read."""
    weights = torch.arange(100_000, dtype=torch.float32)
    with sbus.connect(address, payloads=True) as bus:
        bus.publish("weights", weights.numpy())
        bus.fence()


def receive(address: str) -> None:
    """Use the tensor where it is."""
    with sbus.connect(address, payloads=True) as bus:
        bus.subscribe("weights")
        bus.fence()
        print("waiting", flush=True)
        weights = torch.frombuffer(bus.receive().payload, dtype=torch.float32)
        print(weights.shape, weights.sum().item(), flush=True)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    role = {"send": send, "receive": receive}[sys.argv[1]]
    role(sys.argv[2])
