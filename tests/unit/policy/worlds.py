"""Small worlds of keys, patterns, rules and clients, and the naive judge over all keys of such a world."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sbus.policy import Identity, Policy, Rule, load
from sbus.protocol.keys import matches_open

PARTS = (b"a", b"ab", b"b", b"", b"*", b"a*", b"b*", b"ab*")
SEGMENTS = (b"a", b"ab", b"abz", b"az", b"b", b"bz", b"z", b"")
"""For each prefix among the parts, segments that only it and wider ones match: so keys tell covers from overlaps."""
KEYS = [b"/".join(words) for depth in (1, 2, 3) for words in itertools.product(SEGMENTS, repeat=depth)]
KEYS += [b"/".join((*words, last)) for words in itertools.product(SEGMENTS, repeat=3) for last in (b"", b"z")]
SECRETS = [b"!/cred/1/2/3/x", b"!/cred/1/2/3/", b"!/cred//2//a", b"!/cred/10/2/3/x/y"]
SECRET_PATTERNS = (b"!/cred/", b"!/cred/1/", b"!/cred/1*/2/", b"!/cred//", b"!/cred/*/2/*/x", b"!/cred/1/2/3/x")
LISTENERS = ("main", "app")
CLIENTS = [
    Identity(uid, gid, frozenset(groups), listener, is_proven)
    for uid in (1, 2)
    for gid, groups in ((10, ()), (11, (10,)), (12, (11,)))
    for listener in LISTENERS
    for is_proven in (True, False)
]
_MATCHED: dict[bytes, frozenset[bytes]] = {}


def policy(directory: Path, *lines: str) -> Policy:
    """Load a policy with these lines."""
    path = directory / "p.toml"
    path.write_text("\n".join(("version = 1", *lines)))
    return load(str(path))


def keys_of(pattern: bytes) -> frozenset[bytes]:
    """Return the keys of the world that a pattern matches, by the plain matcher."""
    if pattern not in _MATCHED:
        _MATCHED[pattern] = frozenset(key for key in KEYS if matches_open(pattern, key))
    return _MATCHED[pattern]


@dataclass(frozen=True)
class World:
    """What a policy says, without its files."""

    rules: tuple[Rule, ...]
    closed: tuple[bytes, ...]
    is_closed: bool

    def policy(self) -> Policy:
        """Return the policy that judges as this world does."""
        return Policy(self.rules, closed=[(each, "p.toml:2") for each in self.closed], is_closed=self.is_closed)

    def publishes(self, who: Identity, key: bytes) -> bool:
        """Judge a publication by comparing every pattern with the key."""
        mine = [rule for rule in self.rules if _matches(rule, who)]
        if key.startswith(b"!/"):
            return not any(
                matches_open(each, key) for rule in mine for each in rule.deny_publish if each.startswith(b"!/")
            )
        if any(matches_open(each, key) for rule in mine for each in rule.deny_publish if not each.startswith(b"!/")):
            return False
        if any(matches_open(each, key) for rule in mine for each in rule.publish):
            return True
        if any(matches_open(each, key) for each in self.closed):
            return False
        return not self.is_closed

    def subscribes(self, who: Identity, pattern: bytes) -> bool:
        """Judge a subscription by looking at every key of the world."""
        mine = [rule for rule in self.rules if _matches(rule, who)]
        wanted = keys_of(pattern)
        if any(keys_of(each) & wanted for rule in mine for each in rule.deny_subscribe):
            return False
        allowed = [each for rule in mine for each in rule.subscribe]
        if pattern and b"*" not in pattern and not pattern.endswith(b"/"):
            allowed += [each for rule in mine for each in rule.subscribe_exact]
        if any(keys_of(each) >= wanted for each in allowed):
            return True
        if any(keys_of(each) & wanted for each in self.closed):
            return False
        return not self.is_closed

    def shuffled(self, chance: random.Random) -> World:
        """Return the same world with its tables in another order."""
        rules = chance.sample(self.rules, len(self.rules))
        return World(numbered(rules), tuple(chance.sample(self.closed, len(self.closed))), self.is_closed)


def _matches(rule: Rule, who: Identity) -> bool:
    ids = [rule.users, rule.groups]
    if not who.is_proven and any(each is not None for each in ids):
        return False
    return (
        (rule.users is None or who.uid in rule.users)
        and (rule.groups is None or bool({who.gid, *who.groups} & rule.groups))
        and (rule.listeners is None or who.listener in rule.listeners)
    )


def numbered(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Return the rules with the numbers of their places."""
    return tuple(replace(rule, number=number) for number, rule in enumerate(rules))


def random_pattern(chance: random.Random) -> bytes:
    """Return a pattern of one to three segments that some key matches; rarely the empty one."""
    if chance.random() < 0.08:
        return b""
    pattern = b"/".join(chance.choice(PARTS) for _ in range(chance.randint(1, 3)))
    return pattern + b"/" if chance.random() < 0.3 else pattern


def random_patterns(chance: random.Random, most: int = 2) -> tuple[bytes, ...]:
    """Return some patterns, often none, each once."""
    return tuple(dict.fromkeys(random_pattern(chance) for _ in range(max(0, chance.randint(-1, most)))))


def random_rule(chance: random.Random, number: int = 0) -> Rule:
    """Return a rule about some clients of the world."""

    def some(values: Sequence[int]) -> frozenset[int] | None:
        return frozenset(chance.sample(values, chance.randint(1, 2))) if chance.random() < 0.4 else None

    secret = (chance.choice(SECRET_PATTERNS),) if chance.random() < 0.2 else ()
    return Rule(
        number,
        f"r{number}-{chance.randrange(10**6)}",
        f"p.toml:{number}",
        some((1, 2)),
        some((10, 11, 12)),
        frozenset([chance.choice(LISTENERS)]) if chance.random() < 0.3 else None,
        random_patterns(chance),
        random_patterns(chance),
        random_patterns(chance),
        random_patterns(chance, 1) + secret,
        random_patterns(chance, 1),
        audit=chance.random() < 0.2,
    )


def random_world(chance: random.Random) -> World:
    """Return a world with up to five rules."""
    rules = tuple(random_rule(chance, number) for number in range(chance.randint(0, 5)))
    return World(rules, random_patterns(chance, 3), chance.random() < 0.5)
