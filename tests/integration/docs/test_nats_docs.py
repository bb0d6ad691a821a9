"""What the page on NATS states, checked against the code."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

pytest.importorskip("nats", reason="no nats-py: pip install 'sbusd[nats]'")

from sbus.link.nats.counters import Counters
from sbus.link.nats.settings import Settings
from sbus.link.nats.twistd import Options
from sbus.link.subjects import pattern_subject, subject
from tests.integration.docs.pages import literals, page, rows

PAGE = "nats.rst"


def test_every_option_is_described() -> None:
    """The page has every option, and no other."""
    described = re.findall(r"^\.\. option:: --([a-z-]+)", page(PAGE), flags=re.MULTILINE)
    accepted = {name.rstrip("=") for name in Options().longOpt if len(name.rstrip("=")) > 1}
    assert set(described) | {"help", "version"} == (accepted - set(Options.deprecated)) | {"help", "version"}


def test_defaults_of_options() -> None:
    """The page, the help and the settings have the same defaults."""
    settings = Settings(nats=("nats://x",), name="x", listed_out=(b"",))
    text = " ".join(page(PAGE).split())
    for option, default in [
        ("queue", f"{settings.queue_bytes} bytes"),
        ("max-packet", f"{settings.max_packet} bytes"),
        ("confirm-time", f"{settings.confirm_time:g}s"),
        ("realm", f"``{settings.realm}``"),
    ]:
        found = re.search(rf"\.\. option:: --{option}=.*?Default: ([^.]+)\.", text)
        assert found, option
        assert found[1] == default


def test_every_counter_is_described() -> None:
    """The table has each counter of a bridge, and no other."""
    described = [literals(row[0])[0] for row in rows(page(PAGE), ".. list-table:: Counters")[1:]]
    assert described == [field.name for field in fields(Counters)]


@pytest.mark.parametrize("row", rows(page(PAGE), "Subjects\n========")[1:], ids=lambda row: row[0][:20])
def test_examples_of_subjects(row: list[str]) -> None:
    """Each example of a subject in the table is that of its key or pattern."""
    keys = [key for key in literals(row[0]) if "[" not in key]
    subjects = [name for name in literals(row[1]) if name.startswith("sbus.")]
    if "pattern" in row[0]:
        assert subjects == [pattern_subject("sbus", key.encode()) for key in [*keys, ""]]
    elif subjects:
        assert subjects == [subject("sbus", key.encode()) for key in keys]
