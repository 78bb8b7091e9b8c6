
from t import *
class Hook(Task):
    def on_failure(self, exc, task_id, args, kwargs, einfo):
        store.rpush("began", "hook")
        add_sync.delay(1, 2).get(timeout=6, disable_sync_subtasks=False)
        store.rpush("done", "hook")
@app.task
def add_sync(a, b): return a + b
@app.task(base=Hook, time_limit=0.3)
def limited(): time.sleep(5)
@app.task(base=Hook)
def fails(): raise LookupError("x")
