"""Compare programs that were written for gevent, FastAPI and Celery, as they are and on grapeshot."""
