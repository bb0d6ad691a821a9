"""Reloads of a policy: what goes wrong is said, ends the reload, and leaves the policy in force."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from twisted.internet import defer

from sbus.errors import PolicyError
from sbus.policy import load
from sbus.server.ops import admin_policy
from sbus.server.run import policy as reloading
from sbus.server.run.policy import PolicyFiles
from tests.support.buses import Bus

Load = tuple[defer.Deferred[Any], Callable[[], Any]]
TEXT = 'version = 1\ndefault = "deny"\n'


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Load]:
    """Keeps the loads that have begun, which a test ends itself, as no thread runs here."""
    begun: list[Load] = []

    def begin(load: Callable[..., Any], *arguments: Any) -> defer.Deferred[Any]:
        begun.append((defer.Deferred(), lambda: load(*arguments)))
        return begun[-1][0]

    monkeypatch.setattr(reloading, "deferToThread", begin)
    return begun


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A policy file."""
    found = tmp_path / "p.toml"
    found.write_text(TEXT)
    return found


def answered(bus: Bus, pieces: Iterator[str | None]) -> Any:
    """Return the answer to a reload whose load has ended."""
    bus.settle()
    (text,) = (piece for piece in pieces if piece is not None)
    return json.loads(text)


def test_any_error_ends_a_reload_and_its_answer(loads, path):
    """A reload that fails for want of memory is answered with that, and the next one is as ever."""
    bus = Bus(policy=load(str(path)))
    files = PolicyFiles(bus.registry, str(path), ["main"])
    pieces = admin_policy.reload(files)
    assert next(pieces) is None
    loads[-1][0].errback(MemoryError())
    assert answered(bus, pieces) == {"problem": f"{path}: MemoryError() in the server: see its log, and try again"}
    pieces = admin_policy.reload(files)
    assert next(pieces) is None
    done, call = loads[-1]
    done.callback(call())
    assert answered(bus, pieces) == {"generation": 2}
    assert bus.registry.guard.permissions.coming is None


def test_a_storm_of_signals_is_two_reloads(loads, path):
    """One reload is on its way, and one more reads what has changed since it began."""
    bus = Bus(policy=load(str(path)))
    files = PolicyFiles(bus.registry, str(path), ["main"])
    for _ in range(1000):
        files.reload_at_signal()
    for number in (1, 2):
        assert len(loads) == number
        done, call = loads[-1]
        done.callback(call())
        bus.settle()
    assert len(loads) == 2
    policy = bus.registry.guard.permissions.policy
    assert policy is not None
    assert policy.generation == 3


def test_a_storm_of_requests_is_two_reloads(loads, path):
    """All who ask during a reload share the next one, and get its answer."""
    bus = Bus(policy=load(str(path)))
    files = PolicyFiles(bus.registry, str(path), ["main"])
    answers = [admin_policy.reload(files) for _ in range(1000)]
    for pieces in answers:
        assert next(pieces) is None
    done, call = loads[-1]
    done.callback(call())
    assert answered(bus, answers[0]) == {"generation": 2}
    path.write_text("no policy")
    done, call = loads[-1]
    with pytest.raises(PolicyError) as mistake:
        call()
    done.errback(mistake.value)
    for pieces in answers[1:]:
        assert answered(bus, pieces) == {"problem": str(mistake.value)}
    assert len(loads) == 2


def test_a_file_that_is_written_while_it_is_read_is_not_loaded(path, monkeypatch):
    """Half a policy may be one, without the rules that deny."""
    fstat = os.fstat

    def look_and_write(fd: int) -> os.stat_result:
        found = fstat(fd)
        with path.open("a") as file:
            file.write("# more\n")
        return found

    monkeypatch.setattr(os, "fstat", look_and_write)
    with pytest.raises(PolicyError, match="written while it was read"):
        load(str(path))
