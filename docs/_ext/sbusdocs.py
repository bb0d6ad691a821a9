"""What Sphinx does not know by itself: zope interfaces, and names that are imported for type checkers only.

``.. zopeinterface:: sbus.interfaces.ICredentials`` documents an interface with its methods and attributes.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
from typing import TYPE_CHECKING, Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective
from zope.interface.interface import InterfaceClass, Method

if TYPE_CHECKING:
    from sphinx.addnodes import pending_xref
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment


class ZopeInterface(SphinxDirective):
    """An interface as a class, its members as methods and attributes of it."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        module_name, _, name = self.arguments[0].strip().rpartition(".")
        interface = getattr(importlib.import_module(module_name), name)
        if not isinstance(interface, InterfaceClass):
            raise self.error(f"{self.arguments[0]} is not a zope interface")
        self.env.note_dependency(inspect.getfile(importlib.import_module(module_name)))
        lines = [f".. py:class:: {name}", f"   :module: {module_name}", ""]
        bases = [base for base in interface.__bases__ if base.__name__ != "Interface"]
        if bases:
            lines += ["   Extends " + ", ".join(f"``{base.__name__}``" for base in bases) + ".", ""]
        lines += self._text(interface.__doc__, 1)
        for member_name in interface:
            if member_name not in interface.names():
                continue  # inherited
            member = interface[member_name]
            if isinstance(member, Method):
                lines += [f"   .. py:method:: {member_name}{member.getSignatureString()}", ""]
            else:
                lines += [f"   .. py:attribute:: {member_name}", ""]
            lines += self._text(member.__doc__, 2)
        source = StringList(lines, source=self.arguments[0])
        return self.parse_content_to_nodes_from(source)

    def parse_content_to_nodes_from(self, source: StringList) -> list[nodes.Node]:
        holder = nodes.Element()
        self.state.nested_parse(source, self.content_offset, holder)
        return holder.children

    @staticmethod
    def _text(docstring: str | None, depth: int) -> list[str]:
        return ["   " * depth + line for line in inspect.cleandoc(docstring or "").splitlines()] + [""]


@functools.cache
def imported_names(module_name: str) -> dict[str, str]:
    """What each name means that a module imports, also those that it imports for type checkers only."""
    try:
        tree = ast.parse(inspect.getsource(importlib.import_module(module_name)))
    except (ImportError, OSError, TypeError):
        return {}
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name] = alias.name
    return names


def resolve_imported(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, contnode: nodes.TextElement
) -> nodes.Element | None:
    """Link an annotation such as ``SendQueue`` to what its module imports under that name."""
    if node.get("refdomain") != "py" or not node.get("py:module"):
        return None
    first, dot, rest = node["reftarget"].partition(".")
    meaning = imported_names(node["py:module"]).get(first)
    if meaning is None:
        return None
    target = meaning + dot + rest
    if not target.startswith("sbus."):
        return contnode  # somebody else's: there is no inventory to link to
    domain = env.get_domain("py")
    for role in ("class", "obj"):
        found = domain.resolve_xref(env, node["refdoc"], app.builder, role, target, node, contnode)
        if found is not None:
            return found
    return None


def show_factories(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """A default that a dataclass makes anew each time shows as ``<factory>``, which Sphinx cannot parse."""
    return signature and signature.replace("<factory>", "..."), returns


def setup(app: Sphinx) -> dict[str, Any]:
    # Sphinx writes an annotation that it does not know as its repr; this one reads as a reference.
    InterfaceClass.__repr__ = lambda self: f"~{self.__module__}.{self.__name__}"
    app.add_directive("zopeinterface", ZopeInterface)
    app.connect("missing-reference", resolve_imported)
    app.connect("autodoc-process-signature", show_factories)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
