"""One row: a fresh server, its phases, and SIGTERM in the middle of the attack."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.attacks import bystander, kernel
from benchmarks.attacks.attack import Attack, Part
from benchmarks.attacks.attacker import Attacker, master_of
from benchmarks.attacks.processes import BYSTANDER, Board, Swarm, bystanders, connect_as, fork, spin
from benchmarks.attacks.server import Server, serving
from benchmarks.servers import Failed

__all__ = ["PHASES", "Installation", "Plan", "Record", "attack_parts", "run"]

PHASES = ("idle", "spinners", "attack")

Record = dict[str, Any]

_TICK = 0.02
_ANSWER_TIMEOUT = 10.0
"""Seconds that a measurement may take beyond its own bound."""
_BULK_MESSAGES = 1_000_000
_SAMPLES = 3
"""Measurements of throughput in a phase, of which the median counts. Where the kernel puts the processes can change one
of them by a third: two spinners leave the pair 99,000 messages a second mostly, and 130,000 sometimes."""


@dataclass(frozen=True)
class Installation:
    """A server to measure.

    :ivar command: starts its twistd.
    :ivar options: more options of ``twistd sbus``.
    :ivar pure: whether it runs without its compiled helpers.
    """

    name: str
    command: tuple[str, ...]
    options: tuple[str, ...] = ()
    pure: bool = False


@dataclass(frozen=True)
class Plan:
    """The duration and the extent of a measurement.

    :ivar secs: seconds of round trips after the set-up of an attack, and seconds of throughput.
    :ivar rate: round trips a second.
    :ivar setup: seconds that the set-up of an attack may take; then measuring goes on without its end.
    :ivar patience: seconds after SIGTERM until the server is killed.
    :ivar files: descriptors that this process and its children may have.
    """

    secs: float
    rate: float
    setup: float
    patience: float
    files: int

    @property
    def phase_seconds(self) -> float:
        """The longest that a phase may take, SIGTERM included."""
        return self.setup + (1 + _SAMPLES) * (self.secs + bystander.GRACE) + self.patience + 2 * _ANSWER_TIMEOUT


class _Helper:
    """One of the bystander's processes."""

    def __init__(self, seconds: float, function: Callable[..., None], *args: object) -> None:
        self._pipe, child = multiprocessing.Pipe()
        self._process = fork(BYSTANDER, seconds, function, child, *args)
        child.close()

    def begin(self, *command: object) -> None:
        self._pipe.send(command)

    def finish(self, seconds: float = 0.0) -> Record:
        """Stop the measurement, and wait for its result for `seconds` plus a margin.

        :raises Failed: if there is none.
        """
        with contextlib.suppress(BrokenPipeError):
            self._pipe.send("stop")
        return self.result(seconds)

    def result(self, seconds: float = 0.0) -> Record:
        try:
            if self._pipe.poll(seconds + bystander.GRACE + _ANSWER_TIMEOUT):
                found: Record = self._pipe.recv()
                return found
        except (EOFError, OSError):
            pass
        self._process.join(0)
        raise Failed(f"a process of the bystander does not answer (exit status {self._process.exitcode})")

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def attack_parts(
    parts: Sequence[Part], address: str, files: int, deadline: float
) -> list[Callable[[Board, int], None]]:
    """The functions that a `Swarm` runs, one for each process of an attack."""

    def start(part: Part, board: Board, index: int) -> None:
        Attacker(address, board, index, deadline, files).run(part)

    return [functools.partial(start, part) for part in parts]


def run(installation: Installation, attack: Attack, plan: Plan) -> Record:
    """Measure one attack on one server; the record has an ``error`` if there are no figures of all phases."""
    record: Record = {"attack": attack.name, "server": installation.name, "processes": len(attack.parts)}
    try:
        options = (*installation.options, *attack.server_options)
        with serving(
            installation.command, options, pure=installation.pure, files=attack.server_files, linked=attack.is_linked
        ) as server:
            _measure(server, attack, plan, record)
    except (Failed, OSError) as e:  # /proc has nothing about a server that is gone
        record["error"] = str(e)
    return record


def _measure(server: Server, attack: Attack, plan: Plan, record: Record) -> None:
    count = len(attack.parts) if attack.spinners is None else attack.spinners
    with _helpers(server, attack, len(PHASES) * plan.phase_seconds) as helpers:
        phase = functools.partial(_phase, server, attack, *helpers, plan)
        record["idle"] = phase(None)
        deadline = time.monotonic() + plan.phase_seconds
        spinners = [functools.partial(spin, deadline=deadline)] * count
        with Swarm(spinners, plan.phase_seconds) as swarm:
            record["spinners"] = phase(swarm)
        record["rss_before"] = kernel.resident(server.pid)
        kernel.reset_peak(server.pid)
        deadline = time.monotonic() + plan.phase_seconds
        parts = attack_parts(attack.parts, server.address, plan.files, deadline)
        with Swarm(parts, plan.phase_seconds + _ANSWER_TIMEOUT, attack.users) as swarm:
            record["attack_phase"] = phase(swarm)
            record["rss_peak"] = kernel.peak(server.pid)
            found = kernel.connections(server.address)
            record.update(connections=found.open, kernel_bytes=found.unread, ended=found.ended)
            record.update(actions=swarm.board.actions)
            record.update(ready=swarm.board.ready, attackers_failed=swarm.failed)
            ending = server.stop(plan.patience)
            record.update(shut_s=_rounded(ending.shut), gone_s=_rounded(ending.gone), status=ending.status)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


@contextlib.contextmanager
def _helpers(server: Server, attack: Attack, seconds: float) -> Iterator[tuple[_Helper, _Helper]]:
    """Start the process of the pair or of the crowd, and that of the new clients."""
    with contextlib.ExitStack() as stack:

        def start(function: Callable[..., None], *args: object) -> _Helper:
            helper = _Helper(seconds, function, *args)
            stack.callback(helper.close)
            helper.result()
            return helper

        if attack.crowd is None:
            first = start(bystander.pair, server.address, master_of(server.address) if attack.is_linked else "")
        else:
            users = bystanders(attack.crowd.users)
            socks = [connect_as(users[number % len(users)], server.address) for number in range(attack.crowd.clients)]
            first = start(bystander.crowd, socks, attack.crowd.topics)
            for sock in socks:
                sock.close()
        yield first, start(bystander.scraper if attack.scrapes else bystander.newcomer, server.address)


def _phase(
    server: Server, attack: Attack, first: _Helper, newcomer: _Helper, plan: Plan, swarm: Swarm | None
) -> Record:
    """Round trips and new clients until `secs` after the set-up, then throughput, several times beside a swarm.

    :param first: the pair, or the crowd.
    :raises Failed: if the server or a process of the bystander has ended.
    """
    before = server.usage()
    secs = max(plan.secs, attack.secs)
    seconds = plan.setup + secs
    if attack.crowd is None:
        first.begin("trips", attack.rate or plan.rate, seconds, attack.size)
    else:
        first.begin("trips", seconds)
    newcomer.begin("connects", seconds)
    give_up = time.monotonic() + plan.setup
    while swarm is not None and not swarm.is_ready and time.monotonic() < give_up:
        _tick(server)
    end = time.monotonic() + secs
    while time.monotonic() < end:
        _tick(server)
    found: Record = {"trips": first.finish(), "newcomers": newcomer.finish()}
    samples = 1 if swarm is None else _SAMPLES
    bulk = [_bulk(first, attack, plan) for _ in range(samples)] if attack.has_throughput else []
    found["bulk"] = _throughput(bulk)
    if attack.crowd is not None and "error" not in found["trips"]:
        found["trips"] = found["bulk"]  # those during the set-up are not beside the whole attack
    after = server.usage()
    passed = after.at - before.at
    found["cpu"] = round((after.cpu - before.cpu) / passed, 3)
    found["log_per_second"] = round((after.log - before.log) / passed)
    return found


def _bulk(helper: _Helper, attack: Attack, plan: Plan) -> Record:
    """Measure throughput once; the trips of a crowd are its throughput, too."""
    if attack.crowd is None:
        helper.begin("bulk", plan.secs, _BULK_MESSAGES)
    else:
        helper.begin("bulk", plan.secs)
    return helper.finish(plan.secs)


def _throughput(samples: Sequence[Record]) -> Record:
    """Return the sample with the median throughput, and what was lost in all; or the first one that has an error.

    Without samples, there is no throughput.
    """
    if not samples:
        return {}
    for sample in samples:
        if "error" in sample:
            return sample
    ordered = sorted(samples, key=lambda sample: float(sample["per_second"]))
    lost = sum(sample["lost"] for sample in samples)
    return {**ordered[len(ordered) // 2], "lost": lost, "samples": [sample["per_second"] for sample in samples]}


def _tick(server: Server) -> None:
    server.check()
    time.sleep(_TICK)
