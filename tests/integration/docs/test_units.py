"""The units of the docs and of the Debian package: systemd accepts them, and all that they name is there."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
UNITS = ROOT / "docs" / "examples" / "systemd"
NAMES = sorted(path.name for path in UNITS.iterdir())
SERVICES = [name for name in NAMES if name.endswith(".service")]


needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed: apt-get install systemd"
)
WORST_SCORE = 2.0
"""The exposure that no unit may exceed: below it systemd calls a service OK or SAFE."""


@pytest.fixture(scope="module")
def make_deb() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_deb", ROOT / "tools" / "make_deb.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def settings(name: str) -> dict[str, str]:
    """Return the settings of a unit; none is repeated, but for the list of system calls, which is refined."""
    found = re.findall(r"^(\w+)=(.*)$", (UNITS / name).read_text(), re.MULTILINE)
    once = [each for each in found if each[0] != "SystemCallFilter"]
    assert len(dict(once)) == len(once)
    return dict(found)


def named(name: str, what: str = "") -> Iterator[str]:
    """Yield the units of sbus that a unit names, and the one that a timer is for.

    :param what: only in this setting.
    """
    for setting, value in settings(name).items():
        if setting.startswith(what) and not setting.startswith(("Exec", "Description")):
            yield from re.findall(r"\bsbus[a-z-]*\.(?:service|socket|timer)\b", value)
    if name.endswith(".timer"):
        yield name.replace(".timer", ".service")


@pytest.mark.parametrize("name", NAMES)
def test_named_units_are_there(name: str) -> None:
    """Every unit that a unit names is one of the examples."""
    assert set(named(name)) <= set(NAMES)


def test_the_package_is_complete(make_deb: ModuleType) -> None:
    """The Debian package has the bus, its sockets and the recorder, and every unit that these name."""
    shipped = set(make_deb.SHIPPED_UNITS)
    assert {"sbus.service", "sbus.socket", "sbus-admin.socket", "sbus-recorder.service"} <= shipped
    for name in shipped:
        assert set(named(name)) <= shipped
        text = make_deb.unit(name)
        assert "/srv/" not in text
        if name.endswith(".service"):
            assert re.search(r"^ExecStart=/opt/sbusd/bin/\w+ ", text, re.MULTILINE)


def test_the_package_stops_what_it_ships(make_deb: ModuleType) -> None:
    """Removing the package stops all of its units."""
    script = (ROOT / "tools" / "debian" / "prerm").read_text()
    assert all(name in script for name in make_deb.SHIPPED_UNITS)


@pytest.mark.parametrize("name", SERVICES)
def test_users_and_groups_are_made(name: str) -> None:
    """The users and groups of the units are those that systemd-sysusers makes."""
    made = re.findall(r"^[ug] (\S+)", (UNITS.parent / "sysusers.d" / "sbus.conf").read_text(), re.MULTILINE)
    assert set(made) == {"sbus", "bus"}
    for setting in ("User", "Group", "SupplementaryGroups", "SocketUser", "SocketGroup"):
        assert settings(name).get(setting, "sbus") in made


@pytest.mark.parametrize("name", SERVICES)
def test_metrics_can_be_read(name: str) -> None:
    """A file of metrics is in a directory that the unit makes, and that another user (node_exporter) may enter."""
    found = settings(name)
    match = re.search(r"--metrics-file=(\S+)/([^/\s]+)", found["ExecStart"])
    if match is None:
        return
    directory = match[1].removeprefix("/var/cache/")
    assert found["CacheDirectory"] == directory
    assert int(found["CacheDirectoryMode"], 8) & 0o005 == 0o005
    assert match[2].endswith(".prom")


def test_each_file_of_metrics_has_a_name_of_its_own() -> None:
    """No two units write the same file."""
    files = re.findall(r"--metrics-file=(\S+)", " ".join(settings(name)["ExecStart"] for name in SERVICES))
    assert len(files) >= 4
    assert len(set(files)) == len(files)


@needs_systemd
@pytest.mark.parametrize("which", ["docs", "package"])
def test_systemd_accepts_them(tmp_path: Path, make_deb: ModuleType, which: str) -> None:
    """systemd-analyze finds nothing wrong with the units, beside each other and nothing else."""
    program = tmp_path / "program"
    program.touch(0o755)
    names = NAMES if which == "docs" else make_deb.SHIPPED_UNITS
    for name in names:
        text = (UNITS / name).read_text() if which == "docs" else make_deb.unit(name)
        (tmp_path / name).write_text(re.sub(r"^(Exec\w+)=\S+", rf"\1={program}", text, flags=re.MULTILINE))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *(tmp_path / name for name in names)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = [line for line in done.stderr.splitlines() if "sbus" in line]
    assert (done.returncode, said) == (0, [])


def documented_scores() -> dict[str, float]:
    """Return the scores in the table of the page on running the bus."""
    text = (ROOT / "docs" / "running.rst").read_text()
    return {name: float(score) for name, score in re.findall(r"^   \* - ``(\S+\.service)``\n     - (\S+)$", text, re.M)}


def test_every_score_is_documented() -> None:
    """The table has each service, and no score that is too high."""
    assert sorted(documented_scores()) == SERVICES
    assert max(documented_scores().values()) <= WORST_SCORE


@needs_systemd
@pytest.mark.parametrize("name", SERVICES)
def test_exposure(name: str) -> None:
    """systemd-analyze gives each service the score of the table; a version that counts otherwise, a good one."""
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", UNITS / name],
        capture_output=True,
        text=True,
        timeout=60,
    )
    found = re.search(r"Overall exposure level for \S+: ([0-9.]+)", done.stdout)
    if found is None:
        pytest.skip(f"this systemd-analyze has no --offline: it takes 250 or later: {done.stderr}")
    score = float(found[1])
    version = subprocess.run(["systemd-analyze", "--version"], capture_output=True, text=True, timeout=60).stdout
    if version.startswith("systemd 252 "):
        assert score == documented_scores()[name]
    assert score <= WORST_SCORE


@pytest.mark.parametrize("name", SERVICES)
def test_users_stay_visible(name: str) -> None:
    """No unit has PrivateUsers=: with it, every other user is the overflow UID, and the bus vouches for nobody."""
    assert "PrivateUsers" not in settings(name)


def test_directories_of_the_package() -> None:
    """tmpfiles makes the directories of the journal and of the policy, with the modes of the units."""
    text = (UNITS.parent / "tmpfiles.d" / "sbus.conf").read_text()
    made = {
        path: (mode, user, group) for path, mode, user, group in re.findall(r"^d (\S+) (\d+) (\S+) (\S+)$", text, re.M)
    }
    assert made["/var/lib/sbus"] == ("0700", "sbus", "sbus")
    assert settings("sbus-recorder.service")["StateDirectoryMode"] == "0700"
    assert made["/run/sbus"][0] == settings("sbus-alone.service")["RuntimeDirectoryMode"]
    assert made["/etc/sbus/policy.d"] == ("0750", "root", "sbus")  # the bus reads it, and cannot write it
    script = (ROOT / "tools" / "debian" / "postinst").read_text()
    assert all(path in script for path in made)  # for a system without systemd
