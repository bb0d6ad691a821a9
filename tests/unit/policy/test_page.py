"""The page of the docs: its policies load without a warning, and its table has every field."""

from __future__ import annotations

import grp
import pwd
import re
import textwrap
from pathlib import Path

import pytest

from sbus.policy import Identity, Policy, load
from sbus.policy.reading import LIMITS_FIELDS, RULE_FIELDS, TOP_FIELDS
from sbus.policy.review import review
from tests.support import ROOT

PAGE = (ROOT / "docs" / "policy.rst").read_text()
EXAMPLES = [
    textwrap.dedent(block)
    for block in re.findall(r"^\.\. code-block:: toml\n(?:   :.*\n)?\n((?:   .*\n|\n)+)", PAGE, re.MULTILINE)
]
IDS = {"sensord": 1001, "alice": 1002, "monitord": 1003, "plant": 2001, "workers": 2002, "services": 2003}


@pytest.fixture
def policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Policy]:
    """Load the policies of the page, on a system that has their users and groups."""
    monkeypatch.setattr(pwd, "getpwnam", lambda name: pwd.struct_passwd((name, "x", IDS[name], 0, "", "/", "")))
    monkeypatch.setattr(grp, "getgrnam", lambda name: grp.struct_group((name, "x", IDS[name], [])))
    found = []
    for number, text in enumerate(EXAMPLES):
        path = tmp_path / f"{number}.toml"
        path.write_text(text)
        found.append(load(str(path), listeners=("main", "sandbox")))
    return found


def test_examples_are_complete_and_say_nothing_in_vain(policies: list[Policy]) -> None:
    """Each loads as it is, and a review finds nothing to leave out."""
    assert len(policies) == 2
    for policy in policies:
        assert review(policy) == []


def _may(policy: Policy, who: Identity, verb: str, key: bytes) -> bool:
    rights = policy.rights_of(who)
    return (rights.publication(policy.zone(key)) if verb == "publish" else rights.subscription(key)).is_allowed


def test_examples_do_what_their_text_says(policies: list[Policy]) -> None:
    """What each is there for, allowed and refused."""
    telemetry, desktop = policies
    nobody = frozenset[int]()
    sensord, other = (Identity(uid, 100, nobody, "main", True) for uid in (IDS["sensord"], 9))
    worker = Identity(9, 100, frozenset({IDS["workers"]}), "main", True)
    assert _may(telemetry, sensord, "publish", b"sensors/kitchen/temperature")
    assert not _may(telemetry, sensord, "publish", b"sensors/kitchen/calibration")
    assert not _may(telemetry, other, "publish", b"sensors/kitchen/temperature")
    assert _may(telemetry, other, "publish", b"chat")
    assert _may(telemetry, worker, "subscribe", b"jobs/7")
    assert not _may(telemetry, worker, "subscribe", b"jobs/")
    alice = Identity(IDS["alice"], 100, nobody, "main", True)
    assert _may(desktop, alice, "subscribe", b"desktop/")
    assert not _may(desktop, alice._replace(listener="sandbox"), "subscribe", b"desktop/")
    assert _may(desktop, alice._replace(listener="sandbox"), "publish", b"apps/x")
    service = Identity(9, IDS["services"], nobody, "main", True)
    assert _may(desktop, service, "publish", b"desktop/notify/low")
    assert not _may(desktop, service, "subscribe", b"desktop/notify/low")


def test_the_tables_have_every_field() -> None:
    """The fields that the reader of the files knows, and no others."""
    named = set(re.findall(r"^   \* - ``(\w+)``$", PAGE, re.MULTILINE)) | {"rule", "limits"}
    named |= set(re.findall(r"``(\w+)``", PAGE[PAGE.index("In each ``[[limits]]``") :].split("\n\n")[0]))
    assert named == {*TOP_FIELDS, *RULE_FIELDS, *LIMITS_FIELDS}
