//! Each greenlet has a running loop and a current task of its own. The greenlet library calls `_exchange_running_loops`
//! at each switch (`greenlet.settrace`), except while there is nothing to exchange.
//!
//! asyncio has one running loop per thread and, from Python 3.14 on, one current task per thread. Earlier versions keep
//! the current tasks in a dict whose keys are the loops, which needs no exchange. A greenlet that is suspended while a
//! loop runs in it keeps the loop and the task in its attribute `_grapeshot_running`.
//!
//! A traced switch costs several times as much as an untraced one. So before the hub switches to greenlets whose
//! descriptors are ready, it hides its loop and removes the tracer. It does so only while no greenlet of the thread
//! keeps a loop:
//!
//! ```text
//!   hide():  the thread now has no running loop and no tracer
//!     io::switch()   --> the greenlet runs, and may switch to others
//!     note_return()  <-- the hub runs again. Is a loop running? Then the greenlet has started it,
//!                        so the greenlet keeps that loop, and show() is called
//!   show():  the hub's loop is the running one again, and the tracer is back. This happens before anything else of
//!            the loop runs (`Reactor::hidden`)
//! ```
//!
//! If a greenlet starts a loop while the hub's loop is hidden, the new loop is the thread's running loop until the hub
//! runs again. If callbacks of the new loop switch directly to other greenlets, these see the new loop, too. (This is
//! rare if the new loop is asyncio's own: in a program that gevent has patched, the selector of such a loop switches to
//! the hub before the first callback runs. The hub then finds the new loop running and puts the tracer back, so the
//! switches of the callbacks are traced.) While the hub's loop is hidden, other code that runs in the hub, such as a
//! signal handler of Python, sees no running loop, as in a greenlet.

use std::cell::Cell;
use std::ptr;

use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple};

use crate::binding::args::Args;
use crate::binding::names::{Kept, names};
use crate::binding::object_result::{ObjectResult, none};
use crate::binding::rows::{add_function, row};
use crate::event_loop::probe::Mode;
use crate::event_loop::pyloop::LoopObject;

/// `_asyncio._swap_current_task`, from Python 3.14 on.
static SWAP_CURRENT_TASK: PyOnceLock<Option<Kept>> = PyOnceLock::new();

thread_local! {
    /// The target of the last switch that was reported, only for comparisons. A tracer of the program may call
    /// `_exchange_running_loops` too, so the same switch may be reported twice.
    static LAST_TARGET: Cell<*mut ffi::PyObject> = const { Cell::new(ptr::null_mut()) };
    /// How many suspended greenlets keep a loop. If one of them is destroyed before it runs again, the number stays too
    /// high, and all later switches are traced.
    static KEEPING: Cell<usize> = const { Cell::new(0) };
}

unsafe extern "C" {
    /// Public C API (`Doc/c-api/method.rst`), which pyo3-ffi does not export: the type of bound methods, and the
    /// functions that return borrowed references to the function and to the object of a bound method.
    static mut PyMethod_Type: ffi::PyTypeObject;
    fn PyMethod_Function(method: *mut ffi::PyObject) -> *mut ffi::PyObject;
    fn PyMethod_Self(method: *mut ffi::PyObject) -> *mut ffi::PyObject;
}

/// Functions of greenlet and gevent.
struct Switching {
    get_current: Kept,
    get_trace: Kept,
    set_trace: Kept,
    exchange: Kept,
    /// `Waiter.switch`, unbound.
    waiter_switch: Kept,
}

static SWITCHING: PyOnceLock<Switching> = PyOnceLock::new();

fn switching(py: Python<'_>) -> PyResult<&'static Switching> {
    SWITCHING.get_or_try_init(py, || {
        let greenlet = py.import("greenlet")?;
        let waiter = py.import("gevent._waiter")?.getattr("Waiter")?;
        Ok(Switching {
            get_current: Kept::new(&greenlet.getattr("getcurrent")?),
            get_trace: Kept::new(&greenlet.getattr("gettrace")?),
            set_trace: Kept::new(&greenlet.getattr("settrace")?),
            exchange: Kept::new(&py.import("grapeshot._core")?.getattr("_exchange_running_loops")?),
            waiter_switch: Kept::new(&waiter.getattr("switch")?),
        })
    })
}

fn swap_current_task(py: Python<'_>) -> PyResult<Option<Kept>> {
    let swap = SWAP_CURRENT_TASK.get_or_try_init(py, || {
        if py.version_info() < (3, 14) {
            return Ok::<_, PyErr>(None);
        }
        let swap = py.import("_asyncio")?.getattr("_swap_current_task")?;
        Ok(Some(Kept::new(&swap)))
    });
    swap.copied()
}

/// The dict with a greenlet's attributes.
fn dict_of<'py>(greenlet: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyDict>> {
    // SAFETY: attached; the call returns a new reference, or null with an exception set.
    let dict = unsafe {
        let dict = ffi::PyObject_GenericGetDict(greenlet.as_ptr(), ptr::null_mut());
        Bound::from_owned_ptr_or_err(greenlet.py(), dict)?
    };
    Ok(dict.cast_into::<PyDict>()?)
}

/// Takes out what the greenlet has kept since it was suspended: a tuple of its running loop and its current task.
fn take<'py>(greenlet: &Bound<'py, PyAny>, attribute: Kept) -> PyResult<Option<Bound<'py, PyTuple>>> {
    let (dict, attribute) = (dict_of(greenlet)?, attribute.bind(greenlet.py()));
    let Some(kept) = dict.get_item(&attribute)? else {
        return Ok(None);
    };
    dict.del_item(&attribute)?;
    KEEPING.set(KEEPING.get().saturating_sub(1));
    Ok(Some(kept.cast_into::<PyTuple>()?))
}

/// Lets the greenlet keep the thread's running loop and current task until it runs again.
fn keep<'py>(greenlet: &Bound<'py, PyAny>, running: &Bound<'py, PyAny>) -> PyResult<()> {
    let py = greenlet.py();
    let task = match swap_current_task(py)? {
        Some(swap) => swap.bind(py).call1((running, none(py)))?,
        None => none(py),
    };
    let attribute = names(py)._grapeshot_running.bind(py);
    dict_of(greenlet)?.set_item(attribute, (running, task))?;
    KEEPING.set(KEEPING.get() + 1);
    Ok(())
}

fn set_running(py: Python<'_>, event_loop: &Bound<'_, PyAny>) -> PyResult<()> {
    names(py).set_running_loop.bind(py).call1((event_loop,)).map(drop)
}

fn exchange<'py>(py: Python<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let Some(greenlets) = args.get(1) else {
        return Err(PyTypeError::new_err(
            "_exchange_running_loops() takes two arguments",
        ));
    };
    let greenlets = greenlets.cast_into::<PyTuple>()?;
    let (origin, target) = (greenlets.get_item(0)?, greenlets.get_item(1)?);
    // Nothing changes if this switch was reported before, or if it leads back to the greenlet that it came from. For
    // example, a switch to a greenlet that has ended goes to its parent, which may be the greenlet that switches.
    if LAST_TARGET.replace(target.as_ptr()) == target.as_ptr() || origin.is(&target) {
        return Ok(none(py));
    }
    let running = names(py).read_running_loop.bind(py).call0()?;
    let kept = if KEEPING.get() == 0 {
        None
    } else {
        take(&target, names(py)._grapeshot_running)?
    };
    if !running.is_none() {
        keep(&origin, &running)?;
    }
    if let Some(kept) = kept {
        let (event_loop, task) = (kept.get_item(0)?, kept.get_item(1)?);
        set_running(py, &event_loop)?;
        if let Some(swap) = swap_current_task(py)?
            && !task.is_none()
        {
            swap.bind(py).call1((event_loop, task))?;
        }
    } else if !running.is_none() {
        set_running(py, &none(py))?;
    }
    Ok(none(py))
}

// ---- switches without the tracer ------------------------------------------------------------------------------------

/// The greenlet that `callback` switches to, if `callback` is the method `switch` of a `Waiter` on which a greenlet
/// waits. Each wait for a descriptor has such a callback.
#[inline]
pub(super) fn target_of<'py>(callback: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
    let py = callback.py();
    // SAFETY: attached, with a live object. A bound method holds references to its function and its object. The call
    // returns a new reference, or null with an exception set.
    let greenlet = unsafe {
        if ffi::Py_TYPE(callback.as_ptr()) != &raw mut PyMethod_Type
            || PyMethod_Function(callback.as_ptr()) != switching(py)?.waiter_switch.as_ptr()
        {
            return Ok(None);
        }
        let waiter = PyMethod_Self(callback.as_ptr());
        let name = names(py).greenlet.as_ptr();
        Bound::from_owned_ptr_or_err(py, ffi::PyObject_GetAttr(waiter, name))?
    };
    Ok((!greenlet.is_none()).then_some(greenlet))
}

/// Hides the loop, which runs in this thread, from greenlets, and removes the tracer. `callback` is the method of a
/// waiter. Returns false if the loop cannot be hidden.
#[inline]
pub(super) fn hide(event_loop: &Bound<'_, PyAny>, callback: &Bound<'_, PyAny>) -> PyResult<bool> {
    if LoopObject::of(event_loop).reactor().is_hidden() {
        return Ok(true);
    }
    begin_to_hide(event_loop, callback)
}

/// Does not hide the loop if a greenlet keeps a loop, if other code traces switches, if the loop's probe looks at each
/// step, or if the loop runs in a greenlet other than the waiter's hub.
#[inline(never)]
fn begin_to_hide(event_loop: &Bound<'_, PyAny>, callback: &Bound<'_, PyAny>) -> PyResult<bool> {
    let (py, reactor) = (event_loop.py(), LoopObject::of(event_loop).reactor());
    let switching = switching(py)?;
    let hub = callback.getattr("__self__")?.getattr("hub")?;
    if !switching.get_current.bind(py).call0()?.is(&hub) {
        return Ok(false);
    }
    let tracer = switching.get_trace.bind(py).call0()?;
    if tracer.is_none() {
        // A greenlet has removed the tracer, so the switch back to the hub was not traced, and the hub may still keep
        // its loop. What it keeps is dropped, because `show` makes the loop the running one in any case, and puts the
        // tracer back.
        drop(take(&hub, names(py)._grapeshot_running)?);
    } else if tracer.as_ptr() != switching.exchange.as_ptr() {
        return Ok(false);
    }
    if KEEPING.get() > 0 || reactor.probe.has(Mode::STEPS) {
        if tracer.is_none() {
            show(py, LoopObject::of(event_loop))?;
        }
        return Ok(false);
    }
    set_running(py, &none(py))?;
    switching.set_trace.bind(py).call1((none(py),))?;
    reactor.note_hidden(show);
    Ok(true)
}

/// Called in the hub: makes the loop the running one again, and puts the tracer back.
#[cold]
fn show(py: Python<'_>, event_loop: &LoopObject) -> PyResult<()> {
    LAST_TARGET.set(ptr::null_mut()); // some switches were not reported
    set_running(py, &event_loop.to_bound(py))?;
    let switching = switching(py)?;
    let exchange = switching.exchange.bind(py);
    let set_trace = switching.set_trace.bind(py);
    let tracer = set_trace.call1((&exchange,))?;
    if !tracer.is_none() && !tracer.is(&exchange) {
        // A greenlet has set `tracer`. From now on, both `tracer` and `exchange` are called.
        set_trace.call1((tracer,))?;
        py.import("grapeshot.gevent._loop")?
            .call_method0("_watch_switches")?;
    }
    Ok(())
}

/// Called when the hub runs again after a switch to `greenlet` while the loop was hidden.
#[inline]
pub(super) fn note_return(event_loop: &Bound<'_, PyAny>, greenlet: &Bound<'_, PyAny>) -> PyResult<()> {
    let py = event_loop.py();
    let running = names(py).read_running_loop.bind(py).call0()?;
    if running.is_none() {
        return Ok(());
    }
    keep_for_runner(event_loop, greenlet, &running)
}

#[cold]
#[inline(never)]
fn keep_for_runner(
    event_loop: &Bound<'_, PyAny>,
    greenlet: &Bound<'_, PyAny>,
    running: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let py = event_loop.py();
    let native = LoopObject::of(event_loop);
    let runner = py
        .import("grapeshot.gevent._runner")?
        .call_method1("runner_of", (running, greenlet))?;
    keep(&runner, running)?;
    set_running(py, &none(py))?;
    native.reactor().show(py, native)
}

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let row = row!(
        function,
        exchange,
        _exchange_running_loops,
        "Exchange the running loops of two greenlets."
    );
    add_function(module, row, "", c"grapeshot._core")
}
