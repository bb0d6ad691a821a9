"""Make a Debian package of a wheel: ``make_deb.py WHEEL DIRECTORY``.

The package has an environment of its own in /opt/sbusd, with everything but Python itself, and fits the Python of the
Debian release that it is built on. Its units are those of ``docs/examples/systemd``, with every unit that one of them
names; they are not started by the installation.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = Path("/usr/bin/python3")
"""Debian's Python, which the package depends on."""
HOME = Path("opt", "sbusd")
"""The environment, below the root."""
UNITS = ROOT / "docs" / "examples" / "systemd"
SETTINGS = ("sysusers.d", "tmpfiles.d")
"""Directories with a file each that says which users and directories the system makes."""
SHIPPED_UNITS = ("sbus.service", "sbus.socket", "sbus-admin.socket", "sbus-recorder.service")
EXTRAS = "recorder"
"""What the programs of the units need besides the package itself."""
COMMANDS = ("sbus", "sbusd")
UNUSED = ("pyarrow/include", "pyarrow/src", "pyarrow/tests")
"""Parts of other packages that only compilers and their own tests need."""

CONTROL = """\
Package: sbusd
Version: {version}
Section: net
Priority: optional
Architecture: {architecture}
Maintainer: The sbus developers <sbus@localhost>
Installed-Size: {size}
Depends: python3 (>= {python}), python3 (<< {next_python}), passwd
Description: local message bus for the programs of one machine
 Programs of several users connect to one Unix socket, publish messages under
 routing keys and subscribe to patterns. The package has the daemon, the
 recorder, the command sbus, and the client libraries in an environment of their
 own in /opt/sbusd; programs that use them run with /opt/sbusd/bin/python3.
"""


def output(*command: str | Path) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def missing() -> str:
    """Return what this machine lacks for the build, or nothing."""
    if not shutil.which("dpkg-deb"):
        return "dpkg-deb (apt-get install dpkg)"
    if not PYTHON.exists():
        return f"{PYTHON} (apt-get install python3)"
    if subprocess.run([PYTHON, "-c", "import venv, ensurepip"], stderr=subprocess.DEVNULL).returncode:
        return "venv in Debian's Python (apt-get install python3-venv)"
    return ""


def make_environment(root: Path, wheel: Path) -> None:
    """Install the wheel and what it needs below /opt, with the path that it will have there in its scripts."""
    home = root / HOME
    subprocess.run([PYTHON, "-m", "venv", home], check=True)
    pip: list[str | Path] = [home / "bin" / "python", "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-compile", f"{wheel}[{EXTRAS}]"], check=True)
    subprocess.run([*pip, "uninstall", "--quiet", "--yes", "pip", "setuptools"], check=True)
    for path in [*(home / "bin").iterdir(), home / "pyvenv.cfg"]:
        if path.is_file() and not path.is_symlink():
            path.write_bytes(path.read_bytes().replace(bytes(home), b"/" + bytes(HOME)))
    # Nothing can be written there later, so twistd would look for plugins at each start, and complain.
    find_plugins = "from twisted.plugin import IPlugin, getPlugins; list(getPlugins(IPlugin))"
    subprocess.run([home / "bin" / "python", "-c", find_plugins], check=True)
    for cache in home.rglob("__pycache__"):
        shutil.rmtree(cache, ignore_errors=True)
    for part in UNUSED:
        for path in home.glob(f"lib/*/site-packages/{part}"):
            shutil.rmtree(path)
    for path in home.rglob("direct_url.json"):  # where the wheel was when it was installed
        path.unlink()
    # The manual pages and completions go where the system looks for them.
    shutil.copytree(home / "share", root / "usr" / "share", dirs_exist_ok=True)
    shutil.rmtree(home / "share")
    zsh = root / "usr" / "share" / "zsh"
    (zsh / "site-functions").rename(zsh / "vendor-completions")
    for page in (root / "usr" / "share" / "man").rglob("*.[1-8]"):
        subprocess.run(["gzip", "-9n", page], check=True)


def unit(name: str) -> str:
    """Return the text of a unit whose programs are in the package."""
    return re.sub(r"^(Exec\w+)=\S*/bin/", rf"\1=/{HOME}/bin/", (UNITS / name).read_text(), flags=re.MULTILINE)


def add_system_files(root: Path) -> None:
    """Add commands, units, the system's user and the scripts of the package."""
    commands = root / "usr" / "bin"
    commands.mkdir(parents=True)
    for name in COMMANDS:
        (commands / name).symlink_to(Path("/", HOME, "bin", name))
    units = root / "lib" / "systemd" / "system"
    units.mkdir(parents=True)
    for name in SHIPPED_UNITS:
        (units / name).write_text(unit(name))
    for name in SETTINGS:
        directory = root / "usr" / "lib" / name
        directory.mkdir(parents=True)
        shutil.copy(UNITS.parent / name / "sbus.conf", directory)
    doc = root / "usr" / "share" / "doc" / "sbusd"
    doc.mkdir(parents=True)
    shutil.copy(ROOT / "LICENSE", doc / "copyright")
    for name in ("postinst", "prerm", "postrm"):
        path = root / "DEBIAN" / name
        path.parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / "tools" / "debian" / name, path)
        path.chmod(0o755)


def main() -> None:
    """Make the package."""
    wheel, directory = Path(sys.argv[1]), Path(sys.argv[2])
    if lacks := missing():
        print(f"make_deb: no Debian package is made: this machine lacks {lacks}")
        return
    version = wheel.name.split("-")[1]
    major, minor = map(int, output(PYTHON, "-c", "import sys; print(*sys.version_info[:2])").split())
    architecture = output("dpkg", "--print-architecture")
    os.umask(0o022)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name, "root")
        root.mkdir()
        make_environment(root, wheel)
        add_system_files(root)
        size = sum(path.lstat().st_size for path in root.rglob("*") if path.is_file())
        control = CONTROL.format(
            version=version,
            architecture=architecture,
            size=size >> 10,
            python=f"{major}.{minor}",
            next_python=f"{major}.{minor + 1}",
        )
        (root / "DEBIAN" / "control").write_text(control)
        package = directory / f"sbusd_{version}_{architecture}.deb"
        subprocess.run(["dpkg-deb", "--root-owner-group", "--build", root, package], check=True)


if __name__ == "__main__":
    main()
