"""The options that select the bus, and the `Target` that they describe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from sbus.cli.combined import combined
from sbus.cli.deadline import Deadline
from sbus.cli.types import SECONDS, Size
from sbus.errors import ConnectError, TimedOut
from sbus.protocol.keys import CURRENT, DIALECTS
from sbus.protocol.packets import DEFAULT_MAX_PACKET

if TYPE_CHECKING:
    from sbus.client.blocking import Bus

__all__ = ["Target", "connection_options", "pass_target", "timeout_option"]


@dataclass(slots=True)
class Target:
    """The bus to use, and how to talk to it.

    :ivar socket: the value of ``--socket``, or None.
    :ivar dialect: the name of the protocol's revision.
    :ivar max_packet: bytes in the longest packet, unless the server says so itself.
    """

    socket: str | None = None
    dialect: str = CURRENT.name
    max_packet: int = DEFAULT_MAX_PACKET

    @property
    def address(self) -> str:
        from sbus.client.connecting import find_address

        return find_address(self.socket)

    def connect(self, **settings: Any) -> Bus:
        """Connect to the bus.

        :param settings: further settings, as for `sbus.client.blocking.connect`; by default a denial is raised.
        :raises sbus.errors.ConnectError: with the reason and the remedy.
        """
        from sbus.cli.command_bus import connect  # commands that need no bus begin in half the time

        return connect(self.address, dialect=self.dialect, max_packet=self.max_packet, **settings)

    def connect_by(self, deadline: Deadline, **settings: Any) -> Bus:
        """Connect to the bus until a deadline; without one, as long as `connect` tries.

        :raises sbus.errors.ConnectError: with the reason and the remedy.
        :raises sbus.errors.TimedOut: if the server has not accepted the connection in time.
        """
        from sbus.client.connecting import is_absent

        if deadline.left is not None:
            settings["timeout"] = deadline.left
        try:
            with deadline.applied():
                return self.connect(**settings)
        except ConnectError as e:
            waited = bool(settings.get("reconnect")) if is_absent(e) else deadline.has_passed
            if waited and deadline.left is not None:
                raise TimedOut(f"timed out: {e}") from None
            raise


def _store(ctx: click.Context, param: click.Parameter, value: object) -> None:
    target = ctx.find_root().ensure_object(Target)
    if value is not None:
        assert param.name is not None
        setattr(target, param.name, value)


def _complete_path(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="file")]


pass_target = click.make_pass_decorator(Target, ensure=True)
"""Call the command with the `Target` as its first argument."""


connection_options = combined(
    click.option(
        "--socket",
        "-s",
        metavar="ADDRESS",
        expose_value=False,
        callback=_store,
        shell_complete=_complete_path,
        help="Address of the bus: a path, @NAME or /dev/unix/abstract/HEX.",
    ),
    click.option(
        "--dialect",
        type=click.Choice(list(DIALECTS)),
        expose_value=False,
        callback=_store,
        help="Protocol revision that the server speaks.  [default: current]",
    ),
    click.option(
        "--max-packet",
        type=Size(64),
        metavar="SIZE",
        expose_value=False,
        callback=_store,
        help=f"Longest packet, where the server does not say it, such as 512K.  [default: {DEFAULT_MAX_PACKET}]",
    ),
)
"""The options that say which bus to use. They are accepted before and after the name of a command."""

timeout_option = click.option(
    "--timeout", "-t", type=SECONDS, default=10.0, show_default=True, metavar="SECONDS", help="Give up after SECONDS."
)
