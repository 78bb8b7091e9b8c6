from t import *
@app.task
def end():
    store.rpush('began', 'end'); raise exceptions.WorkerShutdown(3)
