"""``twistd sbus-recorder``: its options, and the service that they describe."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from twisted.application.service import IService
from twisted.internet.interfaces import IReactorFromThreads
from twisted.logger import Logger
from twisted.python import usage

from sbus.client.connecting import find_address
from sbus.daemon.options import CommandLine, amount, choice, duration, mode
from sbus.daemon.process import Process
from sbus.daemon.service import MultiService
from sbus.daemon.signals import DeferredSignals
from sbus.errors import SbusError, UsageError
from sbus.extras import needs
from sbus.flood import HARD_STRATEGIES, ORDERS, SOFT_STRATEGIES
from sbus.protocol.keys import CURRENT, EARLY
from sbus.recorder.settings import Settings
from sbus.recorder.supervised import StdinWatcher
from sbus.syscalls.addresses import parse

if TYPE_CHECKING:
    from sbus.recorder.service import RecorderService

__all__ = ["Options", "makeService"]

_DEFAULTS = Settings()


def _words(strategies: Any) -> tuple[str, ...]:
    return tuple(strategy.selector.decode().rpartition("/")[2] for strategy in strategies)


class Options(CommandLine):
    """The command line of ``twistd sbus-recorder``."""

    command = "sbus-recorder"
    synopsis = "[options]"
    longdesc = "Records a bus: writes what crosses it to a journal, which 'sbus journal' and 'sbus spark' read."

    optParameters = [
        [
            "socket",
            "s",
            None,
            "Where the bus is: a path, @NAME or /dev/unix/abstract/HEX [default: $SBUS_SOCKET, else "
            "$XDG_RUNTIME_DIR/sbus.sock if it exists, else /run/sbus.sock]",
        ],
        ["journal", "j", None, "Directory of the journal; it is made if it is not there (required)"],
        [
            "dialect",
            None,
            _DEFAULTS.dialect,
            "Revision of the protocol that the bus speaks: current or early",
            choice("dialect", CURRENT.name, EARLY.name),
        ],
        [
            "max-packet",
            None,
            _DEFAULTS.max_packet,
            "Bytes in the longest packet, as at the bus",
            amount("max-packet", "bytes"),
        ],
        [
            "soft",
            None,
            None,
            f"What the bus does when the recorder's socket is full: {', '.join(_words(SOFT_STRATEGIES))} [default: "
            f"{_words(SOFT_STRATEGIES)[0]}]",
            choice("soft", *_words(SOFT_STRATEGIES)),
        ],
        [
            "hard",
            None,
            None,
            f"What it does when the recorder's queue is full: {', '.join(_words(HARD_STRATEGIES))} [default: "
            f"{_DEFAULTS.hard}: a loss is a disconnect, and that a row of the journal]",
            choice("hard", *_words(HARD_STRATEGIES)),
        ],
        [
            "order",
            None,
            None,
            f"In which order it sends what has waited: {', '.join(_words(ORDERS))} [default: {_words(ORDERS)[0]}]",
            choice("order", *_words(ORDERS)),
        ],
        ["batch-rows", None, _DEFAULTS.batch_rows, "Messages that make a batch", amount("batch-rows", "messages")],
        [
            "batch-bytes",
            None,
            _DEFAULTS.batch_bytes,
            "Bytes in keys and payloads that make a batch",
            amount("batch-bytes", "bytes"),
        ],
        [
            "batch-time",
            None,
            None,
            "Time after which a batch is written, however small it is [default: 100ms]",
            duration("batch-time"),
        ],
        [
            "sync",
            None,
            None,
            "Time between two syncs to the disk; 0: after every batch [default: 1s]",
            duration("sync"),
        ],
        [
            "buffer-bytes",
            None,
            _DEFAULTS.buffer_bytes,
            "Bytes of memory for messages that wait for the disk; then the bus is not read any more",
            amount("buffer-bytes", "bytes"),
        ],
        [
            "segment-bytes",
            None,
            _DEFAULTS.segment_bytes,
            "Bytes after which a new segment is begun",
            amount("segment-bytes", "bytes"),
        ],
        [
            "segment-age",
            None,
            None,
            "Time after which a new segment is begun [default: 1h]",
            duration("segment-age", 1.0),
        ],
        [
            "keep-bytes",
            None,
            None,
            "Bytes that the journal may have before its oldest segments are deleted [default: no limit]",
            amount("keep-bytes", "bytes"),
        ],
        [
            "keep-days",
            None,
            None,
            "Days after which segments are deleted [default: never]",
            amount("keep-days", "days", float),
        ],
        ["mode", "m", "0600", "Permissions of the journal's files, octal; who may read them may enter its directory"],
    ]

    optFlags = [
        ["force", None, "Delete also what no consumer (sbus spark archive) has taken yet"],
        [
            "supervised",
            None,
            "End when standard input ends, and by no signal that a terminal or systemd sends to a whole group: for a "
            "parent process",
        ],
    ]

    compData = usage.Completions(
        optActions={
            "socket": usage.CompleteFiles(),
            "journal": usage.CompleteDirs(),
            "dialect": usage.CompleteList([CURRENT.name, EARLY.name]),
            "soft": usage.CompleteList(list(_words(SOFT_STRATEGIES))),
            "hard": usage.CompleteList(list(_words(HARD_STRATEGIES))),
            "order": usage.CompleteList(list(_words(ORDERS))),
        },
        multiUse=["pattern"],
    )

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self["pattern"] = []

    def opt_pattern(self, pattern: str) -> None:
        """Pattern of what is recorded; repeatable. Secret messages are never recorded. [default: everything]"""
        self["pattern"].append(os.fsencode(pattern))

    opt_p = opt_pattern

    def postOptions(self) -> None:
        """Check what the options say together."""
        if not self["journal"]:
            raise UsageError("say where the journal is to be: --journal=DIRECTORY")
        self["socket"] = find_address(self["socket"])
        if not parse(self["socket"]).name:
            raise UsageError(f"--socket={self['socket']}: one can listen there, not connect: give a path or @NAME")
        if self["dialect"] == EARLY.name and (self["soft"] or self["hard"] or self["order"]):
            raise UsageError("--soft, --hard and --order need control messages, which the early dialect has not")
        if self["force"] and not (self["keep-bytes"] or self["keep-days"]):
            raise UsageError("--force is about what is deleted: say --keep-bytes or --keep-days too")
        plain = [field.name for field in fields(Settings) if field.name not in ("patterns", "mode", "force")]
        values = {name: self[name.replace("_", "-")] for name in plain}
        self.settings = Settings(
            patterns=tuple(dict.fromkeys(self["pattern"])) or _DEFAULTS.patterns,
            mode=mode(self["mode"]),
            force=bool(self["force"]),
            **{name: value for name, value in values.items() if value is not None},
        )


def makeService(options: Options) -> IService:
    """The service that the options describe (`twisted.application.service.IServiceMaker`).

    The journal is opened already here, to see whether that works: before the process becomes a daemon, so that
    whoever starts it sees why it cannot. Only if it is to give up its privileges is the first to try who keeps it.

    :raises SystemExit: with one line, if the journal cannot be written.
    """
    from twisted.internet import reactor

    early = DeferredSignals() if not options["supervised"] else None
    try:
        with needs("recorder"):
            from sbus.recorder.service import RecorderService, open_journal
        if _twistd(options, "uid") is None:
            open_journal(options["journal"], options.settings).close()
    except SbusError as e:
        if early is not None:
            early.restore()
        raise SystemExit(f"{options.command}: {e}") from None
    if early is not None:
        early.hand_over(reactor)
    process = RecorderProcess(() if options["supervised"] else (signal.SIGTERM, signal.SIGINT))
    recorder = process.recorder = RecorderService(
        reactor, os.path.abspath(options["journal"]), options["socket"], options.settings, on_failure=process.fail
    )
    services = _Services()
    process.setServiceParent(services)
    if options["supervised"]:
        StdinWatcher(reactor, process.stop).setServiceParent(services)
    recorder.setServiceParent(services)
    return services


def _twistd(options: Options, name: str) -> Any:
    """An option of the ``twistd`` that this is a command of."""
    return None if options.parent is None else options.parent.get(name)


class _Services(MultiService):
    """All that runs in the process of a recorder."""

    _log = Logger(namespace="sbus.recorder")

    def startService(self) -> None:
        try:
            super().startService()
        except SbusError as error:
            # As a daemon it has nobody any more who would read its standard error.
            self._log.critical("{error}", error=error)
            raise SystemExit(f"{Options.command}: {error}") from None


class RecorderProcess(Process):
    """The process of a recorder: SIGUSR2 has it log its counters; if it has failed the exit status is 1.

    :ivar recorder: whose counters are logged.
    """

    recorder: RecorderService

    def _handle_signals(self) -> None:
        super()._handle_signals()
        # Not SIGUSR1, which has a daemon of twistd begin a new log file.
        signal.signal(signal.SIGUSR2, lambda *_: self._log_counters())

    def _log_counters(self) -> None:
        from twisted.internet import reactor

        IReactorFromThreads(reactor).callFromThread(self.recorder.log_counters)

    def fail(self) -> None:
        """End with status 1."""
        atexit.register(_exit_with_failure)
        self.stop()


def _exit_with_failure() -> None:
    """Twisted has no other way to give its process a status; all else is over when this is called."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
