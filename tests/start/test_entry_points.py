"""install, uninstall, run, new_event_loop, Loop, EventLoopPolicy, and the side effects of an import."""

from __future__ import annotations

import asyncio
import sys

import pytest
from support import run_script

HAS_POLICIES = sys.version_info < (3, 16)


def script(code, flags=("-W", "error")):
    return run_script(None, code, flags=flags).strip()


def test_import_gives_no_warning():
    assert script("import grapeshot; print(grapeshot.__version__.count('.'))") == "2"


def test_import_patches_nothing():
    out = script(
        """
        import asyncio, signal, socket, selectors, sys, threading

        modules = [module for name, module in sys.modules.items() if name.split(".")[0] in
                   ("asyncio", "socket", "selectors", "signal", "threading", "select", "ssl")]

        def snapshot():
            found = {}
            for module in modules:
                for name, value in vars(module).items():
                    found[module.__name__, name] = id(value)
                    if isinstance(value, type):
                        for attribute, inner in vars(value).items():
                            found[module.__name__, name, attribute] = id(inner)
            return found

        kept = [dict(vars(module)) for module in modules]
        before = snapshot()
        import grapeshot
        after = snapshot()
        changed = {
            key for key in before.keys() | after.keys() if before.get(key) != after.get(key)
            # caches that are filled when they are first used
            and key[-1] not in ("__warningregistry__", "_abc_impl", "__abstractmethods__", "__annotations_cache__")
        }
        print(sorted(changed))
        """
    )
    assert out == "[]"


def test_import_sets_no_policy_and_no_signal_handlers():
    out = script(
        """
        import asyncio, signal, threading
        before = [signal.getsignal(number) for number in signal.valid_signals()]
        import grapeshot
        assert [signal.getsignal(number) for number in signal.valid_signals()] == before
        assert threading.active_count() == 1
        print(type(asyncio.new_event_loop()).__module__.partition(".")[0])
        """,
        flags=("-W", "ignore"),
    )
    assert out == "asyncio"


def test_import_loads_only_the_standard_library():
    out = script(
        """
        import sys, asyncio
        before = set(sys.modules)
        import grapeshot
        print(sorted(name for name in set(sys.modules) - before if not name.startswith("grapeshot")
                     and name.partition(".")[0] not in sys.stdlib_module_names))
        """
    )
    assert out == "[]"


def test_public_names():
    import grapeshot

    names = ["Loop", "install", "new_event_loop", "run", "uninstall"]
    assert set(names) <= set(grapeshot.__all__)
    for name in grapeshot.__all__:
        assert getattr(grapeshot, name) is not None


def test_new_event_loop():
    import grapeshot

    loop = grapeshot.new_event_loop()
    try:
        assert isinstance(loop, grapeshot.Loop)
        assert isinstance(loop, asyncio.AbstractEventLoop)
        assert "grapeshot" in type(loop).__module__
        assert loop.run_until_complete(asyncio.sleep(0, 5)) == 5
    finally:
        loop.close()


def test_subclass_of_loop():
    import grapeshot

    class Own(grapeshot.Loop):
        def __init__(self):
            super().__init__()
            self.calls = []

        def call_exception_handler(self, context):
            self.calls.append(context["message"])

    loop = Own()
    loop.call_soon(lambda: 1 / 0)
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()
    assert len(loop.calls) == 1


def test_run():
    import grapeshot

    async def main():
        assert isinstance(asyncio.get_running_loop(), grapeshot.Loop)
        return "result", asyncio.get_running_loop().get_debug()

    assert grapeshot.run(main()) == ("result", False)
    assert grapeshot.run(main(), debug=True) == ("result", True)
    assert grapeshot.run(main(), debug=False) == ("result", False)


def test_run_raises_and_cleans_up():
    import grapeshot

    seen = []

    async def background():
        try:
            await asyncio.sleep(1000)
        finally:
            seen.append("cancelled")

    async def main():
        seen.append(asyncio.get_running_loop())
        task = asyncio.get_running_loop().create_task(background())
        await asyncio.sleep(0)
        assert not task.done()
        raise LookupError("out")

    with pytest.raises(LookupError, match="out"):
        grapeshot.run(main())
    loop, last = seen
    assert last == "cancelled"
    assert loop.is_closed()


def test_run_inside_a_running_loop():
    import grapeshot

    async def nothing():
        raise AssertionError("never runs")

    async def main():
        coroutine = nothing()
        try:
            with pytest.raises(RuntimeError, match="cannot be called"):
                grapeshot.run(coroutine)
        finally:
            coroutine.close()

    grapeshot.run(main())


def test_run_of_something_else():
    import grapeshot

    with pytest.raises((ValueError, TypeError)):
        grapeshot.run(5)
    with pytest.raises(TypeError):
        grapeshot.run(asyncio.sleep, True)


INSTALLED = """
    import asyncio, grapeshot
    {before}

    async def main():
        return type(asyncio.get_running_loop()).__module__.partition(".")[0]

    print(asyncio.run(main()))
    loop = asyncio.new_event_loop()
    print(type(loop).__module__.partition(".")[0])
    loop.close()
"""


def test_install():
    assert script(INSTALLED.format(before="grapeshot.install()"), ("-W", "ignore")).split() == ["grapeshot"] * 2


def test_install_gives_no_warning():
    """install() may set a policy. That must give no deprecation warning, because the program itself uses no policy."""
    assert script("import grapeshot; grapeshot.install(); grapeshot.uninstall(); print('quiet')") == "quiet"


def test_install_twice_and_uninstall():
    before = "grapeshot.install(); grapeshot.install(); grapeshot.uninstall()"
    assert script(INSTALLED.format(before=before), ("-W", "ignore")).split() == ["asyncio"] * 2


STREAMS = """
import asyncio, asyncio.streams, warnings
warnings.simplefilter("ignore", DeprecationWarning)
import grapeshot
names = ["open_connection", "start_server", "open_unix_connection", "start_unix_server"]
def whose():
    functions = {getattr(module, name).__module__ for module in (asyncio, asyncio.streams) for name in names}
    return ",".join(sorted(functions))
"""


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ("grapeshot.install()", "asyncio.streams"),
        ("grapeshot.install(streams=True)", "grapeshot.streams"),
        ("grapeshot.install(); grapeshot.install(streams=True); grapeshot.install()", "grapeshot.streams"),
        ("grapeshot.install(streams=True); grapeshot.install(streams=True); grapeshot.uninstall()", "asyncio.streams"),
        ("grapeshot.install(streams=True); grapeshot.uninstall(); grapeshot.uninstall()", "asyncio.streams"),
    ],
)
def test_install_streams(steps, expected):
    assert script(f"{STREAMS}{steps}; print(whose())") == expected


def test_uninstall_keeps_replacements_by_others():
    code = "grapeshot.install(streams=True); asyncio.start_server = mine = lambda: None; grapeshot.uninstall()"
    code += "; print(asyncio.start_server is mine, asyncio.streams.start_server.__module__)"
    assert script(STREAMS + code) == "True asyncio.streams"


def test_asyncios_functions_use_the_native_streams():
    """A function defined before install() calls the new `asyncio.start_server`. asyncio's classes are not replaced."""
    code = """
async def echo(reader, writer):
    writer.write(await reader.readline())
    writer.close()
async def main():
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(b"line\\n")
    print(await reader.readline(), type(reader).__module__, asyncio.StreamReader.__module__)
    writer.close()
    await writer.wait_closed()
    server.close()
grapeshot.install(streams=True)
asyncio.run(main())
"""
    assert script(STREAMS + code.replace("\\\\", "\\")) == "b'line\\n' grapeshot.streams asyncio.streams"


def test_uninstall_without_install():
    assert script(INSTALLED.format(before="grapeshot.uninstall()"), ("-W", "ignore")).split() == ["asyncio"] * 2


@pytest.mark.skipif(not HAS_POLICIES, reason="this Python has no event loop policies")
def test_policy():
    out = script(
        """
        import asyncio, grapeshot
        policy = grapeshot.EventLoopPolicy()
        asyncio.set_event_loop_policy(policy)
        assert asyncio.get_event_loop_policy() is policy
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        assert asyncio.get_event_loop() is loop
        print(type(loop).__module__.partition(".")[0])
        loop.close()
        """,
        ("-W", "ignore"),
    )
    assert out == "grapeshot"


@pytest.mark.skipif(not HAS_POLICIES, reason="this Python has no event loop policies")
def test_a_policy_set_by_the_user_survives_uninstall():
    out = script(
        """
        import asyncio, grapeshot
        class Own(asyncio.DefaultEventLoopPolicy):
            pass
        own = Own()
        asyncio.set_event_loop_policy(own)
        grapeshot.install()
        grapeshot.uninstall()
        print(type(asyncio.new_event_loop()).__module__.partition(".")[0])
        """,
        ("-W", "ignore"),
    )
    assert out == "asyncio"


def test_works_where_policies_are_gone():
    """Simulate Python 3.16: asyncio has no name with "policy" in it, and new_event_loop() itself makes the loop."""
    out = script(
        """
        import asyncio, warnings
        from asyncio import events, unix_events

        if any("olicy" in name for name in dir(events)):
            for module in (asyncio, events, unix_events):
                for name in [name for name in dir(module) if "olicy" in name]:
                    if name in vars(module):
                        delattr(module, name)
            asyncio.new_event_loop = events.new_event_loop = unix_events._UnixSelectorEventLoop
            asyncio.set_event_loop = events.set_event_loop = lambda loop: None
        assert not any("olicy" in name for name in dir(asyncio))

        import grapeshot

        async def main():
            return isinstance(asyncio.get_running_loop(), grapeshot.Loop)

        print(grapeshot.run(main()))
        print(asyncio.run(main()))
        grapeshot.install()
        print(asyncio.run(main()))
        grapeshot.uninstall()
        print(asyncio.run(main()))
        try:
            grapeshot.EventLoopPolicy
        except (AttributeError, ImportError):
            print("no policy")
        """
    )
    assert out.split("\n") == ["True", "False", "True", "False", "no policy"]


def test_reload_and_two_imports():
    assert script("import grapeshot, grapeshot._core as c; import grapeshot as g; print(g is grapeshot)") == "True"


def test_sub_interpreters_are_refused():
    """The subinterpreter gets a clear ImportError, and the main interpreter is not affected."""
    out = script(
        """
        try:
            import _interpreters
        except ImportError:
            import _xxsubinterpreters as _interpreters
        import os, grapeshot
        answered, answer = os.pipe()
        ident = _interpreters.create()
        source = [
            "import os",
            "try:",
            "    import grapeshot",
            "except ImportError as error:",
            f"    os.write({answer}, str(error).encode())",
            "else:",
            f"    os.write({answer}, b'imported')",
        ]
        _interpreters.run_string(ident, os.linesep.join(source))
        print(os.read(answered, 1000).decode())
        _interpreters.destroy(ident)
        print("alive", grapeshot.run(__import__("asyncio").sleep(0, "well")))
        """,
        ("-W", "ignore"),
    )
    refused, alive = out.splitlines()
    assert refused == "module grapeshot._core does not support loading in subinterpreters"
    assert alive == "alive well"
