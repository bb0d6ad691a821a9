"""The command line of the server: its help, and options that are wrong."""

from __future__ import annotations

import os
import re
from dataclasses import fields

import pytest

from sbus.server.core.limits import Limits
from sbus.server.run.twistd import Options
from tests.integration.server.outputs import output_of
from tests.support.harness import Bus, goes_on, refusal, run, twistd


class TestHelp:
    """The help texts."""

    def test_listed(self):
        """twistd --help lists the bus."""
        assert re.search(r"^\s+sbus\s+\S+", output_of("--help"), re.MULTILINE)

    @pytest.mark.parametrize(
        ("option", "default", "unit"),
        [
            ("socket", "/run/sbus.sock", "path"),
            ("mode", "0700", "octal"),
            ("group", "the process's", "GID"),
            ("allow-user", "admits", "UID"),
            ("credentials", "kernel", "olicy"),
            ("on-violation", "disconnect", "ignore"),
            ("dialect", "current", "early"),
            ("block-timeout", "30", "econds"),
            ("queue-messages", "65536", "essages"),
            ("queue-bytes", "67108864", "ytes"),
            ("total-queue-bytes", "268435456", "ytes"),
            ("max-packet", "409600", "ytes"),
            ("max-payload", "67108864", "ytes"),
            ("user-payloads", "64", "files"),
            ("max-clients", "16384", "lients"),
            ("max-patterns", "16384", "atterns"),
            ("max-pattern-bytes", "1048576", "ytes"),
            ("user-clients", "256", "USER=CLIENTS"),
            ("log-keep", "5x1M", "size"),
            ("last-value", "keys=10000,bytes=16M", "SIZE"),
        ],
    )
    def test_options(self, options, option, default, unit):
        """twistd sbus --help explains each option, with its default and its unit."""
        explanation = options[option]
        assert re.search(rf"\[default: .*{re.escape(default)}", explanation), explanation
        assert unit in explanation
        assert len(explanation) > 20

    def test_limits_are_last(self):
        """The limits come after all other options; options that will be gone are not there."""
        others, limits = output_of("sbus", "--help").partition("\n\n")[0].split("\nLimits:\n")
        names = [re.findall(r"^  (?:-\w,|   ) --([a-z-]+)", part, re.MULTILINE) for part in (others, limits)]
        of_limits = {field.name.replace("_", "-") for field in fields(Limits)}
        assert set(names[1]) == of_limits - {"max-match-steps", "user-clients-of"}
        accepted = {name.rstrip("=") for name in Options().longOpt if len(name.rstrip("=")) > 1}
        assert set(names[0]) == accepted - of_limits - set(Options.deprecated)

    @pytest.mark.parametrize("flag", ["reuse", "auto-close", "block-across-users", "no-interest"])
    def test_flags(self, options, flag):
        """twistd sbus --help explains each flag."""
        assert len(options[flag]) > 20

    def test_components(self):
        """The help lists the installed components, the built-in ones among them."""
        text = " ".join(output_of("sbus", "--help").split())
        for name in ("kernel:", "own-user:", "blocking/soft/queue", "blocking/hard/error", "order/random"):
            assert name in text

    def test_version(self):
        """twistd sbus --version prints the version."""
        assert re.fullmatch(r"sbus \d+\.\d+\S*\n", output_of("sbus", "--version"))


class TestWrongOptions:
    """A wrong option gives one line on standard error with the remedy, and leaves nothing half-started."""

    @pytest.mark.parametrize(
        ("option", "remedy"),
        [
            ("--block-timeout=0", "give a time of 0.001 seconds or more, such as"),
            ("--block-timeout=-1", "give a time of 0.001 seconds or more, such as"),
            ("--block-timeout=soon", "give a time of 0.001 seconds or more, such as"),
            ("--block-timeout=nan", "give a time of 0.001 seconds or more, such as"),
            ("--block-timeout=inf", "give a time of 0.001 seconds or more, such as"),
            ("--queue-messages=0", "a number of messages above 0"),
            ("--queue-messages=1.5", "a number of messages above 0"),
            ("--queue-bytes=-5", "a number of bytes above 0"),
            ("--queue-bytes=64X", "a number of bytes above 0"),
            ("--total-queue-bytes=", "a number of bytes above 0"),
            ("--max-packet=many", "a number of bytes above 0"),
            ("--max-packet=63", "64"),
            ("--max-packet=1000000000000000", "no socket sends more than"),
            ("--allow-user=²", "there is no such user"),
            ("--max-clients=0", "a number of clients above 0"),
            ("--user-clients=0", "a number of clients above 0, or that of one user"),
            ("--user-clients=nobody-here=9", "there is no such user 'nobody-here'"),
            ("--admin-group=no-such-group", "there is no such group"),
            ("--admin-group=" + "1" * 5000, "there is no such group"),
            ("--admin-group=no-such-group,metrics", "there is no such group"),
            ("--admin-group=0,all", "give GROUP, or GROUP,metrics"),
            ("--admin-group=0", "--admin=PATH too"),
            ("--log-keep=5", "the files to keep and the size of each, such as 5x1M"),
            ("--log-keep=0x1M", "the files to keep and the size of each, such as 5x1M"),
            ("--log-keep=5x", "the files to keep and the size of each, such as 5x1M"),
            ("--log-keep=5x1X", "the files to keep and the size of each, such as 5x1M"),
            ("--max-patterns=0", "a number of patterns above 0"),
            ("--max-pattern-bytes=0", "a number of bytes above 0"),
            ("--on-violation=shrug", "disconnect or ignore"),
            ("--dialect=late", "current or early"),
            ("--credentials=", "kernel"),
            ("--last-value=a,keys=0", "above 0"),
            ("--last-value=a,bytes=16X", "above 0"),
            ("--last-value=!/cred////x", "leave it out"),
            ("--last-value=!/x", "give another pattern"),
        ],
    )
    def test_value(self, option, remedy):
        """The error quotes a wrong value and says what would be right."""
        with pytest.raises(SystemExit) as caught:
            Options().parseOptions(["--socket=/nowhere", option])
        line = str(caught.value)
        assert line.startswith("sbus: ")
        assert "\n" not in line
        assert remedy in line
        name = option.partition("=")[0]
        assert name in line or name[2:].replace("-", "_") in line or "credentials policy" in line

    @pytest.mark.parametrize("option", ["--queue-bytes=64X", "--max-packet=63", "--on-violation=shrug"])
    def test_value_on_the_command_line(self, directory, option):
        """twistd prints that line and nothing else, and makes no file."""
        line = refusal(directory, option)
        assert line.endswith(" (see twistd sbus --help)")

    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            (["--no-such-option"], "--no-such-option"),
            (["superfluous"], "there are only options here"),
            (["--reuse=yes"], "--reuse"),
        ],
    )
    def test_usage(self, directory, arguments, complaint):
        """A wrong command line gives one line that points to the help."""
        line = refusal(directory, *arguments)
        assert complaint in line
        assert "twistd sbus --help" in line

    def test_as_a_daemon(self, directory):
        """Without -n the reason is on standard error too, before anything runs in the background."""
        flags = [f"--pidfile={directory}/pid", f"--logfile={directory}/log"]
        assert "missing" in refusal(directory, address=directory / "missing" / "bus", flags=flags)
        assert "--dialect=late" in refusal(directory, "--dialect=late", flags=flags)

    def test_pid_file_of_a_live_process(self, bus, directory):
        """The pid file of a daemon that runs is refused at once: no file is made or removed."""
        started = bus(flags=["-n", f"--pidfile={directory}/pid"])
        there = sorted(os.listdir(directory))
        result = run([*twistd(), "-n", f"--pidfile={directory}/pid", "sbus", f"--socket={directory}/other"], directory)
        assert result.returncode > 0
        assert f"the pid file {directory}/pid is that of process {started.pid}, which runs" in result.stderr
        assert sorted(os.listdir(directory)) == there
        assert goes_on(started)

    def test_no_log_file(self, spawn, directory):
        """If twistd cannot open its log after the socket was made, the socket is removed."""
        started = spawn(Bus, directory, flags=["-n", "--pidfile=", f"--logfile={directory}/missing/log"])
        assert started.wait() > 0
        assert os.listdir(directory) == []

    def test_no_pid_file(self, spawn, directory):
        """A pid file that cannot be written is refused before the socket is made."""
        started = spawn(Bus, directory, flags=["-n", f"--pidfile={directory}/missing/pid"])
        assert started.wait() > 0
        assert os.listdir(directory) == []
