"""Finding Java, and the errors for a missing or a wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest

from sbus.errors import UsageError
from sbus.spark.runtime.java import find_java

MODULES = "java.base jdk.incubator.vector"


def install(home: Path, version: str = "17.0.15", modules: str = MODULES) -> Path:
    """Make a directory that looks like an installation of Java."""
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.touch(0o755)
    (home / "release").write_text(f'JAVA_VERSION="{version}"\nMODULES="{modules}"\n')
    return java


def test_java_home_goes_before_path(tmp_path: Path):
    """JAVA_HOME takes precedence over PATH."""
    home, other = install(tmp_path / "home"), install(tmp_path / "other")
    assert find_java({"JAVA_HOME": str(tmp_path / "home"), "PATH": str(other.parent)}) == str(home)
    assert find_java({"PATH": str(other.parent)}) == str(other)


def test_a_link_to_java_is_followed(tmp_path: Path):
    """A link in PATH, as distributions make it, leads to the installation that is checked."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").symlink_to(install(tmp_path / "jvm", version="11.0.2"))
    with pytest.raises(UsageError, match="is Java 11, and Spark needs Java 17"):
        find_java({"PATH": str(tmp_path / "bin")})


def test_no_java(tmp_path: Path):
    """Without Java, the error names the package to install."""
    with pytest.raises(UsageError, match=r"needs Java 17.*apt install openjdk-17-jre-headless.*JAVA_HOME"):
        find_java({"PATH": str(tmp_path)})


def test_java_home_without_java(tmp_path: Path):
    """A JAVA_HOME without a Java, or with one that is too old, is passed over if PATH has one that can run Spark."""
    other = install(tmp_path / "other")
    install(tmp_path / "old", version="11.0.2")
    for home in ("nowhere", "old"):
        assert find_java({"JAVA_HOME": str(tmp_path / home), "PATH": str(other.parent)}) == str(other)
    with pytest.raises(UsageError, match=r"JAVA_HOME is .*/nowhere.*unset it"):
        find_java({"JAVA_HOME": str(tmp_path / "nowhere"), "PATH": str(tmp_path / "old" / "bin")})


@pytest.mark.parametrize("version", ["1.8.0_392", "11.0.2"])
def test_an_old_java(tmp_path: Path, version: str):
    """A Java that is too old is refused before Spark starts it."""
    install(tmp_path, version=version)
    with pytest.raises(UsageError, match=r"is Java (8|11), and Spark needs Java 17"):
        find_java({"JAVA_HOME": str(tmp_path)})


def test_a_java_without_the_vector_module(tmp_path: Path):
    """A trimmed Java without the module that Spark needs is refused, with the name of the module."""
    install(tmp_path, modules="java.base java.sql")
    with pytest.raises(UsageError, match=r"lacks the module jdk\.incubator\.vector"):
        find_java({"JAVA_HOME": str(tmp_path)})


def test_a_java_that_does_not_say_what_it_is(tmp_path: Path):
    """A Java without a file ``release`` is accepted."""
    java = install(tmp_path)
    (tmp_path / "release").unlink()
    assert find_java({"JAVA_HOME": str(tmp_path)}) == str(java)
