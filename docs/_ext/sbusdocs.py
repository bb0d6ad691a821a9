"""Sphinx directives for what autodoc does not know.

``.. zopeinterface:: sbus.interfaces.ICredentials``
    an interface with its methods and attributes
``.. theory:: sbus.routing.trie``
    a module's docstring: its theory of operation, as part of a page
``.. controlmessages::``
    the table of control messages, from `sbus.protocol.controls`
``.. publicnames:: sbus.journal``
    the names that a package exports, each with a link to its reference
``.. internalmodules:: sbus.journal``
    the reference of a package and all modules in it, except those that are private or named in ``:except:``

Names that a module imports for type checkers only are resolved too.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from sphinx.addnodes import pending_xref
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import nested_parse_with_titles
from zope.interface.interface import InterfaceClass, Method

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment


class Generated(SphinxDirective):
    """A directive that parses lines which it has generated."""

    def parse_lines(self, lines: list[str], source: str) -> list[nodes.Node]:
        holder = nodes.Element()
        holder.document = self.state.document
        nested_parse_with_titles(self.state, StringList(lines, source=source), holder, self.content_offset)
        return holder.children

    def module(self) -> Any:
        """Import the module that the argument names, and build the page again when it changes."""
        module = importlib.import_module(self.arguments[0].strip())
        self.env.note_dependency(inspect.getfile(module))
        return module


class Theory(Generated):
    """A module's docstring, with the first line in italics unless it contains markup, which italics cannot."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        lines = without_heading(inspect.getdoc(self.module()) or "").splitlines()
        if not lines:
            raise self.error(f"{self.arguments[0]} has no docstring")
        if "`" not in lines[0]:
            lines[0] = f"*{lines[0]}*"
        return self.parse_lines([*lines, ""], self.arguments[0])


class ControlMessages(Generated):
    """The table of choices: the control messages that change a setting."""

    def run(self) -> list[nodes.Node]:
        self.arguments = ["sbus.protocol.controls"]
        return self.parse_lines(control_table(self.module()), "sbus.protocol.controls")


def control_table(controls: Any) -> list[str]:
    """Return the table of choices as reStructuredText."""
    lines = [".. list-table::", "   :header-rows: 1", "   :widths: 30 40 12 18", ""]
    lines += ["   * - Control message", "     - What it asks for", "     - Default", "     - Payload of the reply"]
    for control in controls.CONTROLS:
        reply = "no reply" if control.answer is controls.Answer.NONE else control.answer.value
        lines += [f"   * - ``CMSG {control.key.decode()}``", f"     - {control.meaning}"]
        lines += [f"     - {'yes' if control.default else ''}".rstrip(), f"     - {reply}"]
    return [*lines, ""]


class PublicNames(Generated):
    """The names in a package's ``__all__``."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        module = self.module()
        lines = []
        for name in getattr(module, "__all__", ()):
            exported = getattr(module, name)
            home, real = getattr(exported, "__module__", None), getattr(exported, "__qualname__", None)
            if not real or not str(home).startswith("sbus."):
                continue
            summary = (inspect.getdoc(exported) or "").partition("\n")[0]
            lines.append(f"* :py:obj:`{name} <{home}.{real}>`: {summary}")
        return self.parse_lines(lines, self.arguments[0])


class InternalModules(Generated):
    """The reference of a package, module by module."""

    required_arguments = 1
    option_spec = {"except": directives.unchanged, "modules-only": directives.flag}

    def run(self) -> list[nodes.Node]:
        package = self.module()
        left_out = self.options.get("except", "").split()
        lines = [] if "modules-only" in self.options else [*self._entry(package.__name__, members=False)]
        for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            last = found.name.rpartition(".")[2]
            if not last.startswith("_") and last not in left_out:
                lines += self._entry(found.name, members=not found.ispkg)
        return self.parse_lines(lines, package.__name__)

    def _entry(self, name: str, members: bool) -> Iterator[str]:
        module = importlib.import_module(name)
        self.env.note_dependency(inspect.getfile(module))
        yield from (f".. rubric:: ``{name}``", "", f".. automodule:: {name}")
        interfaces = [n for n in getattr(module, "__all__", ()) if isinstance(getattr(module, n), InterfaceClass)]
        yield "   :members:" if members else "   :no-members:"
        if interfaces and members:  # these are documented as interfaces
            yield "   :exclude-members: " + ", ".join(interfaces)
        yield ""


_HEADING = re.compile(r"^(?:Theory of operation\n[-=~]+|\.\. rubric:: Theory of operation)\n+", re.MULTILINE)


def without_heading(docstring: str) -> str:
    """Remove the heading "Theory of operation", which a page gives in its own way."""
    return _HEADING.sub("", docstring)


def clean_docstring(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Do that for autodoc."""
    lines[:] = without_heading("\n".join(lines)).split("\n")


class ZopeInterface(Generated):
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
        return self.parse_lines(lines, self.arguments[0])

    @staticmethod
    def _text(docstring: str | None, depth: int) -> list[str]:
        return ["   " * depth + line for line in inspect.cleandoc(docstring or "").splitlines()] + [""]


@functools.cache
def imported_names(module_name: str) -> dict[str, str]:
    """Return the full name of each name that a module imports, including imports for type checkers only."""
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


class QualifyNames(SphinxPostTransform):
    """Replace a name such as ``SendQueue`` in an annotation by what its module imports under that name."""

    default_priority = 5  # before references are resolved

    def run(self, **kwargs: Any) -> None:
        for node in self.document.findall(pending_xref):
            if node.get("refdomain") != "py":
                continue
            first, dot, rest = node["reftarget"].partition(".")
            target = node["reftarget"]
            if meaning := imported_names(node.get("py:module") or "sbus").get(first):
                target = meaning + dot + rest
                node["refspecific"] = False
            # Interfaces are documented where programs import them from.
            node["reftarget"] = re.sub(r"^sbus\.\w+\.interfaces\.(I[A-Z])", r"sbus.interfaces.\1", target)


def accept_undocumented(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, contnode: nodes.TextElement
) -> nodes.Element | None:
    """Accept a reference without a link if its target exists: another project's, or not in its module's ``__all__``."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    if target in imported_names(node.get("py:module") or "sbus").values() and not target.startswith("sbus."):
        return contnode
    for module_name, name in ((node.get("py:module") or "", target), target.rpartition(".")[::2]):
        if module_name.startswith("sbus."):
            try:
                module = importlib.import_module(module_name)
            except ImportError:
                continue
            if hasattr(module, name):
                return contnode
    return None


def show_factories(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Replace ``<factory>``, the default of a dataclass field with a factory, which Sphinx cannot parse."""
    return signature and signature.replace("<factory>", "..."), returns


def setup(app: Sphinx) -> dict[str, Any]:
    # Sphinx shows an annotation that it does not know as its repr; this one reads as a reference.
    InterfaceClass.__repr__ = lambda self: f"~{self.__module__}.{self.__name__}"
    app.add_directive("zopeinterface", ZopeInterface)
    app.add_directive("theory", Theory)
    app.add_directive("controlmessages", ControlMessages)
    app.add_directive("publicnames", PublicNames)
    app.add_directive("internalmodules", InternalModules)
    app.connect("autodoc-process-docstring", clean_docstring)
    app.add_post_transform(QualifyNames)
    app.connect("missing-reference", accept_undocumented)
    app.connect("autodoc-process-signature", show_factories)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
