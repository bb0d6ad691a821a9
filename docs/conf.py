"""Settings of the documentation. The build needs no network."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

here = Path(__file__).parent
sys.path[:0] = [str(here / "_ext"), str(here.parent)]
# The reference shows the plain twins of compiled modules, whether or not these were built.
os.environ["SBUS_PURE"] = "1"

import manpages  # noqa: E402

import sbus  # noqa: E402

project = "sbus"
author = "the sbus developers"
copyright = "2026, the sbus developers"
release = version = sbus.__version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.intersphinx", "manpages", "sbusdocs"]
exclude_patterns = ["_build"]
if tags.has("man"):  # type: ignore[name-defined] # noqa: F821
    # The manual pages are built apart, from these pages alone: sphinx-build -b man -t man.
    include_patterns = ["man/**", "protocol.rst"]
    root_doc = "protocol"
    suppress_warnings = ["ref.doc", "ref.ref"]
else:
    exclude_patterns.append("man")
# Docstrings put names between single backticks.
default_role = "code"
highlight_language = "text"

man_pages = [
    *manpages.man_pages(author),
    ("man/sbusd", "sbusd", "the daemon of the sbus message bus", author, 8),
    ("protocol", "sbus-protocol", "the protocol of the sbus message bus", author, 7),
]
man_show_urls = True

html_theme = "furo"
html_title = f"sbus {release}"

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True

# Links to the documentation of Python and Twisted need inventories from the network, so they are optional.
intersphinx_mapping = {}
if os.environ.get("SBUS_DOCS_INTERSPHINX"):
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "twisted": ("https://docs.twisted.org/en/stable/api", None),
    }

# Every reference has to resolve (sphinx-build -n), except those to the modules of other projects.
_others = "|".join(
    map(
        re.escape,
        sorted(
            {
                *sys.stdlib_module_names,
                "click",
                "_duckdb",
                "duckdb",
                "jinja2",
                "prometheus_client",
                "py4j",
                "pyarrow",
                "pyspark",
                "twisted",
                "zope",
            }
        ),
    )
)
nitpick_ignore_regex = [
    (r"py:.*", rf"({_others})\..*"),
    (r"py:class", r"sbus\.routing\.(trie|cache|runs)\.[KMS]"),  # type variables
    (r"py:class", r"(sbus\.client\.(\w+\.)+)?(Sub|Owner|Args)"),
]
