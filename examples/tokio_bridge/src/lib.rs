//! An extension module whose futures run on tokio's threads, while Python awaits them on its event loop.
//!
//! `future_into_py` makes a Rust future awaitable in Python. The future runs on the tokio runtime, and its result comes
//! back through `loop.call_soon_threadsafe`. `into_future` does the opposite: a Python coroutine becomes a task of the
//! event loop, and a future that Rust can await. Both find the loop with the public `asyncio.get_running_loop`, so they
//! work with any loop. `demo.py` in the directory of this crate shows how to build and use the module.

use std::sync::Arc;
use std::time::Duration;

use pyo3::exceptions::{PyConnectionError, PyRuntimeError, PyStopAsyncIteration, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use pyo3_async_runtimes::tokio::{future_into_py, get_current_locals, get_runtime, into_future, scope};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::sync::{Mutex, mpsc};
use tokio::task::JoinSet;

/// Waits on tokio's timer, then returns `value`.
#[pyfunction]
fn sleep<'py>(py: Python<'py>, delay_s: f64, value: Py<PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let delay =
        Duration::try_from_secs_f64(delay_s).map_err(|error| PyValueError::new_err(error.to_string()))?;
    future_into_py(py, async move {
        tokio::time::sleep(delay).await;
        Ok(value)
    })
}

/// Sends a line to a TCP server with tokio's sockets and returns the line that the server sends back.
///
/// Raises `ConnectionError` if the server refuses the connection or closes it without an answer, and another `OSError`
/// if the server cannot be reached.
#[pyfunction]
fn ask<'py>(py: Python<'py>, host: String, port: u16, line: String) -> PyResult<Bound<'py, PyAny>> {
    future_into_py(py, async move {
        let stream = TcpStream::connect((host, port)).await?;
        let mut stream = BufReader::new(stream);
        stream.write_all(format!("{line}\n").as_bytes()).await?;
        let mut answer = String::new();
        if stream.read_line(&mut answer).await? == 0 {
            return Err(PyConnectionError::new_err(
                "the server closed the connection without an answer",
            ));
        }
        answer.truncate(answer.trim_end().len());
        Ok(answer)
    })
}

/// Calls the coroutine function with each of `values` concurrently, awaits all results in tokio, and returns their sum.
///
/// The first exception is raised at once. It does not cancel the other calls.
#[pyfunction]
fn sum_of<'py>(py: Python<'py>, function: Py<PyAny>, values: Vec<i64>) -> PyResult<Bound<'py, PyAny>> {
    let locals = get_current_locals(py)?;
    future_into_py(py, async move {
        let mut calls = JoinSet::new();
        for value in values {
            // A spawned tokio task does not inherit the caller's event loop and context, so pass them on.
            let future = Python::attach(|py| {
                let coroutine = function.bind(py).call1((value,))?;
                pyo3_async_runtimes::into_future_with_locals(&locals, coroutine)
            })?;
            calls.spawn(scope(locals.clone(), future));
        }
        let mut sum = 0;
        while let Some(joined) = calls.join_next().await {
            let result = joined.map_err(|error| PyValueError::new_err(error.to_string()))??;
            sum += Python::attach(|py| result.extract::<i64>(py))?;
        }
        Ok(sum)
    })
}

/// Awaits the coroutine in tokio, and returns its result or raises its exception.
#[pyfunction]
fn relay<'py>(py: Python<'py>, coroutine: Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let future = into_future(coroutine)?;
    future_into_py(py, future)
}

/// Calls a Python callable when it is dropped.
struct OnDrop(Py<PyAny>);

impl Drop for OnDrop {
    fn drop(&mut self) {
        Python::attach(|py| {
            if let Err(error) = self.0.call0(py) {
                error.write_unraisable(py, Some(self.0.bind(py)));
            }
        });
    }
}

/// Never ends. When the awaiting Python task is cancelled, the Rust future is dropped, and `on_drop` is called on one
/// of tokio's threads.
#[pyfunction]
fn hang(py: Python<'_>, on_drop: Py<PyAny>) -> PyResult<Bound<'_, PyAny>> {
    let guard = OnDrop(on_drop);
    future_into_py(py, async move {
        let _guard = guard;
        std::future::pending::<()>().await;
        Ok(())
    })
}

/// Panics in a tokio task. In Python, an exception is raised.
#[pyfunction]
fn panic(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    future_into_py::<_, ()>(py, async { panic!("a panic in tokio") })
}

/// An asynchronous iterator over `0..count`. A tokio task sends the numbers through a channel.
#[pyclass(frozen)]
struct Counter {
    numbers: Arc<Mutex<mpsc::Receiver<u64>>>,
}

#[pymethods]
impl Counter {
    #[new]
    fn new(count: u64) -> Self {
        let (sender, numbers) = mpsc::channel(16);
        get_runtime().spawn(async move {
            for number in 0..count {
                if sender.send(number).await.is_err() {
                    break; // the iterator was dropped
                }
            }
        });
        Counter {
            numbers: Arc::new(Mutex::new(numbers)),
        }
    }

    fn __aiter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __anext__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let numbers = Arc::clone(&self.numbers);
        future_into_py(py, async move {
            let next = numbers.lock().await.recv().await;
            next.ok_or_else(|| PyStopAsyncIteration::new_err(()))
        })
    }
}

/// Calls `loop.call_soon_threadsafe(callback, index)` `count` times from tokio tasks. Returns without waiting for them.
#[pyfunction]
fn flood(py: Python<'_>, event_loop: Py<PyAny>, callback: Py<PyAny>, count: usize) {
    for index in 0..count {
        let (event_loop, callback) = (event_loop.clone_ref(py), callback.clone_ref(py));
        get_runtime().spawn(async move {
            Python::attach(|py| {
                let arguments =
                    PyTuple::new(py, [callback.into_bound(py), index.into_pyobject(py)?.into_any()])?;
                event_loop.call_method1(py, "call_soon_threadsafe", arguments)
            })
        });
    }
}

/// Waits until tokio's threads are idle. Call this after the event loop has ended, because a thread that is calling
/// into the interpreter while the interpreter exits crashes the process. Having received a result is not enough: the
/// call that delivered it may not have returned yet.
#[pyfunction]
fn wait_until_idle(py: Python<'_>) -> PyResult<()> {
    py.detach(|| {
        while get_runtime().metrics().num_alive_tasks() > 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        // A single blocking thread delivers all results in order, so wait until it has reached this empty job.
        get_runtime().block_on(get_runtime().spawn_blocking(|| ()))
    })
    .map_err(|error| PyRuntimeError::new_err(error.to_string()))
}

#[pymodule(gil_used = false)]
fn tokio_bridge(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.enable_all().max_blocking_threads(1);
    pyo3_async_runtimes::tokio::init(builder);
    module.add_class::<Counter>()?;
    module.add_function(wrap_pyfunction!(sleep, module)?)?;
    module.add_function(wrap_pyfunction!(ask, module)?)?;
    module.add_function(wrap_pyfunction!(sum_of, module)?)?;
    module.add_function(wrap_pyfunction!(relay, module)?)?;
    module.add_function(wrap_pyfunction!(hang, module)?)?;
    module.add_function(wrap_pyfunction!(panic, module)?)?;
    module.add_function(wrap_pyfunction!(flood, module)?)?;
    module.add_function(wrap_pyfunction!(wait_until_idle, module)?)?;
    Ok(())
}
