"""The prompt of one client. It reads lines, runs the commands and shows what they return or raise.

As in ``python -m asyncio``, the standard library's ``codeop`` decides whether a command is complete, and ``await``
works at top level. The session runs as a task or in a coro. In a coro, commands may also make blocking-style calls that
wait.
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
# The source of this many commands of a client is kept, so that tracebacks can show it.
_MAX_SOURCES = 200
_MAX_COMPLETIONS = 200


class Session:
    """A client's prompt. Only the loop's thread may use it."""

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
        """Functions to call when the session ends."""
        self.looks: dict[str, Any] = {}
        """Earlier results of helpers, by the helper's name, to show what has changed since."""
        # The task or coro that runs the session, once it has started, and its context.
        self.task: Any = None
        self.context: contextvars.Context | None = None

    def write(self, text: str) -> bool:
        """Send output. Return False if the client has disconnected."""
        return self.wire.write(text)

    def cancel(self) -> None:
        """End the session and the command that it is running."""
        if self.task is not None:
            self.task.cancel()

    async def run(self) -> None:
        """Serve the client until it leaves."""
        try:
            self.write(f"Python {sys.version.split()[0]}, process {os.getpid()}. Type help for the available names.\n")
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
        """Handle Ctrl-C of the client: cancel the running command, or discard the lines typed so far."""
        if self._runs_command:
            self._is_interrupted = True
            self.task.cancel()
        else:
            self._source.clear()
            self.write("\nKeyboardInterrupt\n")
            self._prompt()

    def _complete(self, text: str) -> list[str]:
        """Return the completions of ``text``, a name that may contain dots."""
        if not text or self.context is None:
            return []
        find = rlcompleter.Completer(self.names).complete
        found: list[str] = []
        # Run in a copy: a context cannot be entered twice, and a waiting coro has not left its context.
        context = self.context.copy()
        while len(found) < _MAX_COMPLETIONS:
            try:
                match = context.run(find, text, len(found))
            except Exception:
                break  # a property has raised
            if match is None:
                break
            found.append(match)
        return found

    # ------------------------------------------------------------------ commands

    async def _push(self, line: str) -> bool:
        """Add a line, and run the command if it is complete. Return False if the client wants to leave."""
        if not self._source and line.strip() in _LEAVE:
            return False
        self._source.append(line)
        source = "\n".join(self._source)
        file = f"<backdoor {self._number}.{self._commands}>"
        try:
            code = self._compile(source, file, "single")
        except Exception as exc:  # SyntaxError etc.; RecursionError or MemoryError if the source is nested too deeply
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
        """Keep the source of a command, so that tracebacks can show it."""
        self._commands += 1
        linecache.cache[file] = (len(source), None, [f"{line}\n" for line in source.split("\n")], file)
        self._files.append(file)
        if len(self._files) > _MAX_SOURCES:
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
            return False  # if this coroutine itself is being closed, it must not wait again
        except asyncio.CancelledError as exc:
            if self._is_interrupted and self.wire.is_open:
                self.write("\nKeyboardInterrupt\n")
            elif type(exc) is not asyncio.CancelledError or self.task.cancelling():
                raise
            else:
                self._show(exc)  # something that the command awaited was cancelled
        except BaseException as exc:
            self._show(exc)
        finally:
            self._runs_command = False
            if self._is_interrupted:
                self._is_interrupted = False
                self.task.uncancel()
        return True

    def _show(self, exc: BaseException) -> None:
        """Show the traceback of an exception, starting at the command."""
        entry = exc.__traceback__
        while entry is not None and not entry.tb_frame.f_code.co_filename.startswith("<backdoor "):
            entry = entry.tb_next
        try:
            lines = traceback.format_exception(type(exc), exc, entry or exc.__traceback__)
        except Exception as failure:
            lines = [f"{type(exc).__name__} (its text cannot be shown: {type(failure).__name__})\n"]
        self.write("".join(lines))
