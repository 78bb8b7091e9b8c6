"""``PatchWarning``."""

from __future__ import annotations


class PatchWarning(RuntimeWarning):
    """Modules that were imported before ``coro.patch()`` hold originals of names that it replaces."""
