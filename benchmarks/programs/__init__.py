"""Compare programs that were written for gevent, eventlet, FastAPI, Django and Celery, as they are and on grapeshot."""
