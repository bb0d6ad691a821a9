"""The compiled part of sbus; everything else about the package is in pyproject.toml.

The environment variable SBUS_EXTENSION says what happens to it:

unset or ``auto``
    build it; where that fails, install without it (sbus then uses its plain Python twin);
``yes``
    build it; a failure ends the installation (for CI and for wheels);
``no``
    do not build it.
"""

from __future__ import annotations

import os
import sys

from setuptools import Extension, setup

#: Each compiled module: a path, which also gives the module its name.
MODULES = [
    "sbus/protocol/_bundles.pyx",
    "sbus/routing/_runs.pyx",
    "sbus/routing/_trie.pyx",
    "sbus/syscalls/_batch.pyx",
]


def wanted() -> str:
    choice = os.environ.get("SBUS_EXTENSION", "").strip().lower() or "auto"
    if choice not in ("auto", "yes", "no"):
        sys.exit(f"SBUS_EXTENSION is {choice!r}: use auto, yes or no (unset means auto)")
    return choice


def extensions() -> list[Extension]:
    choice = wanted()
    if choice == "no":
        return []
    from Cython.Build import cythonize

    found: list[Extension] = cythonize(
        [
            Extension(
                path.removesuffix(".pyx").replace("/", "."),
                [path],
                extra_compile_args=["-O2"],
            )
            for path in MODULES
        ],
        # The C source goes there, not beside the .pyx.
        build_dir="build/cython",
        language_level=3,
    )
    for extension in found:
        extension.optional = choice == "auto"  # cythonize drops it when it is given above
    return found


setup(ext_modules=extensions())
