"""``sbus queue``: put jobs into queues, look at them, and deal with dead ones."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from contextlib import suppress
from operator import index
from typing import Any, TypeVar

import click

from sbus.cli.combined import combined
from sbus.cli.deadline import Deadline
from sbus.cli.options import Target, connection_options, pass_target, timeout_option
from sbus.cli.output import Nothing, pluralize, printable_text
from sbus.cli.pub import read_payload
from sbus.cli.streams import open_input
from sbus.cli.types import BYTES, SECONDS
from sbus.client.queues import ALL_QUEUES, no_service, queue_key
from sbus.errors import NobodyListens, SbusError, TimedOut

__all__ = ["queue"]

T = TypeVar("T")

_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_IDS = click.option("--id", "ids", type=int, multiple=True, metavar="NUMBER", help="Only this job; repeatable.")
_ANSWER_TIME = 0.5
"""Seconds to wait for the services of all queues, since nothing says how many there are."""
_NONSENSE = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""The exceptions from reading an answer that is not a queue service's; any client may answer."""
_LIMIT = click.option("--limit", "-n", type=click.IntRange(1, 100), default=10, show_default=True, help="Jobs to show.")


@click.group(
    short_help="Put jobs into queues, look at them, and deal with dead ones.",
    epilog="""\
\b
Examples:
  sbus queue put jobs thumbs/1 --file picture.jpg
  sbus queue ls
  sbus queue ls jobs
  sbus queue dead jobs
  sbus queue retry jobs
""",
)
def queue() -> None:
    """Put jobs into queues, look at them, and deal with dead ones.

    The service of a queue is 'twistd sbus-queue'. The status is 3 if no service has the queue. All commands but
    'put' and 'ls' are for root and the service's user.
    """


def _command(
    short_help: str, *options: Callable[[Any], Any], is_named: bool = True
) -> Callable[[Callable[..., None]], click.Command]:
    """Make a function a command of the group, whose first argument is the queue's name."""

    def decorate(function: Callable[..., None]) -> click.Command:
        @functools.wraps(function)
        def answered(target: Target, name: str, **how: Any) -> None:
            try:
                function(target, name, **how)
            except NobodyListens:
                raise no_service(name) from None

        of_queue: Any = pass_target(answered)
        name_argument = click.argument("name", required=is_named)
        with_options = combined(name_argument, *options, timeout_option, connection_options)
        return queue.command(short_help=short_help)(with_options(of_queue))

    return decorate


def _ask(target: Target, name: str, verb: bytes, read: Callable[[Any], T], timeout: float, **what: object) -> T:
    """Ask the service of a queue, and return its answer.

    :param read: makes the result of the answer's JSON.
    :raises SbusError: if it cannot.
    """
    key = queue_key(name, b"admin/" + verb)
    asked = {option: value for option, value in what.items() if value != ()}
    with target.connect(timeout=timeout) as bus:
        answer = bus.request(key, json.dumps(asked).encode(), timeout)
    try:
        return read(json.loads(answer))
    except _NONSENSE:
        raise SbusError(f"the answer is not a queue service's: sbus explain {key.decode()} shows who answers") from None


@_command(
    "Put a job into a queue.",
    click.argument("key", type=BYTES),
    click.argument("payload", type=BYTES, required=False),
    click.option("--file", "-f", type=click.File("rb"), metavar="FILE", help="Read the payload from FILE."),
    click.option("--id", "id", type=BYTES, metavar="ID", help="Add only one job with this ID a day."),
    click.option("--delay", type=SECONDS, metavar="SECONDS", help="Keep the job from workers for SECONDS."),
)
def put(target: Target, name: str, key: bytes, payload: bytes | None, file: Any, timeout: float, **how: Any) -> None:
    """Put a job into queue NAME, and print its number once it is on the disk.

    PAYLOAD may be '-' to read it from standard input.
    """
    if payload is not None and file is not None:
        raise click.UsageError("PAYLOAD and --file exclude each other.")
    with target.connect(timeout=timeout) as bus:
        if file is not None or payload == b"-":
            remedy = "put it into a file, and the file's path into the job"
            payload = read_payload(open_input(file, Deadline(None)), bus, timeout, remedy)
        how["delay"] = how["delay"] or 0.0
        click.echo(bus.enqueue(name, key, payload or b"", timeout=timeout, **how))


def _ask_all(target: Target, timeout: float) -> list[tuple[str, str, str]]:
    """Return each queue on the bus: its name, its counts as text, and its service's whole answer as JSON."""
    found = set()
    with target.connect(timeout=timeout) as bus:
        inbox = bus.whoami() + b"/sbus/reply/queues"
        answers = bus.subscribe(inbox)
        if not bus.has_subscribers(ALL_QUEUES):
            raise no_service()
        bus.publish(ALL_QUEUES, inbox + b"\0")
        end = time.monotonic() + _ANSWER_TIME
        with suppress(TimedOut):
            while (left := end - time.monotonic()) > 0:
                answer = answers.get(left).payload[1:]
                with suppress(*_NONSENSE):
                    queue = json.loads(answer)
                    found.add((str(queue["queue"]), _count(queue), json.dumps(queue)))
    return sorted(found)


@_command("Count the jobs of a queue, and show its workers; without NAME, of each queue.", _JSON, is_named=False)
def ls(target: Target, name: str | None, as_json: bool, timeout: float) -> None:
    """Count the jobs of queue NAME in each state, and show its workers.

    Without NAME, count those of each queue on the bus.
    """
    if name is None:
        found = _ask_all(target, timeout)
        _print([answer if as_json else f"{queue}: {counts}" for queue, counts, answer in found])
        return
    _print(_ask(target, name, b"ls", lambda found: _describe(found, as_json), timeout))


def _print(lines: list[str]) -> None:
    for line in lines:
        click.echo(printable_text(line))


def _describe(found: Any, as_json: bool) -> list[str]:
    """Return the lines that show a queue."""
    lines = [_count(found)]
    for worker in found["workers"]:
        lines.append(f"worker {worker['name']}: {worker['jobs']} of {pluralize(worker['credit'], 'job')}")
    if found["problem"]:
        lines.append(f"the disk refuses: {found['problem']}")
    return [json.dumps(found)] if as_json else lines


def _count(found: Any) -> str:
    """Return the number of jobs in each state, as text."""
    return ", ".join(f"{count} {state}" for state, count in found["jobs"].items())


def _show(target: Target, name: str, dead: bool, limit: int, ids: tuple[int], as_json: bool, timeout: float) -> None:
    def read(jobs: Any) -> list[str]:
        return [line for job in jobs for line in _describe_job(job, as_json)]

    lines = _ask(target, name, b"peek", read, timeout, dead=dead, limit=limit, ids=ids)
    if not lines:
        raise _none(name, dead, ids)
    _print(lines)


def _describe_job(job: Any, as_json: bool) -> list[str]:
    """Return the lines that show a job."""
    text = f"{job['id']} {job['key']} ({job['bytes']} B, {job['state']}, tries: {job['tries']}): {job['payload']}"
    lines = [text, f"  {job['reason']}"] if job["reason"] else [text]
    return [json.dumps(job)] if as_json else lines


def _none(name: str, dead: bool, ids: tuple[int, ...]) -> Nothing:
    state = "dead" if dead else "waiting, ready or delayed"
    return Nothing(f"queue {name} has no {state} job" + (f" {' or '.join(map(str, ids))}" if ids else ""))


@_command("Show the oldest jobs that no worker has.", _LIMIT, _IDS, _JSON)
def peek(target: Target, name: str, **how: Any) -> None:
    """Show the oldest jobs of queue NAME that no worker has, each with the first 200 bytes of its payload.

    The status is 3 if there are none.
    """
    _show(target, name, dead=False, **how)


@_command("Show the dead jobs.", _LIMIT, _IDS, _JSON)
def dead(target: Target, name: str, **how: Any) -> None:
    """Show the oldest dead jobs of queue NAME, as 'peek' does, each with its reason."""
    _show(target, name, dead=True, **how)


def _change(target: Target, name: str, verb: bytes, timeout: float, ids: tuple[int], dead: bool) -> None:
    count = _ask(target, name, verb, index, timeout, ids=ids, dead=dead)
    if ids and not count:
        raise _none(name, dead, ids)
    click.echo(pluralize(count, "job"))


@_command("Give dead jobs to workers again.", _IDS)
def retry(target: Target, name: str, ids: tuple[int], timeout: float) -> None:
    """Make dead jobs of queue NAME new ones: all of them, or those of --id.

    The status is 3 if --id names no dead job.
    """
    _change(target, name, b"retry", timeout, ids, dead=True)


@_command(
    "Delete jobs that no worker has.",
    click.option("--dead", is_flag=True, help="Delete the dead jobs instead."),
    _IDS,
    click.confirmation_option("--yes", prompt="Delete these jobs for good?"),
)
def drain(target: Target, name: str, dead: bool, ids: tuple[int], timeout: float) -> None:
    """Delete jobs of queue NAME that no worker has and that are not dead: all of them, or those of --id.

    The status is 3 if --id names no such job.
    """
    _change(target, name, b"drain", timeout, ids, dead=dead)
