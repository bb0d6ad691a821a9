"""The recorder's settings and options."""

from __future__ import annotations

from pathlib import Path

import pytest

from sbus.errors import UsageError
from sbus.recorder.settings import Settings
from sbus.recorder.twistd import Options, makeService


@pytest.mark.parametrize("pattern", [b"!/cred////inbox", b"!/cred/1/2/3/", b"!/", b"!"])
def test_secrets_are_not_recorded(pattern: bytes) -> None:
    """A pattern that matches secret messages is refused; the error does not quote the secret part."""
    with pytest.raises(UsageError, match="secret messages are never recorded") as refused:
        Settings(patterns=(b"a", pattern))
    assert "inbox" not in str(refused.value)


@pytest.mark.parametrize(("mode", "directory"), [(0o600, 0o700), (0o640, 0o750), (0o644, 0o755), (0o660, 0o770)])
def test_who_may_read_the_files_may_enter_the_directory(mode: int, directory: int) -> None:
    """The mode of the directory follows from the mode of the files."""
    assert Settings(mode=mode).directory_mode == directory


def settings_of(*arguments: str) -> Settings:
    options = Options()
    options.parseOptions(["--socket=/run/bus", "--journal=there", *arguments])
    return options.settings


def test_options_become_settings() -> None:
    """Each option sets the setting of its name; without options the settings are the defaults."""
    assert settings_of() == Settings()
    assert settings_of(
        *("--pattern=a/", "-p", "b/*", "--pattern=a/", "--soft=block", "--hard=block", "--max-lag=2s", "--order=stack"),
        *("--batch-rows=5", "--batch-bytes=6", "--batch-time=250ms", "--sync=0", "--buffer-bytes=7", "--max-packet=99"),
        *("--max-payload=10",),
        *("--segment-bytes=8", "--segment-age=2h", "--keep-bytes=9", "--keep-days=1.5", "--force", "--mode=0640"),
    ) == Settings(
        patterns=(b"a/", b"b/*"),
        soft="block",
        hard="block",
        order="stack",
        batch_rows=5,
        batch_bytes=6,
        batch_time=0.25,
        sync=0.0,
        buffer_bytes=7,
        max_lag=2.0,
        max_packet=99,
        max_payload=10,
        segment_bytes=8,
        segment_age=7200.0,
        keep_bytes=9,
        keep_days=1.5,
        force=True,
        mode=0o640,
    )


@pytest.mark.parametrize(
    ("argument", "remedy"),
    [
        ("--journal=", "--journal=DIRECTORY"),
        ("--socket=systemd", "give a path or @NAME"),
        ("--pattern=!/cred////x", "never recorded"),
        ("--pattern=a/!/b", "not allowed"),
        ("--soft=drop", "queue or discard or block or error"),
        ("--hard=queue", "adaptive or discard or block or error"),
        ("--max-lag=1ms", "of 0.1 seconds or more"),
        ("--order=none", "queue or stack or random"),
        ("--sync=soon", "give a time, such as 500ms, 1s"),
        ("--sync=-1", "give a time"),
        ("--batch-time=1 s", "give a time"),
        ("--segment-age=10ms", "of 1 seconds or more"),
        ("--batch-rows=0", "a number of messages above 0"),
        ("--batch-bytes=2147483648", "at most 1073741824"),
        ("--max-payload=2147483648", "at most 1073741824"),
        ("--buffer-bytes=1000", "raise --buffer-bytes or lower --batch-bytes"),
        ("--keep-days=0", "a number of days above 0"),
        ("--mode=0440", "the owner must be able to read and write"),
        ("--mode=999", "three octal digits"),
        ("--force", "--keep-bytes or --keep-days"),
        ("--dialect=late", "current or early"),
        ("--nonsense", "not recognized"),
    ],
)
def test_wrong_options(argument: str, remedy: str) -> None:
    """A wrong option ends the program with one line that has the remedy."""
    with pytest.raises(SystemExit) as end:
        settings_of(argument)
    line = str(end.value)
    assert line.startswith("sbus-recorder: ")
    assert line.endswith(" (see twistd sbus-recorder --help)")
    assert "\n" not in line
    assert remedy in line


def test_early_dialect_has_no_settings() -> None:
    """Flood control cannot be chosen in the early dialect."""
    with pytest.raises(SystemExit, match="the early dialect does not have"):
        settings_of("--dialect=early", "--hard=block")
    assert settings_of("--dialect=early").dialect == "early"


def test_without_arrow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If PyArrow is not installed, the error names the extra that installs it."""
    import sys

    for name in sorted(sys.modules, reverse=True):
        if name.startswith(("sbus.recorder.service", "sbus.recorder.pipeline", "sbus.recorder.ret", "sbus.journal")):
            package, _, child = name.rpartition(".")
            monkeypatch.setattr(sys.modules[package], child, sys.modules[name])  # so that monkeypatch restores it
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    options = Options()
    options.parseOptions([f"--socket={tmp_path}/bus", f"--journal={tmp_path}/journal"])
    with pytest.raises(SystemExit, match=r"sbus-recorder: .*pip install 'sbusd\[recorder\]'"):
        makeService(options)
