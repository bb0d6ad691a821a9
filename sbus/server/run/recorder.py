"""The recorder beside a bus (``twistd sbus --record``), as a child process.

The recorder is a separate process, so that waiting for the disk never stops the bus. It is the bus's sidecar
(`sbus.server.run.children`): a client, so the server knows nothing about journals.

The child's standard input is the bond between the two. It ends when the bus closes it, and also when the bus dies in
any other way. The recorder then receives the packets queued for it, closes the journal, and exits.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from importlib.util import find_spec

from sbus.distribution import needs
from sbus.errors import UsageError
from sbus.server.core.users import RECORDER
from sbus.server.run.children import SidecarBus, supervised_command
from sbus.syscalls.addresses import Address, connectable_text

__all__ = ["RecordedBus", "recorder_command", "require_recorder", "split_options"]


def split_options(text: str) -> list[str]:
    """Split the value of ``--record-options`` into options, as a shell would.

    :raises UsageError: if a quotation mark is missing.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--record-options={text}: {error}: quote as in a shell") from None


def require_recorder() -> None:
    """Check that the packages of the recorder are installed, without importing them.

    :raises UsageError: if they are not, with the command that installs them.
    """
    with needs("recorder"):
        if find_spec("pyarrow") is None:
            raise ModuleNotFoundError(name="pyarrow")


def recorder_command(
    address: Address, directory: str, *, dialect: str, max_packet: int, options: Sequence[str] = ()
) -> list[bytes]:
    """Return the command that runs the recorder of a bus.

    :param address: the address at which the bus listens.
    :param directory: the directory of the journal.
    :param dialect: the dialect of the bus.
    :param max_packet: the length of the longest packet in bytes.
    :param options: further options of ``twistd sbus-recorder``.
    :raises sbus.errors.AddressError: if no client can connect to this address.
    """
    words = [
        *supervised_command("sbus-recorder"),
        *(f"--socket={connectable_text(address)}", f"--journal={os.path.abspath(directory)}"),
        *(f"--dialect={dialect}", f"--max-packet={max_packet}", *options),
    ]
    return [os.fsencode(word) for word in words]


class RecordedBus(SidecarBus):
    """A bus and its recorder, which runs while the bus does."""

    sidecar = "recorder"
    uid = RECORDER
    without = "nothing is recorded"
    stop_timeout = 30.0  # the recorder gives up by itself after 20 seconds at most
