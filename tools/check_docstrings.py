#!/usr/bin/env python3
"""Check the markup of all docstrings, such as tables with columns that are too narrow; `make docs` takes minutes.

Print each error with its file and line, and exit with status 1 if there is any.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from docutils import nodes
from docutils.frontend import get_default_settings
from docutils.parsers.rst import Parser, roles
from docutils.utils import Reporter, new_document

for role in ("doc", "manpage", "ref"):  # Sphinx roles that the docstrings use
    roles.register_generic_role(role, nodes.literal)
parser = Parser()
settings = get_default_settings(Parser)
settings.report_level = Reporter.SEVERE_LEVEL + 1  # docutils itself prints nothing
errors = 0
for path in sorted((Path(__file__).resolve().parents[1] / "sbus").rglob("*.py")):
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        docstring = ast.get_docstring(node) or ""
        if "\n" not in docstring:
            continue
        document = new_document(str(path), settings)
        parser.parse(docstring, document)
        for message in document.findall(nodes.system_message):
            if message["level"] >= Reporter.ERROR_LEVEL:
                line = node.body[0].lineno + message.get("line", 1) - 1
                print(f"{path}:{line}: {message[0].astext()}")
                errors += 1
sys.exit(bool(errors))
