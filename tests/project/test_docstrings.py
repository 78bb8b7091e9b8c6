"""The examples in the docstrings of public modules, which the reference pages show, give the stated results."""

from __future__ import annotations

import ast
import asyncio
import doctest
import importlib
import inspect

import pytest
from support import coro_is_available, free_port

import grapeshot

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
# Modules that the examples use without importing them.
NAMES = {"grapeshot.rpc": ["grapeshot.rpc"], "grapeshot.coro.rpc": ["grapeshot.coro", "grapeshot.coro.rpc"]}
NEEDS = {"grapeshot.rpc": "msgspec", "grapeshot.coro.rpc": "msgspec", "grapeshot.coro.wsgi": "httptools"}


@pytest.mark.parametrize("name", ["grapeshot.coro", "grapeshot.coro.rpc", "grapeshot.coro.wsgi", "grapeshot.rpc"])
def test_the_examples_of_a_module(name):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    module = importlib.import_module(name)
    examples = doctest.DocTestParser().get_examples(module.__doc__)
    assert len(examples) >= 2
    names = {path.rpartition(".")[2]: importlib.import_module(path) for path in NAMES.get(name, [])}
    ports = {7000: free_port(), 8000: free_port()}  # the ports in the examples, and the free ports to use instead
    with asyncio.Runner(loop_factory=grapeshot.new_event_loop) as runner:
        for example in examples:
            source = example.source
            for shown, port in ports.items():
                source = source.replace(str(shown), str(port))
            assert run(source, names, runner) == example.want.strip(), source
        if "server" in names:
            runner.run(names["server"].close())


def run(source: str, names: dict[str, object], runner: asyncio.Runner) -> str:
    """Run statements, which may use a top-level `await`. Return the repr of the last value, or "" if that is None."""
    tree = ast.parse(source)
    *statements, last = tree.body
    if isinstance(last, ast.Expr) or (isinstance(last, ast.AsyncWith) and isinstance(last.body[-1], ast.Expr)):
        holder = last if isinstance(last, ast.Expr) else last.body[-1]
        kept = ast.Assign([ast.Name("_", ast.Store())], holder.value)
        if holder is last:
            tree.body = [*statements, kept]
        else:
            last.body[-1] = kept
    names["_"] = None
    code = compile(ast.fix_missing_locations(tree), "example", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(code, names)
    if inspect.iscoroutine(result):
        runner.run(result)
    return "" if names["_"] is None else repr(names["_"])
