"""The code that ``python -m grapeshot enable`` adds to the start of each Python process that has GRAPESHOT_INSTALL set.

Nothing imports this module: ``_start/site.py`` writes its source text into a .pth file, so the text must not depend on
the package. The code waits until the process imports asyncio or grapeshot, and then installs the loop. In a process
that imports neither, it costs a short call per import. If grapeshot has been uninstalled, asyncio keeps its own loop.
"""

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class _Finder:
    """The first entry of ``sys.meta_path``. It removes itself when asyncio or grapeshot is imported."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name not in ("asyncio", "grapeshot") or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        from importlib.util import find_spec

        spec = find_spec(name)
        if spec is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module):  # type: ignore[no-untyped-def]
                vars(loader).pop("exec_module", None)
                execute(module)
                try:
                    from grapeshot._start.other_loops import install_everywhere
                except ModuleNotFoundError as error:
                    if error.name != "grapeshot":
                        raise
                else:
                    install_everywhere()

            loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder())
