"""``gunicorn -k grapeshot.gunicorn.UvicornWorker``: run ASGI applications in gunicorn, with uvicorn on this loop.

The worker is uvicorn's own class with another loop. uvicorn's class comes from the package ``uvicorn-worker``, or if
that is not installed, from uvicorn, where the class is deprecated. For blocking-style WSGI applications see
``grapeshot.coro.gunicorn``.
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
    """uvicorn's worker, with grapeshot as the loop. A subclass may add more uvicorn settings to CONFIG_KWARGS."""

    CONFIG_KWARGS = _Base.CONFIG_KWARGS | {"loop": "grapeshot:new_event_loop"}
