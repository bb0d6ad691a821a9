"""Read policy files, and report each error with file, line and remedy.

A policy is a file, or a directory of ``*.toml``. Tables of all files together make it, so that the order of the files
changes nothing; what can be given only once (``default``, ``mode``, a rule's name) must not be given differently.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import stat
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator
from difflib import get_close_matches
from itertools import product
from typing import Any, NoReturn

from sbus.daemon.values import size
from sbus.errors import PolicyError, UsageError, Violation
from sbus.policy.names import Names
from sbus.policy.places import Places
from sbus.policy.policy import SECRET, Policy
from sbus.policy.rules import LEAST_USER_MEMORY, PATTERN_FIELDS, RESERVED_NAMES, Rule, UserLimits
from sbus.protocol.explain import never_matches
from sbus.protocol.keys import CURRENT
from sbus.protocol.patterns import shape

__all__ = ["LIMITS_FIELDS", "RULE_FIELDS", "TOP_FIELDS", "load"]

TOP_FIELDS = ("version", "default", "closed", "mode", "rule", "limits")
RULE_FIELDS = ("name", "users", "groups", "listeners", *PATTERN_FIELDS, "max_rate", "payload", "audit")
_EFFECTS = (*PATTERN_FIELDS, "max_rate", "payload")
_COUNTS = ("clients", "patterns", "accepts")
LIMITS_FIELDS = ("users", "memory", *_COUNTS)
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NAME_RULE = "use letters, digits, '_', '.' and '-', 1 to 64 of them"
_LEAST_ID_SEGMENTS = 6
"""Segments of a secret key: ``!``, ``cred``, three IDs, and at least one more, which may be empty."""
_NO_FILE = "this is no plain file: give a file, or a directory of *.toml"
_ID_SEGMENT = re.compile(rb"(?:0|[1-9][0-9]{0,9})?\**")


def load(path: str, *, listeners: Collection[str] | None = None) -> Policy:
    """Read a policy.

    :param path: a file, or a directory, of which all ``*.toml`` are read.
    :param listeners: the labels of the bus's sockets; None: not known, so that a rule may name any.
    :raises PolicyError: naming file, line and remedy.
    """
    loader = _Loader(listeners)
    for file in _files(path):
        loader.add(_File(file))
    return loader.policy()


def _files(path: str) -> list[str]:
    try:
        if not os.path.isdir(path):
            return [path]
        # A name that begins with a dot is an editor's, or is meant to be out of the way, as in a shell's "*.toml".
        names = sorted(name for name in os.listdir(path) if name.endswith(".toml") and not name.startswith("."))
    except OSError as e:
        raise PolicyError(f"{path}: the directory cannot be read: {e.strerror}; let the bus's user read it") from None
    if not names:
        raise PolicyError(f"{path}: there is no *.toml in this directory: put a policy there, or leave --policy out")
    return [os.path.join(path, name) for name in names]


def _open_at_once(path: str, flags: int) -> int:
    """Open a file; a pipe without a writer must not hang the bus at its start."""
    return os.open(path, flags | os.O_NONBLOCK)


class _File:
    """A policy file: its values and their lines."""

    def __init__(self, path: str) -> None:
        self.path = path
        text = self._text()
        self.digest = hashlib.sha256(text.encode()).digest()
        try:
            self.data: dict[str, Any] = tomllib.loads(text)
        except RecursionError:
            self.fail(1, "it is nested too deeply: a policy has tables, lists and values, and nothing deeper")
        except ValueError as e:  # also a number with more digits than Python converts
            place = re.search(r" \(at line (\d+), column \d+\)$| \(at end of document\)$", str(e))
            line = int(place[1]) if place and place[1] else text.count("\n") + 1 if place else 1
            what = str(e)[: place.start()] if place else str(e)
            self.fail(line, f"not TOML: {what}; see https://toml.io")
        self.places = Places(text)

    def _text(self) -> str:
        try:
            with open(self.path, "rb", opener=_open_at_once) as file:
                before = os.fstat(file.fileno())
                if not stat.S_ISREG(before.st_mode):
                    raise PolicyError(f"{self.path}: {_NO_FILE}")
                data = file.read()
                after = os.fstat(file.fileno())
            if (after.st_mtime_ns, after.st_size) != (before.st_mtime_ns, len(data)):
                raise PolicyError(
                    f"{self.path}: it was written while it was read: write beside it and rename, and load it again"
                )
        except FileNotFoundError:
            raise PolicyError(
                f"{self.path}: there is no such file: write one (`version = 1` is the least), or correct the path"
            ) from None
        except IsADirectoryError:
            raise PolicyError(f"{self.path}: {_NO_FILE}") from None
        except OSError as e:
            raise PolicyError(f"{self.path}: cannot be read: {e.strerror}; let the bus's user read it") from None
        try:
            return data.decode()
        except UnicodeDecodeError as e:
            line = data.count(b"\n", 0, e.start) + 1
            self.fail(line, f"byte {data[e.start]:#04x} is not UTF-8, which TOML requires: save the file as UTF-8")

    def where(self, line: int) -> str:
        return f"{self.path}:{line}"

    def fail(self, line: int, text: str) -> NoReturn:
        raise PolicyError(f"{self.where(line)}: {text}")

    def tables(self, name: str) -> Iterable[_Table]:
        """Return the tables ``[[name]]``."""
        found = self.data.get(name, [])
        lines = self.places.tables.get(name, [])
        if not isinstance(found, list) or len(found) != len(lines):
            self.fail(self.places.top.get(name, 1), f"{name} is an array of tables: write [[{name}]] above each")
        for values, places in zip(found, lines, strict=True):
            yield _Table(self, values, places, f"[[{name}]]")


class _Table:
    """A table of a file; each method returns the value of a field, or fails with its line."""

    def __init__(self, file: _File, values: dict[str, Any], places: dict[str, int], title: str) -> None:
        self._file = file
        self._values = values
        self._places = places
        self._title = title

    def __contains__(self, field: str) -> bool:
        return field in self._values

    @property
    def where(self) -> str:
        return self.where_of("")

    def where_of(self, field: str) -> str:
        return self._file.where(self._places.get(field, 1))

    def fail(self, field: str, text: str) -> NoReturn:
        self._file.fail(self._places.get(field, self._places.get("", 1)), text)

    def check_fields(self, known: Collection[str]) -> None:
        for field in self._values:
            if field not in known:
                near = get_close_matches(field, known, n=1)
                remedy = f"did you mean {near[0]}?" if near else f"the fields are {', '.join(known)}"
                self.fail(field, f"unknown field {field!r} in {self._title}: {remedy}")

    def one_of(self, field: str, words: tuple[str, ...]) -> str | None:
        value = self._values.get(field)
        if value is not None and value not in words:
            self.fail(field, f"{field} = {value!r}: write {' or '.join(map(_quoted, words))}")
        return value

    def text(self, field: str) -> str:
        value = self._values.get(field)
        if value is None:
            self.fail("", f'{self._title} has no {field}: add {field} = "…"')
        if not isinstance(value, str):
            self.fail(field, f'{field} must be a string: write {field} = "…"')
        return value

    def flag(self, field: str) -> bool | None:
        value = self._values.get(field)
        if value is not None and not isinstance(value, bool):
            self.fail(field, f"{field} must be true or false, without quotes")
        return value

    def count(self, field: str) -> int | None:
        value = self._values.get(field)
        if value is not None and (type(value) is not int or not 1 <= value < 2**63):  # TOML has no larger ones
            self.fail(field, f"{field} must be a whole number, 1 or more")
        return value

    def rate(self, field: str) -> float | None:
        value = self._values.get(field)
        if value is None:
            return None
        if type(value) not in (int, float) or not 1 <= value < math.inf:
            self.fail(
                field, f"{field} must be a number of messages a second, 1 or more; to allow none, use deny_publish"
            )
        try:
            return float(value)
        except OverflowError:
            self.fail(field, f"{field} is too large: leave it out, if there is to be no limit")

    def size(self, field: str) -> int | None:
        value = self._values.get(field)
        if value is None:
            return None
        try:
            if type(value) in (int, str):
                return size(field, LEAST_USER_MEMORY)(str(value))
        except UsageError:
            pass
        self.fail(
            field,
            f'{field} must be a number of bytes, at least {LEAST_USER_MEMORY}, such as 67108864, "64M" or "1G"',
        )

    def items(self, field: str, example: str, kinds: tuple[type, ...] = (str,)) -> list[Any]:
        value = self._values.get(field, [])
        if not isinstance(value, list) or not all(type(each) in kinds for each in value):
            self.fail(
                field,
                f"{field} must be a list of {'strings' if kinds == (str,) else 'names and numbers'}: "
                f"write {field} = [{example}]",
            )
        return value

    def people(self, field: str, example: str, resolve: Callable[[str | int], int]) -> frozenset[int] | None:
        """Return IDs; None if the field is not given."""
        if field not in self:
            return None
        found = []
        for name in self.nonempty(field, example, (str, int)):
            try:
                found.append(resolve(name))
            except UsageError as e:
                self.fail(field, f"{field}: {e}")
        return frozenset(found)

    def nonempty(self, field: str, example: str, kinds: tuple[type, ...] = (str,)) -> list[Any]:
        value = self.items(field, example, kinds)
        if not value:
            self.fail(
                field, f"{field} is empty, so that this matches nobody: name some, or leave {field} out to match all"
            )
        return value

    def patterns(self, field: str) -> tuple[bytes, ...]:
        if field not in self:
            return ()
        found: list[bytes] = []
        for text in self.items(field, '"sensors/"'):
            pattern = text.encode()
            is_secret = pattern.startswith(SECRET) and field == "deny_publish"
            try:
                (_check_secret if is_secret else _check_open)(pattern)
            except UsageError as e:
                self.fail(field, f"{field}: {text!r}: {e}")
            found += _reaching(pattern) if is_secret else (pattern,)
        return tuple(dict.fromkeys(found))


def _quoted(word: str) -> str:
    return f'"{word}"'


def _check_open(pattern: bytes) -> None:
    _check_possible(pattern)
    if CURRENT.is_secret(pattern) and pattern.startswith(SECRET):
        raise UsageError(
            "no rule gives or takes secret keys, since the kernel's word decides who reads them: take it out; only "
            "deny_publish may name patterns under !/cred/"
        )
    try:
        CURRENT.check(pattern)
    except Violation:
        raise UsageError(
            "no key has a segment '!', except secret keys, which begin with !/cred/: take it out"
        ) from None


def _check_possible(pattern: bytes) -> None:
    if b"*" in pattern and (reason := never_matches(pattern, CURRENT)) is not None:
        raise UsageError(reason)
    if b"\0" in pattern:
        raise UsageError("it can never match: a NUL ends a key; take it out")


def _check_secret(pattern: bytes) -> None:
    """Check a pattern that is compared with the whole text of secret keys."""
    _check_possible(pattern)
    wanted = shape(pattern)
    assert wanted is not None
    if not all(map(_ID_SEGMENT.fullmatch, wanted.parts[2:5])):
        raise UsageError(
            "no secret key matches it: behind !/cred/ stand a GID, a UID and a PID, in decimal, each of which may be "
            "empty or '*': write numbers"
        )
    if len(wanted.parts) < _LEAST_ID_SEGMENTS and not wanted.is_below:
        raise UsageError("no secret key matches it: it has too few segments; let it end with '/'")


def _reaching(pattern: bytes) -> Iterator[bytes]:
    """Yield the patterns of all secret keys that reach a client with the IDs of a pattern.

    A key need not name all of them: ``!/cred///7/x`` reaches the client with the PID 7, whoever it is.
    """
    parts = pattern.split(b"/")
    given = parts[2 : min(5, len(parts) - 1)]
    for ids in product(*((part, b"") if part.strip(b"*") else (b"*",) for part in given)):
        yield b"/".join((*parts[:2], *ids, *parts[2 + len(ids) :]))


class _Loader:
    """Puts the files of a policy together."""

    def __init__(self, listeners: Collection[str] | None) -> None:
        self._listeners = listeners
        self._names = Names()
        self._files: list[str] = []
        self._rules: dict[str, Rule] = {}
        self._limits: list[UserLimits] = []
        self._closed: list[tuple[bytes, str]] = []
        self._once: dict[str, tuple[str, str]] = {}
        self._digest = hashlib.sha256()

    def policy(self) -> Policy:
        default, where = self._once.get("default", ("allow", ""))
        mode, _ = self._once.get("mode", ("enforce", ""))
        return Policy(
            self._rules.values(),
            closed=self._closed,
            is_closed=default == "deny",
            default_where=where,
            is_audit=mode == "audit",
            limits=self._limits,
            files=self._files,
            digest=self._digest.hexdigest(),
        )

    def add(self, file: _File) -> None:
        self._files.append(file.path)
        self._digest.update(file.digest)
        top = _Table(file, file.data, file.places.top, "a policy")
        if "version" not in top:
            top.fail("", "there is no version: begin the file with `version = 1`")
        if file.data["version"] != 1 or type(file.data["version"]) is not int:
            top.fail("version", "this sbus reads policies of version 1: write `version = 1`, or update sbus")
        top.check_fields(TOP_FIELDS)
        for field, words in (("default", ("allow", "deny")), ("mode", ("enforce", "audit"))):
            value = top.one_of(field, words)
            if value is not None:
                first, where = self._once.setdefault(field, (value, top.where_of(field)))
                if first != value:
                    top.fail(field, f"{field} is {value!r} here, and {first!r} at {where}: give it once")
        self._closed += ((each, top.where_of("closed")) for each in top.patterns("closed"))
        for table in file.tables("rule"):
            self._add_rule(table)
        for table in file.tables("limits"):
            self._add_limits(table)

    def _add_rule(self, table: _Table) -> None:
        table.check_fields(RULE_FIELDS)
        name = table.text("name")
        if not _NAME.fullmatch(name):
            table.fail("name", f"a rule cannot be called {name!r}: {_NAME_RULE}")
        if name in RESERVED_NAMES:
            table.fail("name", f"the name {name!r} is reserved, for refusals without a rule: choose another one")
        if name in self._rules:
            table.fail("name", f"the rule at {self._rules[name].where} is called {name!r} too: choose another name")
        patterns = {field: table.patterns(field) for field in PATTERN_FIELDS}
        rule = Rule(
            len(self._rules),
            name,
            table.where,
            table.people("users", '"sensord"', self._names.user),
            table.people("groups", '"plant"', self._names.group),
            self._listeners_of(table),
            **patterns,
            max_rate=table.rate("max_rate"),
            payload=table.flag("payload"),
            audit=bool(table.flag("audit")),
        )
        if not any(patterns.values()) and rule.max_rate is None and rule.payload is None:
            table.fail("", f"the rule {name!r} has no effect: give it one of {', '.join(_EFFECTS)}, or delete it")
        self._rules[name] = rule

    def _listeners_of(self, table: _Table) -> frozenset[str] | None:
        if "listeners" not in table:
            return None
        names: list[str] = table.nonempty("listeners", '"main"')
        for name in names:
            if not _NAME.fullmatch(name):
                table.fail("listeners", f"listeners: no socket can be called {name!r}: {_NAME_RULE}")
            if self._listeners is not None and name not in self._listeners:
                known = ", ".join(sorted(self._listeners))
                table.fail(
                    "listeners",
                    f"listeners: the bus has no socket {name!r}: it has {known}; add --listen={name}=ADDRESS, or "
                    "correct the name",
                )
        return frozenset(names)

    def _add_limits(self, table: _Table) -> None:
        table.check_fields(LIMITS_FIELDS)
        users = table.people("users", '"monitord"', self._names.user)
        if users is None:
            table.fail("", "[[limits]] has no users: name those whose shares it gives (--user-* give those of all)")
        limits = UserLimits(
            users,
            table.count("clients"),
            table.count("patterns"),
            table.size("memory"),
            table.count("accepts"),
            table.where,
        )
        if limits[1:5] == (None,) * 4:
            table.fail("", f"[[limits]] has no effect: give one of memory, {', '.join(_COUNTS)}, or delete it")
        self._limits.append(limits)
