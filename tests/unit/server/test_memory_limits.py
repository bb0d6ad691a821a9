"""The default limit, the options that set it, and a model of the accounts."""

from __future__ import annotations

import resource

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sbus.daemon import values
from sbus.errors import UsageError
from sbus.flood.backlogs import RANKED, REPLY
from sbus.server.bus.protocol import BusProtocol
from sbus.server.core import limits as defaults
from sbus.server.core.limits import Limits, cgroup_limits, default_max_memory
from sbus.server.core.users import User
from sbus.server.run import sbusd
from sbus.server.run.command_line import Options
from tests.support.buses import Peer
from tests.support.examples import examples
from tests.unit.server.charges import WHOAMI, bus_with, message, price

# --- the default ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "limits"),
    [
        ({}, []),
        ({"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/memory.max": "max\n"}, []),
        (
            {
                "/proc/self/cgroup": "0::/a.slice/b.service\n",
                "/sys/fs/cgroup/a.slice/b.service/memory.max": "max\n",
                "/sys/fs/cgroup/a.slice/memory.max": "1000\n",
            },
            [1000],
        ),
        (
            {
                "/proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/docker/x\n0::/\n",
                "/sys/fs/cgroup/memory/memory.limit_in_bytes": "2000\n",
                "/sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": "9223372036854771712\n",
            },
            [9223372036854771712, 2000],
        ),
    ],
)
def test_limits_of_cgroups(files, limits):
    """The limits of this cgroup and of those above it count, in either version, also where the path is the host's."""
    assert cgroup_limits(files.get) == limits


@pytest.mark.parametrize(
    ("cgroups", "rlimit", "default"),
    [
        ([], None, 500 << 20),
        ([1 << 62], None, 500 << 20),
        ([448 << 20, 1 << 40], None, 300 << 20),
        ([50 << 20], None, 16 << 20),
        ([], 300 << 20, 150 << 20),
        ([448 << 20], 300 << 20, 150 << 20),
        ([148 << 20], 300 << 20, 75 << 20),
    ],
)
def test_default_limit(monkeypatch, cgroups, rlimit, default):
    """Three quarters of what the cgroup or RLIMIT_AS leaves beside the interpreter, else half of the machine's."""
    monkeypatch.setattr(defaults, "cgroup_limits", lambda read: cgroups)
    monkeypatch.setattr(defaults, "_machine_memory", lambda: 1000 << 20)
    monkeypatch.setattr(defaults, "_address_space", lambda: 100 << 20)
    limit = resource.RLIM_INFINITY if rlimit is None else rlimit
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    assert default_max_memory.__wrapped__() == default


def test_user_memory_is_a_quarter():
    """Without options one user has a quarter; a sixteenth of the whole is set aside for the route cache."""
    account, cache = Limits(max_memory=1600).memory_account()
    assert (account.limit, account.user_limit, cache) == (1500, 400, 100)
    assert Limits(max_memory=1600, user_memory=7).memory_account()[0].user_limit == 7
    assert Limits().memory_account()[0].user_limit == default_max_memory() // 4


# --- everything at once ---------------------------------------------------------------------------


KEYS = [b"a", b"b/c", b"!/cred////x", b"long/" + b"k" * 100]
PATTERNS = [*KEYS, b"", b"*", b"b/*", b"!/cred////x*"]
CONTROLS = [
    WHOAMI,
    b"CMSG order/queue",
    b"CMSG order/stack",
    b"CMSG order/random",
    b"CMSG blocking/soft/queue",
    b"CMSG blocking/soft/discard",
    b"CMSG blocking/soft/block",
    b"CMSG blocking/soft/error",
    b"CMSG blocking/hard/block",
    b"CMSG blocking/hard/error",
]


class Account(RuleBasedStateMachine):
    """Clients of two users do anything; at any moment what is charged is the sum of what is held."""

    def __init__(self) -> None:
        super().__init__()
        self.bus = bus_with(max_memory=400_000, user_memory=150_000, queue_messages=20, total_queue_bytes=20_000)
        self.peers: list[Peer] = []

    @rule(uid=st.sampled_from([0, 1, 1, 2]))
    def connect(self, uid):
        peer = self.bus.connect(uid=uid)
        if peer.is_connected:
            self.peers.append(peer)

    @precondition(lambda self: self.peers)
    @rule(
        who=st.integers(0, 99),
        packets=st.lists(
            st.one_of(
                st.sampled_from(PATTERNS).map(lambda pattern: b"SUB " + pattern),
                st.sampled_from(PATTERNS).map(lambda pattern: b"UNSUB " + pattern),
                st.builds(message, st.sampled_from(KEYS), st.integers(0, 3000)),
                st.sampled_from(CONTROLS),
            ),
            min_size=1,
            max_size=12,
        ),
    )
    def send(self, who, packets):
        self.peers[who % len(self.peers)].send(*packets)

    @precondition(lambda self: self.peers)
    @rule(who=st.integers(0, 99))
    def many_patterns(self, who):
        peer = self.peers[who % len(self.peers)]
        peer.send(*[b"SUB %d/%d" % (who, number) for number in range(140)])

    @precondition(lambda self: self.peers)
    @rule(who=st.integers(0, 99))
    def stall(self, who):
        self.peers[who % len(self.peers)].stall()

    @precondition(lambda self: self.peers)
    @rule(who=st.integers(0, 99), packets=st.sampled_from([1, 5, None]))
    def drain(self, who, packets):
        self.peers[who % len(self.peers)].drain(packets)

    @precondition(lambda self: self.peers)
    @rule(who=st.integers(0, 99), unread=st.integers(0, 100_000), seconds=st.sampled_from([0.05, 1, 31]))
    def kernel(self, who, unread, seconds):
        self.peers[who % len(self.peers)].transport.unread = unread
        self.bus.clock.advance(seconds)

    @precondition(lambda self: self.peers)
    @rule(who=st.integers(0, 99), how=st.sampled_from(["end", "breakDown", "hang_up", "abortConnection"]))
    def leave(self, who, how):
        getattr(self.peers[who % len(self.peers)].transport, how)()
        self.bus.settle()

    @invariant()
    def charged_is_held(self):
        registry = self.bus.registry
        self.bus.settle()
        self.peers = [peer for peer in self.peers if peer.is_connected]
        users: dict[User, int] = {}
        for client in registry.clients.values():
            assert isinstance(client, BusProtocol)
            users[client.user] = users.get(client.user, 0) + client.memory()
            assert client.pattern_memory == sum(map(price, client.patterns))
            waiting = client.queue.describe()["packets"]
            backlog = client.queue.price * len(waiting) + sum(len(packet) + REPLY * reply for reply, packet in waiting)
            if client.queue._backlog is not None:
                backlog += client.queue._backlog.ranked * RANKED  # of messages that were about to be sent
            assert client.queue.memory == (backlog if client.queue.is_congested else 0)
        for left in set(registry.router.muted).difference(registry.clients.values()):
            users[left.user] = users.get(left.user, 0) + left.pattern_memory
        assert {user: user.memory for user in users} == users
        account = registry.users.budget.memory
        assert account.held == sum(users.values())
        assert registry.memory.buffers == sum(user.buffers for user in users)
        # What is due is done: nothing more than the limit is held, unless the last client alone holds it.
        assert account.held <= account.limit or len(registry.clients) <= 1

    def teardown(self):
        for peer in self.peers:
            peer.transport.abortConnection()
        self.bus.clock.pump([0.05] * 20)
        account = self.bus.registry.users.budget.memory
        assert (account.held, account.users, self.bus.registry.memory.buffers) == (0, 0, 0)
        assert len(self.bus.registry.users) == 0


TestAccount = Account.TestCase
TestAccount.settings = settings(max_examples=examples(100), stateful_step_count=30, deadline=None)


def test_the_daemon_has_the_options_of_memory():
    """``sbusd`` takes the same sizes; a malformed one is named."""
    parsed = sbusd._parse(["-f", "--max-memory=64M", "--user-memory=8MiB"])
    assert (parsed.max_memory, parsed.user_memory) == (64 << 20, 8 << 20)
    assert sbusd._parse([]).max_memory is None
    with pytest.raises(UsageError, match="--max-memory=lots: give a number of bytes, at least 1048576, such as"):
        sbusd._parse(["--max-memory=lots"])
    with pytest.raises(UsageError, match="--user-memory=65535: give a number of bytes, at least 65536"):
        sbusd._parse(["--user-memory=65535"])
    assert sbusd._parse(["--max-memory=1M", "--user-memory=64K"]).user_memory == 65_536


def test_the_daemon_has_the_option_of_clients():
    """``sbusd`` takes the same limits of users, of all and by user; a malformed one is named."""
    parsed = sbusd._parse(["-f", "--user-clients=9", "--user-clients=1001=7", "--user-clients=1002=8"])
    assert (parsed.user_clients, parsed.user_clients_of) == (9, {1001: 7, 1002: 8})
    with pytest.raises(UsageError, match="--user-clients=1001=0: give a number of clients above 0"):
        sbusd._parse(["--user-clients=1001=0"])


@pytest.mark.parametrize(
    ("option", "least"),
    [("max-memory", "1048576"), ("user-memory", "65536"), ("log-rate", "1000")],
)
def test_a_limit_that_makes_the_bus_useless_is_refused(option, least):
    """Nobody could connect, or nobody could see in the log who was refused: the error names the least value."""
    Options().parseOptions([f"--{option}={least}"])
    with pytest.raises(SystemExit, match=rf"--{option}=999: give a number of .*, at least {least}"):
        Options().parseOptions([f"--{option}=999"])


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", 1), ("65536", 65536), ("512K", 512 << 10), ("64M", 64 << 20), ("64MiB", 64 << 20), ("2g", 2 << 30)],
)
def test_sizes(text, value):
    """A size is a number of bytes, or of KiB, MiB, GiB or TiB."""
    assert values.size("x")(text) == value


@pytest.mark.parametrize("text", ["", "0", "-1", "0M", "M", "1.5G", "64X", "64 M", "64MB", "\u0661", "1e6"])
def test_no_sizes(text):
    """Anything else is refused by the option's name."""
    with pytest.raises(UsageError, match=r"^--x=.*: give a number of bytes above 0"):
        values.size("x")(text)
