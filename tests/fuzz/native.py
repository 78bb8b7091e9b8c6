"""Call native functions with arbitrary arguments. `python -m fuzz.native` reads one example per line, runs each in a
process of its own, and answers with the failures. To run one example by hand:

    PYTHONPATH=tests python -m fuzz.native callback 'Loop.call_later(loop, nan, function)'

These are failures: a crash, a panic, a SystemError, a call that no signal can end, and a descriptor, native object or
reference that is left behind. Any other exception is a valid outcome.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import inspect
import json
import os
import resource
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from fuzz import world as worlds

from grapeshot import _core

# Functions that no generated example calls, and what each of them does.
LEFT_OUT = {
    "_coro_panic": "panics, for a test",
    "_coro_send_signal": "sends any signal to the process that calls it",
    "_coro_after_fork": "makes the process end when the coro that calls it ends",
    "_coro_fail_evictions": "makes evictions of stacks fail, for a test",
}
# After these functions, leftovers are not counted: the functions keep their arguments until the process ends, or start
# a thread that looks up a name.
KEEPING = ("_coro_set", "_set_stream_types", "_bind_", "_coro_socket_type", "_forget_parent", "getaddrinfo")
# After these functions, open descriptors are not counted: `detach` and `_open_child_watch` leave a descriptor to the
# caller, and `__init__` may take one over (`fileno=`).
GIVING = ("_Socket.detach", "_Socket.__init__", "_open_child_watch")
BLOCKING_S = 0.02  # after this time a signal interrupts a call that blocks
HANG_S = float(os.environ.get("FUZZ_HANG_S", "20"))
MEMORY = 3 << 30
PLACES = ("outside", "callback", "coro") if worlds.coro is not None else ("outside", "callback")


class TimeUp(KeyboardInterrupt):
    """Ends a call that blocks."""


class Function(NamedTuple):
    """A native function, or one way to use an attribute."""

    text: str
    owner: str | None
    """The name of the object on which the function is called."""
    needed: int
    """The number of required arguments, without the object."""
    names: list[str]
    """The names of the parameters; "*" stands for any number of parameters."""


def described(text: str, owner: str | None, value: Any) -> Function:
    """Return the function with the parameters from its signature."""
    try:
        parameters = list(inspect.signature(value).parameters.values())
    except (TypeError, ValueError):  # the object has no signature
        return Function(text, owner, 0, ["*"])
    if owner is not None:
        del parameters[:1]
    needed = [each for each in parameters if each.default is each.empty and each.kind <= each.POSITIONAL_OR_KEYWORD]
    rest = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    return Function(text, owner, len(needed), ["*" if each.kind in rest else each.name for each in parameters])


def functions() -> Iterator[Function]:
    """Yield every native function, and every way to use a native attribute."""
    for name, value in vars(_core).items():
        if callable(value) and not isinstance(value, type) and name not in LEFT_OUT:
            yield described(f"core.{name}", None, value)
    for owner, kind in worlds.native_types():
        for name, value in vars(kind).items():
            text = f"{kind.__name__}.{name}"
            if hasattr(type(value), "__set__"):
                attribute = f"vars({kind.__name__})[{name!r}]"
                yield Function(f"{attribute}.__get__", owner, 0, [])
                yield Function(f"{attribute}.__set__", owner, 1, [name])
                yield Function(f"{attribute}.__delete__", owner, 0, [])
            elif name == "__new__":
                yield Function(text, kind.__name__, 0, ["*"])
            elif callable(value):
                yield described(text, owner, value)
            elif type(value).__name__ == "classmethod_descriptor":
                yield Function(f"{kind.__name__}.{name}", None, 1, ["item"])


class Example:
    """Runs the statements of one example and notes its failures."""

    def __init__(self, place: str, statements: list[str]) -> None:
        self.place = place
        self.statements = statements
        self.problems: list[str] = []
        self.is_interruptible = False

    def note(self, error: BaseException | None) -> None:
        while error is not None:
            if isinstance(error, SystemError) or "internal error" in str(error.args):
                self.problems.append(f"{type(error).__name__}: {error}")
            error = error.__context__

    def interrupt(self, *_args: object) -> None:
        if self.is_interruptible and not worlds.Evil.world.is_making:
            raise TimeUp

    def guarded(self, function: Callable[[], Any]) -> None:
        """Call the function. If it is still running when the next signal comes, the signal ends it."""
        before, self.is_interruptible = self.is_interruptible, True
        try:
            function()
        except BaseException as error:
            self.note(error)
        finally:
            self.is_interruptible = before

    def step(self, world: worlds.World, text: str) -> None:
        result = eval(text, {}, world)
        if hasattr(result, "send") and hasattr(result, "throw"):
            try:
                result.send(None)
            finally:
                result.close()
        elif hasattr(result, "__next__"):
            next(result, None)

    def steps(self, world: worlds.World) -> None:
        for text in self.statements:
            self.guarded(lambda: self.step(world, text))

    def play(self) -> None:
        world = worlds.World(SHARED)
        worlds.Evil.world = world
        if self.place == "outside":
            self.steps(world)
        else:
            loop = world["loop"]
            loop.call_later(BLOCKING_S / 5, loop.stop)
            if self.place == "callback":
                loop.call_soon(self.steps, world)
            else:
                loop.call_soon(worlds.coro.spawn, self.steps, world)
            self.guarded(loop.run_forever)
        if worlds.coro is not None:
            self.guarded(lambda: _core._coro_shut_down(None, 3))
            pending = sys.modules["grapeshot.coro._event_loop"].take_pending_loop()
            if pending is not None:
                pending.close()

    def run(self) -> list[str]:
        sys.unraisablehook = lambda args: self.note(args.exc_value)
        signal.signal(signal.SIGALRM, self.interrupt)
        descriptors, references = open_descriptors(), counts()
        signal.setitimer(signal.ITIMER_REAL, BLOCKING_S, BLOCKING_S)
        try:
            self.play()
        except TimeUp:
            self.is_interruptible = False
        worlds.Evil.world.finish()
        signal.setitimer(signal.ITIMER_REAL, 0)
        worlds.Evil.world = worlds.World({})
        gc.collect()
        if any(name in text for text in self.statements for name in KEEPING):
            return self.problems
        left = sorted(type(each).__name__ for each in gc.get_objects() if type(each).__module__ == "grapeshot._core")
        if left:
            self.problems.append(f"left behind: {left}")
        new = open_descriptors() - descriptors
        if new and not any(name in text for text in self.statements for name in GIVING):
            self.problems.append(f"descriptors left open: {sorted(new)}")
        after = counts()
        if more := {name: after[name] - references[name] for name in after if after[name] != references[name]}:
            self.problems.append(f"references left: {more}")
        return self.problems


def counts() -> dict[str, int]:
    return {name: sys.getrefcount(value) for name, value in SHARED.items() if name in COUNTED}


def open_descriptors() -> set[tuple[int, str]]:
    found = set()
    for number in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):
            found.add((int(number), os.readlink(f"/proc/self/fd/{number}")))
    return found


def faults() -> dict[str, Callable[[], object]]:
    """Return functions with faults. A test calls them to check that the faults are noticed."""
    import ctypes

    def keep_reference() -> None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(SHARED["thing"]))

    def keep_transport() -> None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(worlds.Evil.world["stream"]))

    def hang() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
        time.sleep(2 * HANG_S)

    def set_error() -> None:
        raise SystemError("error return without exception set")

    return {
        "kill": os.abort,
        "keep_descriptor": lambda: os.dup(0),
        "keep_reference": keep_reference,
        "keep_transport": keep_transport,
        "hang": hang,
        "set_error": set_error,
    }


COUNTED = "nan inf huge text surrogate nul data much array view strided address thing error".split()
SHARED = worlds.shared_names()


def prepare() -> None:
    """Prepare what all examples share: names of types, a directory for files, and a limit on memory.

    `native_types()` makes an object of each native type, so caches are filled before the first example runs.
    """
    warnings.simplefilter("ignore")
    sys.setrecursionlimit(200)
    os.chdir(tempfile.mkdtemp(prefix="fuzz"))
    SHARED.update((kind.__name__, kind) for _, kind in worlds.native_types())
    if "FUZZ_FAULTS" in os.environ:
        SHARED.update(faults())
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    gc.collect()
    gc.freeze()  # a collection in the child scans only objects of the example


def in_child(place: str, statements: list[str]) -> str | None:
    """Run an example in a child of this process. Return what went wrong, or None."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as report:
        pid = os.fork()
        if pid == 0:
            try:
                for number in (1, 2):
                    os.dup2(output.fileno(), number)
                faulthandler.enable(2)
                faulthandler.dump_traceback_later(HANG_S, exit=True, file=2)
                problems = Example(place, statements).run()
                os.pwrite(report.fileno(), json.dumps(problems).encode(), 0)
            except BaseException as error:
                os.pwrite(report.fileno(), json.dumps([f"the example itself: {error!r}"]).encode(), 0)
            finally:
                os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        answer, printed = (os.pread(file.fileno(), 1 << 20, 0).decode(errors="replace") for file in (report, output))
        problems = json.loads(answer) if answer else ["no end"]
        if status:
            problems.append(f"exit status {status}")
        if "panicked at" in printed:
            problems.append("a panic")
        return "\n".join([*problems, printed]) if problems else None


def main() -> None:
    prepare()
    if len(sys.argv) > 2:
        sys.exit(in_child(sys.argv[1], sys.argv[2:]))
    answers = os.fdopen(os.dup(1), "w")
    print(json.dumps(list(functions())), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(in_child(*json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
