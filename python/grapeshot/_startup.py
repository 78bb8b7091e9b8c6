"""What every Python process runs at its start if GRAPESHOT_INSTALL is set, once ``python -m grapeshot enable`` was run.

Nothing imports this module: ``_site`` writes its text into a .pth file, so that it neither imports the package nor
needs it. It waits until the process imports asyncio (or grapeshot), and installs the loop then. A process that does
neither pays for nothing else. Where grapeshot is not installed any more, asyncio keeps its own loop.
"""

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class _Finder:
    """Stands first on ``sys.meta_path`` until the first import of asyncio or grapeshot, whichever is first."""

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
                    from grapeshot._other_loops import install_everywhere
                except ModuleNotFoundError as error:
                    if error.name != "grapeshot":
                        raise
                else:
                    install_everywhere()

            loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder())
