"""What a row of the table is: an attack, and the clients that are measured beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.attacks.attacker import Attacker
from benchmarks.attacks.processes import User

__all__ = ["ALL", "Attack", "Crowd", "Part"]

ALL = "all"
"""The name of all attacks at once."""

Part = Callable[[Attacker], None]


@dataclass(frozen=True)
class Crowd:
    """Bystanders of which each has one message under way, in the place of the pair.

    :ivar clients: the clients.
    :ivar users: the users that these belong to, in turn.
    :ivar topics: keys beside their own that the clients subscribe to, in turn: ``by/topic/0`` and so on.
    """

    clients: int
    users: int = 1
    topics: int = 0


@dataclass(frozen=True)
class Attack:
    """One attack.

    :ivar title: the action of the attacking user.
    :ivar parts: one function for each process.
    :ivar users: the users of these processes; by default all are of the one attacking user.
    :ivar spinners: the spinners to compare with, if not one for each process.
    :ivar crowd: the bystanders, if they are not the pair.
    :ivar rate: the pair's round trips a second, if not those of the command line.
    :ivar size: bytes in the payload of the pair's messages, at least.
    :ivar secs: seconds of round trips after the set-up, at least.
    :ivar has_throughput: whether throughput is measured.
    :ivar scrapes: whether scrapes of the admin socket are counted in the place of new clients.
    :ivar is_usual: whether the row is measured if no names are given.
    :ivar is_linked: whether the server has a master, on which the second client of the pair is.
    :ivar server_files: descriptors that the server may have, if not as usual.
    :ivar server_options: more options of ``twistd sbus``.
    """

    name: str
    title: str
    parts: tuple[Part, ...]
    users: tuple[User, ...] = ()
    spinners: int | None = None
    crowd: Crowd | None = None
    rate: float | None = None
    size: int = 0
    secs: float = 0.0
    has_throughput: bool = True
    scrapes: bool = False
    is_usual: bool = True
    is_linked: bool = False
    server_files: int | None = None
    server_options: tuple[str, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether one user attacks and the pair is measured as usual."""
        return not (self.users or self.crowd or self.rate or self.scrapes)
