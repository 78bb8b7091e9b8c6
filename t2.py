from t import *
app.conf.worker_pool = 'grapeshot.coro.celery:TaskPool'
