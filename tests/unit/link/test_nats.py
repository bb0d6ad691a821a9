"""The parts of the bridge to NATS that need no NATS: numbers, headers, the state file, options."""

from __future__ import annotations

import asyncio
import errno
import inspect
import os
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("nats", reason="no nats-py: pip install 'sbusd[nats]'")

from nats.aio.client import Client
from nats.aio.transport import TcpTransport

from sbus.errors import UsageError
from sbus.link.nats.bridge import Bridge
from sbus.link.nats.client import Connection, ConnectionFailed, connect_options
from sbus.link.nats.counters import Counters
from sbus.link.nats.incoming import Incoming, parse_headers
from sbus.link.nats.sequence import Ledger, Numbering
from sbus.link.nats.settings import Login, Settings
from sbus.link.nats.state import State, has_bridge, state_path
from sbus.link.nats.twistd import Options

_ORIGIN = b"0123456789abcdef0123456789abcdef"


def test_the_library_is_as_the_bridge_expects() -> None:
    """nats-py has the overridden and the private names that `sbus.link.nats.client` uses."""
    assert [*inspect.signature(Client._process_msg).parameters] == [
        "self",
        "sid",
        "subject",
        "reply",
        "data",
        "headers",
    ]
    assert [*inspect.signature(Client._close).parameters] == ["self", "status", "do_cbs"]
    client = Client()
    for name in ("_transport", "_reading_task", "_ping_interval_task", "_flusher_task"):
        assert getattr(client, name) is None
    assert TcpTransport()._io_writer is None
    assert "skip_subject_validation" in inspect.signature(Client.connect).parameters


# --- numbers -------------------------------------------------------------------------------------


def _enter(ledger: Ledger, key: bytes, value: str) -> int:
    run, number = map(int, value.split("."))
    return ledger.enter(_ORIGIN, key, run, number)


@given(
    st.lists(
        st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.sampled_from(["arrives", "is lost", "doubles", "restarts"])),
        max_size=60,
    )
)
def test_arrived_and_missed_are_what_was_sent(steps: list[tuple[bytes, str]]) -> None:
    """Of each key, from the first arrival to the last: sent = entered + missed, whatever is lost or doubled."""
    numbering, ledger = Numbering(1), Ledger()
    sent: dict[bytes, int] = {}
    counted: dict[bytes, int] = {}
    for key, step in steps:
        if step == "restarts":
            # What the old count has lost at its end cannot be known: begin again.
            numbering = Numbering(numbering.run + 1)
            for each in sent:
                missed = _enter(ledger, each, numbering.next(each))
                assert missed == 0
                counted[each] = sent[each] = 1
            continue
        value = numbering.next(key)
        if key in counted or step != "is lost":
            sent[key] = sent.get(key, 0) + 1
        if step != "is lost":
            missed = _enter(ledger, key, value)
            assert missed >= 0
            counted[key] = counted.get(key, 0) + missed + 1
            assert counted[key] == sent[key]
        if step == "doubles":
            assert _enter(ledger, key, value) == -1


def test_a_message_that_was_overtaken_is_dropped_and_stays_missed() -> None:
    """What comes after newer ones was counted as missed, and is not delivered: the order of a key holds."""
    ledger = Ledger()
    assert [ledger.enter(_ORIGIN, b"k", 1, number) for number in (1, 4, 2, 3, 4, 5)] == [0, 2, -1, -1, -1, 0]


def test_a_new_run_begins_at_one() -> None:
    """After an origin has begun a new count, what is missing at its beginning is missed; older runs are late."""
    ledger = Ledger()
    assert ledger.enter(_ORIGIN, b"k", 5, 10) == 0
    assert ledger.enter(_ORIGIN, b"k", 6, 3) == 2
    assert ledger.enter(_ORIGIN, b"k", 5, 11) == -1


def test_a_pattern_that_was_given_up_is_no_loss() -> None:
    """A gap of a key that was not subscribed to meanwhile counts nothing; that of other keys does."""
    ledger = Ledger()
    for key in (b"a/x", b"b/x"):
        ledger.enter(_ORIGIN, key, 1, 1)
    ledger.gave_up(b"a/")
    assert ledger.enter(_ORIGIN, b"a/x", 1, 9) == 0
    assert ledger.enter(_ORIGIN, b"b/x", 1, 9) == 7
    assert ledger.enter(_ORIGIN, b"a/x", 1, 11) == 1
    for _ in range(10_000):
        ledger.gave_up(b"other")
    assert ledger.enter(_ORIGIN, b"b/x", 1, 11) == 0  # too long ago to know


def test_patterns_that_come_and_go_take_little_memory() -> None:
    """Long patterns that were given up are forgotten earlier: clients choose them."""
    counters = Counters()
    incoming = Incoming("sbus", _ORIGIN, 1 << 20, 1 << 20, counters, lambda: None)
    for number in range(200):
        pattern = b"%d/" % number + b"x" * 60_000
        incoming.asked_for(pattern)
        incoming.gave_up(pattern)
    assert not incoming._asked
    assert sum(map(len, incoming._ledger._given_up)) <= 1 << 20
    assert incoming._ledger.enter(_ORIGIN, b"k", 1, 1) == 0


def test_the_keys_that_are_remembered_are_bounded() -> None:
    """With more keys than it remembers, an origin begins a new run, and a receiver forgets."""
    numbering, ledger = Numbering(1, most=3), Ledger(most=3)
    values = [numbering.next(b"%d" % number) for number in (1, 2, 3, 1, 4, 1)]
    assert values == ["1.1", "1.1", "1.1", "1.2", "2.1", "2.1"]
    for number in range(100):
        ledger.enter(_ORIGIN, b"%d" % number, 1, 1)
        assert len(ledger._last) == number % 3 + 1


def test_a_number_can_be_taken_back() -> None:
    """A message that could not be sent leaves no gap."""
    numbering = Numbering(7)
    assert numbering.next(b"k") == "7.1"
    numbering.take_back(b"k")
    assert numbering.next(b"k") == "7.1"


def test_long_keys_are_remembered_in_few_bytes() -> None:
    """The numbers of keys of any length take the same memory, and are those of each key alone."""
    numbering, ledger = Numbering(1), Ledger()
    tracemalloc.start()
    try:
        for _ in range(2):
            for at in range(100):
                key = b"%d/" % at + b"x" * 100_000
                value = numbering.next(key)
                assert _enter(ledger, key, value) == 0
                assert _enter(ledger, key, value) == -1
        assert tracemalloc.get_traced_memory()[0] < 1_000_000
    finally:
        tracemalloc.stop()
    numbering.take_back(key)
    assert numbering.next(key) == value


# --- headers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        b"NATS/1.0\r\nSbus-Origin: %b a\r\nSbus-Seq: 7.8\r\n\r\n",
        b"NATS/1.0\r\nSbus-Seq: 7.8\r\nSbus-Origin: %b a\r\n\r\n",
        b"NATS/1.0\r\nX: y\r\nSbus-Origin:%b a\r\nZ: \xff\r\nSbus-Seq:\t7.8 \r\n\r\n",
    ],
)
def test_headers_are_found_in_any_order(headers: bytes) -> None:
    """Origin, run and number are read from the headers, whoever else adds some."""
    assert parse_headers(headers % _ORIGIN) == (_ORIGIN, 7, 8)


@given(st.binary(max_size=200))
def test_no_bytes_break_the_parser(headers: bytes) -> None:
    """Whatever the headers are, parsing them raises nothing."""
    parse_headers(headers)
    parse_headers(b"NATS/1.0\r\nSbus-Origin: %b %b\r\nSbus-Seq: 7.8\r\n" % (_ORIGIN, headers))


@pytest.mark.parametrize(
    "headers",
    [
        b"",
        b"NATS/1.0\r\n\r\n",
        b"NATS/1.0\r\nSbus-Origin: %b a\r\n\r\n" % _ORIGIN,
        b"NATS/1.0\r\nSbus-Origin: %b a\r\nSbus-Seq: x.1\r\n\r\n" % _ORIGIN,
        b"NATS/1.0\r\nSbus-Origin: %b a\r\nSbus-Seq: 1\r\n\r\n" % _ORIGIN,
        b"NATS/1.0\r\nSbus-Origin: short a\r\nSbus-Seq: 1.1\r\n\r\n",
        b"NATS/1.0\r\nSbus-Origin: %b a\r\nSbus-Seq: 1.%b\r\n\r\n" % (_ORIGIN, b"9" * 1000),
    ],
)
def test_bad_headers_are_refused(headers: bytes) -> None:
    """Without both headers, in their form, a message is not believed."""
    assert parse_headers(headers) is None


# --- the state -----------------------------------------------------------------------------------


def test_the_state_survives_and_locks(tmp_path: Path) -> None:
    """The next holder of the file gets the identity and what was left; two at once are refused."""
    address = str(tmp_path / "bus")
    assert not has_bridge(address)
    state = State(state_path(address))
    assert has_bridge(address)
    assert state.lost == (0, 0)
    state.note(100, 70, 50, 49)
    with pytest.raises(UsageError, match="another bridge to NATS serves this bus"):
        State(state_path(address))
    state.close()
    assert not has_bridge(address)
    after = State(state_path(address))
    assert (after.bridge_id, after.lost) == (state.bridge_id, (30, 1))
    after.note(0, 0, 0, 0)
    after.close()


def test_runs_grow_though_the_clock_is_set_back(tmp_path: Path) -> None:
    """A bridge that starts again counts with a higher run than before, whatever the clock says."""
    runs = []
    for now in (1000, 2000, 500):
        state = State(str(tmp_path / "state"))
        runs.append(state.next_run(now * 10**9))
        state.close()
    assert runs == [1000 * 10**9, 2000 * 10**9, 2001 * 10**9]


def test_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without room for the state, the bridge says so: a write to the map would kill it."""

    def refuse(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(UsageError, match=r"No space left on device: .*free some space"):
        State(str(tmp_path / "state"))


@pytest.mark.parametrize("content", [b"", bytes(128), b"SBUSNAT1", b"SBUSNAT1" + bytes(992)])
def test_what_a_crash_has_left_is_written_anew(tmp_path: Path, content: bytes) -> None:
    """An empty file, one without content, and a state of another size; nothing is claimed to be lost."""
    path = tmp_path / "bus.nats"
    path.write_bytes(content)
    state = State(str(path))
    assert state.lost == (0, 0)
    assert path.stat().st_size == 128
    state.close()


@pytest.mark.parametrize("content", [b"x", b"y" * 128, bytes(129), bytes(1000) + b"disk", b"version = 1\n"])
def test_a_file_that_is_no_state_stays_as_it_is(tmp_path: Path, content: bytes) -> None:
    """Whoever names another file by mistake gets an error, and keeps the file."""
    path = tmp_path / "policy.toml"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"no state of a bridge: name another file with --state=FILE"):
        State(str(path))
    assert path.read_bytes() == content


def test_a_link_or_a_directory_is_refused(tmp_path: Path) -> None:
    """The state is never written through a symbolic link."""
    (tmp_path / "target").touch()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for path in ("link", ".", "missing/file"):
        with pytest.raises(UsageError, match="--state=FILE"):
            State(str(tmp_path / path))


# --- servers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "peers", "expected"),
    [
        (("ws://a/", "ws://b/"), [], ["ws://a/", "ws://b/"]),
        (("nats://a:4222/", "nats://b/x"), [], ["nats://a:4222/", "nats://b/x"]),
        (("nats://me:x@a:4222/",), ["nats://a:4222", "nats://c:4222"], ["nats://me:x@a:4222/", "nats://c:4222"]),
    ],
)
def test_no_server_is_forgotten(tmp_path: Path, given: tuple[str, ...], peers: list[str], expected: list[str]) -> None:
    """After a connection, all URLs that were given are tried, and the other servers of the cluster."""
    state = State(str(tmp_path / "state"))
    bridge = Bridge("bus", Settings(nats=given, name="a", listed_out=(b"t/",)), state)
    connection = cast(Connection, SimpleNamespace(peers=lambda: peers))
    assert bridge._all_servers(connection) == expected
    state.close()


# --- options -------------------------------------------------------------------------------------

_ENOUGH = ["--nats=nats://localhost", "--out=t/"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "no NATS"),
        (["--nats=localhost"], "give a URL"),
        (["--nats=nats://[::1:4222"], "give a URL"),
        (["--nats=nats://:4222"], "give a URL"),
        (["--nats=nats://host:99999"], "give a URL"),
        (["--nats=nats://host", "--nats=ws://host"], "give one kind"),
        (["--nats=nats://localhost"], "nothing may cross"),
        ([*_ENOUGH, "--out=!/cred/1/2/3/x"], "no open key matches"),
        ([*_ENOUGH, "--in=a*b"], "no open key matches"),
        ([*_ENOUGH, "--realm=a b"], "is no realm"),
        ([*_ENOUGH, "--name=a b"], "--name=a b"),
        ([*_ENOUGH, "--prefix=!/x"], "no key may begin so"),
        ([*_ENOUGH, "--user=me"], "belong together"),
        ([*_ENOUGH, "--token-file=a", "--nkey-file=b"], "exclude each other"),
        ([*_ENOUGH, "--tls-key=k"], "without --tls-cert"),
        ([*_ENOUGH, "--queue=1K"], "at least one packet must fit"),
    ],
)
def test_wrong_options_are_refused(arguments: list[str], why: str) -> None:
    """Each wrong option gets one line that names it."""
    with pytest.raises(SystemExit, match=why):
        Options().parseOptions(arguments)


def test_options_become_settings(tmp_path: Path) -> None:
    """The command line makes the settings."""
    options = Options()
    options.parseOptions([*_ENOUGH, "--in=a", "--in=b/", "--name=x", f"--socket={tmp_path}/bus", "--confirm-time=1s"])
    assert options.settings == Settings(
        nats=("nats://localhost",),
        name="x",
        listed_out=(b"t/",),
        listed_in=(b"a", b"b/"),
        confirm_time=1.0,
    )
    assert options["state"] == f"{tmp_path}/bus.nats"


def test_secrets_come_from_files(tmp_path: Path) -> None:
    """Passwords, tokens and seeds are read from files; a missing or empty one is an error."""
    path = tmp_path / "secret"
    path.write_text("s3cret\n")
    name, urls = str(path), ("nats://localhost",)
    assert connect_options(urls, Login(user="me", password_file=name)) == {"user": "me", "password": "s3cret"}
    assert connect_options(urls, Login(token_file=name)) == {"token": "s3cret"}
    assert connect_options(("nats://me:pw@localhost",), Login()) == {"user": "me", "password": "pw"}
    assert connect_options(("nats://tok@localhost",), Login()) == {"token": "tok"}
    assert connect_options(urls, Login(creds=name)) == {"user_credentials": name}
    path.write_bytes(b"\xff")
    for bad, why in (
        (os.devnull, "the file is empty: write the secret into it"),
        (str(tmp_path / "missing"), "No such file or directory: correct the path, or let this user read the file"),
        (name, "this is no text: name the file with the secret"),
    ):
        with pytest.raises(UsageError, match=f"^{bad}: {why}$"):
            connect_options(urls, Login(token_file=bad))
    with pytest.raises(UsageError, match="TLS"):
        connect_options(urls, Login(tls_ca=name))


def test_connecting_can_be_cancelled_at_any_step() -> None:
    """Whenever an attempt is cancelled that is just refused, it ends as cancelled, so that a bridge can stop."""

    async def cancel_after(steps: int) -> bool:
        attempt = asyncio.ensure_future(Connection.open(["nats://127.0.0.1:1"], {}, "bridge", print, print))
        for _ in range(steps):
            await asyncio.sleep(0)
        is_over = not attempt.cancel()
        with pytest.raises(ConnectionFailed if is_over else asyncio.CancelledError):
            await attempt
        return is_over

    async def cancel_at_each_step() -> None:
        steps = 0
        while not await cancel_after(steps):
            steps += 1
        assert steps > 3

    asyncio.run(cancel_at_each_step())
