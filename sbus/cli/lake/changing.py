"""``sbus lake compact``, ``prune``, ``forget`` and ``vacuum``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from sbus.cli.lake.options import lake_argument, open_lake
from sbus.cli.output import Progress, describe_os_error, pluralize
from sbus.cli.patterns import RECORDED_PATTERN
from sbus.cli.types import Duration, Number
from sbus.errors import StorageError

if TYPE_CHECKING:
    from sbus.lake.table import Table

__all__ = ["compact", "forget", "prune", "vacuum"]


@click.command(short_help="Merge the small files of closed hours.")
@lake_argument
def compact(location: str, state: str | None) -> None:
    """Merge the small files of each closed hour into sorted files of 128 to 256 MiB.

    The archive and readers may continue: they see each row once at any time. The command may be killed at any time; run
    it again. The archive does this by itself, unless --no-compact is given.
    """
    table = open_lake(location, state)
    from sbus.lake.maintenance import compact as run

    progress = Progress()
    with _writing(table):
        done = run(table, progress=lambda text: progress.show(f"compacting {text}"))
    progress.clear()
    click.echo(
        f"compacted {pluralize(done.hours, 'hour')}: {pluralize(done.before, 'file')} into {done.after:,}, "
        f"{pluralize(done.rows, 'row')}",
        err=True,
    )
    _warn_of_left(done.left)


@click.command(short_help="Remove old hours.")
@lake_argument
@click.option(
    "--keep-days",
    type=Number(min=0),
    required=True,
    metavar="DAYS",
    help="Age in days from which on an hour is removed; fractions are allowed.",
)
def prune(location: str, state: str | None, keep_days: float) -> None:
    """Remove the hours that are older than a number of days.

    An hour ahead of the clock goes by the age of its files: the clock was wrong when it was recorded.
    """
    table = open_lake(location, state)
    from sbus.lake.maintenance import prune as run

    with _writing(table):
        done = run(table, keep_days)
    click.echo(f"removed {pluralize(done.hours, 'hour')} with {pluralize(done.dropped, 'row')}", err=True)
    _warn_of_left(done.left)


@click.command(short_help="Remove the messages of a key.")
@lake_argument
@click.option(
    "--key",
    type=RECORDED_PATTERN,
    required=True,
    metavar="PATTERN",
    help="Key, or a pattern of keys, to remove the messages of.",
)
@click.pass_context
def forget(ctx: click.Context, location: str, state: str | None, key: bytes) -> None:
    """Remove the messages whose key matches PATTERN, and the files that had them.

    The exit status is 0 if no file of the lake still has such a message. It is 1 if some files could not be changed,
    because an archive or another program was working on them: run the command again.

    Journals and copies of the lake still have these messages, and so has a query that is running,
    until its process ends.
    """
    table = open_lake(location, state)
    from sbus.lake.maintenance import forget as run

    progress = Progress()
    with _writing(table):
        done = run(table, key, progress=lambda text: progress.show(f"looking at {text}"))
    progress.clear()
    click.echo(f"removed {pluralize(done.dropped, 'message')} from {pluralize(done.hours, 'hour')}", err=True)
    _warn_of_left(done.left)
    if done.left:
        ctx.exit(1)


@click.command(short_help="Delete replaced files early.")
@lake_argument
@click.option(
    "--older-than",
    type=Duration(),
    metavar="TIME",
    help="How long ago they were replaced, such as 0s or 12h.  [default: 1h; of Delta 7d]",
)
def vacuum(location: str, state: str | None, older_than: float | None) -> None:
    """Delete files that were replaced, and the leftovers of killed processes.

    Compaction does this by itself after an hour, and in Delta's format after seven days. A query that
    still reads such a file fails; a version of a Delta table that needs it can no longer be read.
    """
    table = open_lake(location, state)
    with _writing(table), table.state.maintaining():
        deleted = table.vacuum(table.grace if older_than is None else older_than)
    click.echo(f"deleted {pluralize(deleted, 'file')}", err=True)


@contextlib.contextmanager
def _writing(table: Table) -> Iterator[None]:
    """Translate errors of the disk; an hour is changed as a whole, or not at all."""
    try:
        yield
    except PermissionError as e:
        raise StorageError(
            f"{describe_os_error(e)}: run this as the owner of the lake, or as root, which leaves it to its owner"
        ) from e
    except OSError as e:
        raise StorageError(
            f"{table.location}: it cannot be changed: {e.strerror or e}: no row is lost, and the hours that are done "
            "stay done; make room there if the disk is full, and run this again"
        ) from e


def _warn_of_left(left: int) -> None:
    if left:
        click.echo(
            f"{pluralize(left, 'file')} left, because a batch is not done, or another process has replaced files: run "
            "this again when the archive is done with its batch",
            err=True,
        )
