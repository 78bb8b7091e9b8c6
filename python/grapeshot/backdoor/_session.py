"""The prompt of one client: it reads lines, runs them and shows what they return or raise.

What is a command, and what its end, is as in ``python -m asyncio``: the standard library's ``codeop`` decides, and
``await`` works at top level. The coroutine here runs as a task, or in a coro, where blocking-style calls may wait, too.
"""

from __future__ import annotations

import ast
import asyncio
import codeop
import inspect
import linecache
import os
import rlcompleter
import sys
import traceback
import types

from . import _names
from ._wire import Wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    import contextvars
    import socket
    from collections.abc import Callable
    from typing import Any

_LEAVE = {"exit", "quit"}
# A traceback shows the lines of so many commands of a client.
_MOST_SOURCES = 200
_MOST_COMPLETIONS = 200


class Session:
    """A client's prompt. It belongs to the loop's thread."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, sock: socket.socket, number: int, namespace: dict[str, Any]
    ) -> None:
        self.name = f"backdoor client {number}"
        self._number = number
        self._commands = 0
        self.names = _names.namespace(loop, namespace)
        self.wire = Wire(loop, sock, self._interrupt, self.cancel, self._complete)
        self._compile = codeop.CommandCompiler()
        self._compile.compiler.flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        self._source: list[str] = []
        self._files: list[str] = []
        self._runs_command = False
        self._is_interrupted = False
        self.at_end: set[Callable[[], None]] = set()
        """What is called once when the session ends."""
        self.looks: dict[str, Any] = {}
        """What helpers have found, by their names: they tell what has changed since."""
        # The task or the coro, once it has begun, and its context.
        self.task: Any = None
        self.context: contextvars.Context | None = None

    def write(self, text: str) -> bool:
        """Send output. False: the client is gone."""
        return self.wire.write(text)

    def cancel(self) -> None:
        """End the session, and the command that it runs."""
        if self.task is not None:
            self.task.cancel()

    async def run(self) -> None:
        """Serve the client to its end."""
        try:
            self.write(f"Python {sys.version.split()[0]}, process {os.getpid()}. help lists what there is.\n")
            is_going_on = True
            while is_going_on:
                await self.wire.wait_read()
                self._prompt()
                line = await self.wire.next_line()
                is_going_on = line is not None and await self._push(line)
        finally:
            while self.at_end:
                self.at_end.pop()()
            for file in self._files:
                linecache.cache.pop(file, None)
            self.wire.close()

    def _prompt(self) -> None:
        self.wire.prompt("... " if self._source else ">>> ")

    def _interrupt(self) -> None:
        """The client has pressed Ctrl-C."""
        if self._runs_command:
            self._is_interrupted = True
            self.task.cancel()
        else:
            self._source.clear()
            self.write("\nKeyboardInterrupt\n")
            self._prompt()

    def _complete(self, text: str) -> list[str]:
        """Return what could stand for ``text``, a name with dots."""
        if not text or self.context is None:
            return []
        find = rlcompleter.Completer(self.names).complete
        found: list[str] = []
        # A copy: a coro that waits has not left its own context.
        context = self.context.copy()
        while len(found) < _MOST_COMPLETIONS:
            try:
                match = context.run(find, text, len(found))
            except Exception:
                break  # of a property
            if match is None:
                break
            found.append(match)
        return found

    # ------------------------------------------------------------------ commands

    async def _push(self, line: str) -> bool:
        """Take a line, and run the command if it is complete. False: the client leaves."""
        if not self._source and line.strip() in _LEAVE:
            return False
        self._source.append(line)
        source = "\n".join(self._source)
        file = f"<backdoor {self._number}.{self._commands}>"
        try:
            code = self._compile(source, file, "single")
        except Exception as exc:  # SyntaxError and its like; RecursionError and MemoryError of what is nested too deep
            self._source.clear()
            self._remember(file, source)
            self.write("".join(traceback.format_exception_only(exc)))
            return True
        if code is None:
            return True
        self._source.clear()
        self._remember(file, source)
        return await self._run_command(code)

    def _remember(self, file: str, source: str) -> None:
        """Keep the source for tracebacks."""
        self._commands += 1
        linecache.cache[file] = (len(source), None, [f"{line}\n" for line in source.split("\n")], file)
        self._files.append(file)
        if len(self._files) > _MOST_SOURCES:
            linecache.cache.pop(self._files.pop(0), None)

    async def _run_command(self, code: types.CodeType) -> bool:
        self._runs_command = True
        try:
            result = types.FunctionType(code, self.names)()
            if inspect.iscoroutine(result):
                await result
        except SystemExit:
            return False
        except GeneratorExit as exc:
            self._show(exc)
            return False  # it may be the end of this coroutine, which must not wait any more
        except asyncio.CancelledError as exc:
            if self._is_interrupted and self.wire.is_open:
                self.write("\nKeyboardInterrupt\n")
            elif type(exc) is not asyncio.CancelledError or self.task.cancelling():
                raise
            else:
                self._show(exc)  # of what the command has awaited
        except BaseException as exc:
            self._show(exc)
        finally:
            self._runs_command = False
            if self._is_interrupted:
                self._is_interrupted = False
                self.task.uncancel()
        return True

    def _show(self, exc: BaseException) -> None:
        """Show a traceback that begins with the command."""
        entry = exc.__traceback__
        while entry is not None and not entry.tb_frame.f_code.co_filename.startswith("<backdoor "):
            entry = entry.tb_next
        try:
            lines = traceback.format_exception(type(exc), exc, entry or exc.__traceback__)
        except Exception as failure:
            lines = [f"{type(exc).__name__}, whose text cannot be had: {type(failure).__name__}\n"]
        self.write("".join(lines))
