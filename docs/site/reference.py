"""Adds the documentation of native objects to the reference, which autodoc builds from the modules.

A native object has no annotations, and only a short docstring for `help()`. The stub `_core.pyi` has both in full, and
stubtest checks that it is correct. A name in a docstring causes a warning if it is neither in the reference nor in the
standard library.
"""

from __future__ import annotations

import ast
import builtins
import copy
import importlib
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sphinx import addnodes
from sphinx.util.nodes import make_refnode

import grapeshot
from grapeshot import _core

if TYPE_CHECKING:
    from docutils import nodes
    from sphinx.application import Sphinx

Definition = ast.FunctionDef | ast.ClassDef | ast.AnnAssign
STUB = Path(grapeshot.__file__).with_name("_core.pyi")


def definitions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, Definition, str]]:
    """Yield (`class.method`, its definition, its docstring), following `if` branches as the running Python would."""
    for statement, after in pairwise([*body, None]):
        if isinstance(statement, ast.If):
            branch = eval(compile(ast.Expression(statement.test), STUB.name, "eval"), {"sys": sys})
            yield from definitions(statement.body if branch else statement.orelse, prefix)
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            is_doc = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            yield prefix + statement.target.id, statement, str(after.value.value) if is_doc else ""
        elif isinstance(statement, ast.FunctionDef | ast.ClassDef):
            yield prefix + statement.name, statement, ast.get_docstring(statement) or ""
            if isinstance(statement, ast.ClassDef):
                yield from definitions(statement.body, f"{prefix}{statement.name}.")


DEFINITIONS = {
    name: (definition, doc) for name, definition, doc in definitions(ast.parse(STUB.read_text(encoding="utf-8")).body)
}
# A public name may be an alias: grapeshot.coro.spawn is _core._coro_spawn.
NATIVE = {id(value): name for name, value in vars(_core).items() if callable(value)}


def find(obj: Any, name: str) -> tuple[Definition, str] | None:
    """Return the stub's definition and docstring of the object with this name, or None if the object is not native."""
    if id(obj) in NATIVE:
        return DEFINITIONS.get(NATIVE[id(obj)])
    if isinstance(obj, property) or (hasattr(obj, "__code__") and type(obj).__module__ != "grapeshot._core"):
        return None
    return DEFINITIONS.get(".".join(name.split(".")[-2:]))


def replace_docstring(_app: Sphinx, what: str, name: str, obj: Any, _options: Any, lines: list[str]) -> None:
    """Use the docstring of the stub for a native object."""
    if (found := find(obj, name)) is not None and found[1]:
        lines[:] = found[1].splitlines()
    if what in {"attribute", "property"}:
        lines.insert(0, "\\")  # renders as nothing; without it napoleon takes text before a colon for the type


def replace_signature(
    _app: Sphinx, what: str, name: str, obj: Any, _options: Any, signature: str | None, returned: str | None
) -> tuple[str | None, str | None] | None:
    """Use the signature of the stub. If the annotation of a Python function's result is a class, show the class with
    its module, because several modules have a class `Server`.
    """
    found = find(obj, name)
    if found is None:
        named = getattr(obj, "__globals__", {}).get(returned)
        return (signature, f"{named.__module__}.{named.__qualname__}") if isinstance(named, type) else None
    if what in {"attribute", "property"}:
        return None
    definition = found[0]
    if isinstance(definition, ast.ClassDef):
        made = (DEFINITIONS.get(f"{definition.name}.{method}") for method in ("__init__", "__new__"))
        definition = next((method[0] for method in made if method), None)
    if not isinstance(definition, ast.FunctionDef):
        return None
    arguments = copy.deepcopy(definition.args)
    if what in {"class", "method"}:
        del (arguments.posonlyargs or arguments.args)[0]
    has_result = what != "class" and definition.returns is not None
    return f"({ast.unparse(arguments)})", ast.unparse(definition.returns) if has_result else None


def exists(name: str) -> bool:
    """Whether the standard library has this name."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        try:
            for part in parts[end:]:
                value = getattr(value, part)
        except AttributeError:
            return False
        return True
    return hasattr(builtins, name)


def is_in_signature(node: nodes.Node | None) -> bool:
    while node is not None and not isinstance(node, addnodes.desc_signature):
        node = node.parent
    return node is not None


def resolve(app: Sphinx, env: Any, node: addnodes.pending_xref, text: nodes.Element) -> nodes.Element | None:
    """Resolve a reference that Sphinx could not resolve, or return None, which causes a warning.

    A method of the loop may be a function that another module defines. The docstring of such a function names the
    classes of that module without the module's name. Link such a name to a class if only one class has it. Show names
    of the standard library, and names in annotations, without a link; mypy has checked those in annotations.
    """
    if node.get("refdomain") != "py":
        return None
    last = f".{node['reftarget']}"
    ours = [(name, found) for name, found in env.domains["py"].objects.items() if name.endswith(last)]
    if len(ours) == 1:
        [(name, found)] = ours
        return make_refnode(app.builder, node["refdoc"], found.docname, found.node_id, text, name)
    name = node["reftarget"].replace("asyncio.loop.", "asyncio.AbstractEventLoop.")
    return text if is_in_signature(node) or exists(name) else None


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("autodoc-process-docstring", replace_docstring, priority=100)  # before napoleon
    app.connect("autodoc-process-signature", replace_signature)
    app.connect("missing-reference", resolve)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
