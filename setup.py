"""The compiled modules of sbus. Everything else about the package is in pyproject.toml.

The environment variable SBUS_EXTENSION decides about them:

unset or ``auto``
    build them; if that fails, install without them (sbus then uses their plain Python twins);
``yes``
    build them; a failure ends the installation (for CI and for wheels);
``abi3``
    as ``yes``, with Python's limited API: one wheel works with each CPython from 3.11 on, and is a little slower;
``no``
    do not build them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from setuptools import Extension, setup

#: The compiled modules, by path; the path also gives the module its name.
MODULES = [
    "sbus/protocol/_bundles.pyx",
    "sbus/protocol/_columns.pyx",
    "sbus/routing/_runs.pyx",
    "sbus/routing/_trie.pyx",
    "sbus/syscalls/_batch.pyx",
]


#: The oldest Python whose API the modules of ``SBUS_EXTENSION=abi3`` use.
LIMITED_API = "0x030b0000"


def wanted() -> str:
    choice = os.environ.get("SBUS_EXTENSION", "").strip().lower() or "auto"
    if choice not in ("auto", "yes", "abi3", "no"):
        sys.exit(f"SBUS_EXTENSION is {choice!r}: use auto, yes, abi3 or no (unset means auto)")
    return choice


def extensions() -> list[Extension]:
    choice = wanted()
    if choice == "no":
        return []
    from Cython.Build import cythonize

    is_limited = choice == "abi3"
    header = str(Path("sbus", "limited_api.h").resolve())
    found: list[Extension] = cythonize(
        [
            Extension(
                path.removesuffix(".pyx").replace("/", "."),
                [path],
                extra_compile_args=["-O2", *(["-include", header] if is_limited else [])],
                define_macros=[("Py_LIMITED_API", LIMITED_API)] if is_limited else [],
                py_limited_api=is_limited,
            )
            for path in MODULES
        ],
        # Keep the C source out of the tree.
        build_dir="build/cython-abi3" if is_limited else "build/cython",
        language_level=3,
    )
    for extension in found:
        extension.optional = choice == "auto"  # cythonize drops the argument of Extension
    return found


def data_files() -> list[tuple[str, list[str]]]:
    """Return the manual pages and completions, if ``make dist`` has built them: directory, files."""
    share = Path("build", "share")
    directories = sorted({path.parent for path in share.rglob("*") if path.is_file()})
    return [
        (f"share/{directory.relative_to(share)}", sorted(str(path) for path in directory.iterdir() if path.is_file()))
        for directory in directories
    ]


options = {"bdist_wheel": {"py_limited_api": "cp311"}} if wanted() == "abi3" else {}
setup(ext_modules=extensions(), data_files=data_files(), options=options)
