"""``twistd sbus-recorder``: the command line, and the service that it configures."""

from __future__ import annotations

import os
import signal
from dataclasses import fields

from twisted.application.service import IService
from twisted.python import usage

from sbus.client.connecting import SOCKET_OPTION, check_address, find_address
from sbus.daemon.clock import use_monotonic_clock
from sbus.daemon.options import CommandLine, amount, choice, duration, mode, size
from sbus.daemon.process import Process
from sbus.daemon.service import ProcessServices
from sbus.daemon.signals import DeferredSignals
from sbus.daemon.supervised import SUPERVISED_FLAG, StdinWatcher
from sbus.distribution import needs
from sbus.errors import SbusError, UsageError
from sbus.protocol import controls
from sbus.protocol.keys import DIALECTS, EARLY
from sbus.recorder.settings import Settings

__all__ = ["Options", "makeService"]

_DEFAULTS = Settings()


_SOFT, _HARD, _ORDER = map(controls.choices, (b"blocking/soft", b"blocking/hard", b"order"))
_HARD = ("adaptive", *_HARD)
_SOFT = tuple(name for name in _SOFT if name != "latest")  # a journal holds every value, not only the newest ones


class Options(CommandLine):
    """The options of ``twistd sbus-recorder``."""

    command = "sbus-recorder"
    synopsis = "[options]"
    longdesc = "Record the messages of a bus in a journal, which 'sbus journal' and 'sbus spark' read."

    optParameters = [
        SOCKET_OPTION,
        ["journal", "j", None, "Directory of the journal; created if there is none (required)"],
        [
            "dialect",
            None,
            _DEFAULTS.dialect,
            "Protocol revision that the bus speaks: current or early",
            choice("dialect", *DIALECTS),
        ],
        [
            "max-packet",
            None,
            _DEFAULTS.max_packet,
            "Longest packet in bytes, as set on the bus",
            size("max-packet"),
        ],
        [
            "soft",
            None,
            None,
            f"Action of the bus when the recorder's socket is full: {', '.join(_SOFT)} [default: {_SOFT[0]}]",
            choice("soft", *_SOFT),
        ],
        [
            "hard",
            None,
            None,
            f"Action of the bus when the recorder's queue is full: {', '.join(_HARD)} [default: {_DEFAULTS.hard}: "
            "block up to --max-lag, and discard beyond]",
            choice("hard", *_HARD),
        ],
        [
            "max-lag",
            None,
            None,
            "Lag up to which the bus may block publishers for the recorder, with --hard=adaptive [default: 5s]",
            duration("max-lag", 0.1),
        ],
        [
            "order",
            None,
            None,
            f"Order in which the bus sends queued messages: {', '.join(_ORDER)} [default: {_ORDER[0]}]",
            choice("order", *_ORDER),
        ],
        [
            "metrics-file",
            None,
            None,
            "File for Prometheus's textfile collector, written every 10 s: rows, gaps, losses, lag, last sync "
            "[default: none]",
        ],
        [
            "batch-rows",
            None,
            _DEFAULTS.batch_rows,
            "Messages that complete a batch, which is then written",
            amount("batch-rows", "messages"),
        ],
        [
            "batch-bytes",
            None,
            _DEFAULTS.batch_bytes,
            "Bytes of keys and payloads that complete a batch",
            size("batch-bytes"),
        ],
        [
            "batch-time",
            None,
            None,
            "Longest time that a message waits for its batch [default: 100ms]",
            duration("batch-time"),
        ],
        [
            "sync",
            None,
            None,
            "Time between two syncs to the disk; 0: a sync after every batch [default: 1s]",
            duration("sync"),
        ],
        [
            "buffer-bytes",
            None,
            _DEFAULTS.buffer_bytes,
            "Bytes of memory for unwritten messages; at this limit the recorder stops reading",
            size("buffer-bytes"),
        ],
        [
            "max-payload",
            None,
            _DEFAULTS.max_payload,
            "Bytes in the longest payload in sealed memory that is kept; of a longer one, its length and SHA-256",
            size("max-payload"),
        ],
        [
            "segment-bytes",
            None,
            _DEFAULTS.segment_bytes,
            "Size in bytes at which the recorder begins a new segment",
            size("segment-bytes"),
        ],
        [
            "segment-age",
            None,
            None,
            "Age at which the recorder begins a new segment [default: 1h]",
            duration("segment-age", 1.0),
        ],
        [
            "keep-bytes",
            None,
            None,
            "Size of the journal in bytes above which the oldest segments are deleted [default: no limit]",
            size("keep-bytes"),
        ],
        [
            "keep-days",
            None,
            None,
            "Age in days at which segments are deleted [default: never]",
            amount("keep-days", "days", float),
        ],
        [
            "mode",
            "m",
            "0600",
            "Permissions of the journal's files, octal; users who may read the files may enter the directory",
        ],
    ]

    optFlags = [
        ["force", None, "Also delete segments that a consumer (sbus archive) has yet to read"],
        SUPERVISED_FLAG,
    ]

    compData = usage.Completions(
        optActions={
            "socket": usage.CompleteFiles(),
            "journal": usage.CompleteDirs(),
            "dialect": usage.CompleteList(list(DIALECTS)),
            "soft": usage.CompleteList(list(_SOFT)),
            "hard": usage.CompleteList(list(_HARD)),
            "order": usage.CompleteList(list(_ORDER)),
        },
        multiUse=["pattern"],
    )

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self["pattern"] = []

    def opt_pattern(self, pattern: str) -> None:
        """Pattern of messages to record; repeatable. Secret messages are never recorded. [default: everything]"""
        self["pattern"].append(os.fsencode(pattern))

    opt_p = opt_pattern

    def postOptions(self) -> None:
        """Check the options, and make the settings of them.

        :raises sbus.errors.UsageError: if options are missing or contradict each other.
        """
        if not self["journal"]:
            raise UsageError("no journal: give its directory with --journal=DIRECTORY")
        if self["metrics-file"] is not None:
            from sbus.daemon.metrics_file import MetricsFile

            self["metrics-file"] = MetricsFile(self["metrics-file"]).path
        self["socket"] = check_address(find_address(self["socket"]))
        if self["dialect"] == EARLY.name and (self["soft"] or self["hard"] or self["order"]):
            raise UsageError("--soft, --hard and --order need control messages, which the early dialect does not have")
        if self["force"] and not (self["keep-bytes"] or self["keep-days"]):
            raise UsageError("--force has no effect without a limit: give --keep-bytes or --keep-days too")
        plain = [field.name for field in fields(Settings) if field.name not in ("patterns", "mode", "force")]
        values = {name: self[name.replace("_", "-")] for name in plain}
        self.settings = Settings(
            patterns=tuple(dict.fromkeys(self["pattern"])) or _DEFAULTS.patterns,
            mode=mode(self["mode"]),
            force=bool(self["force"]),
            **{name: value for name, value in values.items() if value is not None},
        )


def makeService(options: Options) -> IService:
    """Make the service that the options configure.

    See `twisted.application.service.IServiceMaker`.

    The journal is opened and closed once before the process becomes a daemon, so that the operator sees on standard
    error why it cannot be written. With ``twistd --uid`` this is left to the service, which runs as the other user.

    :raises SystemExit: with one line, if the journal cannot be written.
    """
    from twisted.internet import reactor

    use_monotonic_clock(reactor)
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
    process = Process(() if options["supervised"] else (signal.SIGTERM, signal.SIGINT), options.pid_file)
    recorder = RecorderService(
        reactor, os.path.abspath(options["journal"]), options["socket"], options.settings, on_failure=process.fail
    )
    process.log_counters = recorder.log_counters
    services = ProcessServices(options.command)
    process.setServiceParent(services)
    if options["supervised"]:
        StdinWatcher(reactor, process.stop).setServiceParent(services)
    if options["metrics-file"] is None:
        recorder.setServiceParent(services)
    else:
        from sbus.recorder.metrics import writer  # imports prometheus_client

        writer(reactor, recorder, options["metrics-file"]).setServiceParent(services)
    return services


def _twistd(options: Options, name: str) -> object:
    """Return an option of ``twistd`` itself."""
    return None if options.parent is None else options.parent.get(name)
