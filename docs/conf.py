"""Settings of the documentation. Building it needs no network."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

here = Path(__file__).parent
sys.path[:0] = [str(here / "_ext"), str(here.parent)]
# The reference shows the plain twin of the compiled helper, whether or not that is installed.
os.environ["SBUS_PURE"] = "1"

import sbus  # noqa: E402

project = "sbus"
author = "the sbus developers"
copyright = "2026, the sbus developers"
release = version = sbus.__version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.intersphinx", "sbusdocs"]
exclude_patterns = ["_build"]
# Docstrings put single backticks around names.
default_role = "code"
highlight_language = "text"

html_theme = "furo"
html_title = f"sbus {release}"

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
# The pipeline's libraries are large, and their pages are made without them.
autodoc_mock_imports = ["pyarrow", "pyspark"]
python_use_unqualified_type_names = True

# Links to the documentation of Python and Twisted would need their inventories from the net, so they are made
# on request only.
intersphinx_mapping = {}
if os.environ.get("SBUS_DOCS_INTERSPHINX"):
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "twisted": ("https://docs.twisted.org/en/stable/api", None),
    }

# Every reference must lead somewhere (sphinx-build -n), but those to other people's modules have nowhere to go.
_others = "|".join(map(re.escape, sorted({*sys.stdlib_module_names, "pyarrow", "pyspark", "twisted", "zope"})))
nitpick_ignore_regex = [
    (r"py:.*", rf"({_others})\..*"),
    (r"py:class", r"sbus\.(index|routes|runs)\.[MS]"),  # type variables
    (r"py:class", r"(sbus\.client\.(\w+\.)+)?(Sub|Owner|Args)"),
]
