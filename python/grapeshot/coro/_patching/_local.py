"""``threading.local`` of :func:`grapeshot.coro.patch`: each coro and each real thread has its own attributes."""

from __future__ import annotations

import _thread
import contextvars
import weakref

from grapeshot import _core

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_real_local = _thread._local
_current_or_none = _core._coro_current_or_none
_MISSING = object()


class _Spaces:
    """All attributes of one ``local`` object, by coro and by real thread."""

    __slots__ = ("__weakref__", "args", "by_coro", "kwargs", "of_thread")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args = args
        self.kwargs = kwargs
        # The attributes of each real thread. The interpreter frees them when the thread ends.
        self.of_thread = _real_local()
        self.by_coro: dict[int, dict[str, Any]] = {}


# coro id -> the `local` objects that the coro has used, to clean up when it ends
_used: dict[int, weakref.WeakValueDictionary[int, _Spaces]] = {}


def _forget(coro: Any) -> None:
    """Drop the attributes of a coro that has ended."""
    ident = coro.id
    for spaces in list((_used.pop(ident, None) or {}).values()):
        spaces.by_coro.pop(ident, None)


def _note_use(coro: Any, spaces: _Spaces) -> None:
    used = _used.get(coro.id)
    if used is None:
        used = _used[coro.id] = weakref.WeakValueDictionary()
        coro.add_done_callback(_forget, context=contextvars.Context())
    used[id(spaces)] = spaces


class local:  # noqa: N801
    """An object that has separate attributes for each coro and each real thread."""

    __slots__ = ("__weakref__", "_grapeshot_spaces")

    def __new__(cls, /, *args: Any, **kwargs: Any) -> Any:
        if (args or kwargs) and cls.__init__ is object.__init__:
            raise TypeError("Initialization arguments are not supported")
        self = object.__new__(cls)
        _set_spaces(self, _Spaces(args, kwargs))
        # Make the dict of the calling coro or thread now, so that _attributes() does not call __init__ for it: Python
        # calls __init__ when __new__ returns.
        _make(self, _get_spaces(self), _current_or_none())
        return self

    def __getattribute__(self, name: str) -> Any:
        attributes = _attributes(self)
        if name == "__dict__":
            return attributes
        value = attributes.get(name, _MISSING)
        if value is not _MISSING:
            return value
        return object.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__dict__":
            raise AttributeError(f"'{type(self).__name__}' object attribute '__dict__' is read-only")
        attributes = _attributes(self)
        if _has_descriptor(type(self), name, "__set__"):
            object.__setattr__(self, name, value)
        else:
            attributes[name] = value

    def __delattr__(self, name: str) -> None:
        if name == "__dict__":
            raise AttributeError(f"'{type(self).__name__}' object attribute '__dict__' is read-only")
        attributes = _attributes(self)
        if _has_descriptor(type(self), name, "__delete__"):
            object.__delattr__(self, name)
        elif attributes.pop(name, _MISSING) is _MISSING:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")


_get_spaces: Any = local._grapeshot_spaces.__get__  # type: ignore[attr-defined]
_set_spaces: Any = local._grapeshot_spaces.__set__  # type: ignore[attr-defined]


def _make(self: Any, spaces: _Spaces, coro: Any) -> dict[str, Any]:
    attributes: dict[str, Any] = {}
    if coro is None:
        spaces.of_thread.attributes = attributes
    else:
        spaces.by_coro[coro.id] = attributes
        _note_use(coro, spaces)
    return attributes


def _attributes(self: Any) -> dict[str, Any]:
    """Return the dict of the running coro or thread. A new one is filled by ``__init__``, if a subclass has it."""
    spaces: _Spaces = _get_spaces(self)
    coro = _current_or_none()
    attributes: dict[str, Any] | None
    if coro is None:
        attributes = getattr(spaces.of_thread, "attributes", None)
    else:
        attributes = spaces.by_coro.get(coro.id)
    if attributes is None:
        attributes = _make(self, spaces, coro)
        kind = type(self)
        if kind.__init__ is not object.__init__:
            try:
                kind.__init__(self, *spaces.args, **spaces.kwargs)
            except BaseException:
                if coro is None:
                    del spaces.of_thread.attributes
                else:
                    spaces.by_coro.pop(coro.id, None)
                raise
    return attributes


def _has_descriptor(kind: type, name: str, method: str) -> bool:
    """Whether the class handles this attribute itself, with a property or a slot for instance."""
    for base in kind.__mro__:
        found = base.__dict__.get(name, _MISSING)
        if found is not _MISSING:
            return hasattr(type(found), method)
    return False
