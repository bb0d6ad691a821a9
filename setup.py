"""The compiled modules of sbus. Everything else about the package is in pyproject.toml.

The environment variable SBUS_EXTENSION decides about them:

unset or ``auto``
    build them; if that fails, install without them (sbus then uses their plain Python twins);
``yes``
    build them; a failure ends the installation (for CI and for wheels);
``no``
    do not build them.
"""

from __future__ import annotations

import os
import sys

from setuptools import Extension, setup

#: The compiled modules, by path; the path also gives the module its name.
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
        # Keep the C source out of the tree.
        build_dir="build/cython",
        language_level=3,
    )
    for extension in found:
        extension.optional = choice == "auto"  # cythonize drops the argument of Extension
    return found


setup(ext_modules=extensions())
