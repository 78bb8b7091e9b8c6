"""``gunicorn -k grapeshot.gunicorn.UvicornWorker``: ASGI applications on uvicorn in gunicorn's workers, on this loop.

It is uvicorn's own worker class with another loop, from the package ``uvicorn-worker`` (or, without that, from uvicorn,
which deprecates it). For blocking-style WSGI applications see ``grapeshot.coro.gunicorn``.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from uvicorn.workers import UvicornWorker as _Base
else:
    try:
        from uvicorn_worker import UvicornWorker as _Base
    except ModuleNotFoundError:
        try:
            from uvicorn.workers import UvicornWorker as _Base
        except ModuleNotFoundError as error:
            raise ImportError(f"{error}: pip install 'grapeshot[gunicorn]'") from error

__all__ = ["UvicornWorker"]


class UvicornWorker(_Base):  # type: ignore[misc, unused-ignore]
    """uvicorn's worker, with grapeshot as the loop. A subclass may set more of uvicorn's settings in CONFIG_KWARGS."""

    CONFIG_KWARGS = _Base.CONFIG_KWARGS | {"loop": "grapeshot:new_event_loop"}
