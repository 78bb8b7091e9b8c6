//! `_exchange_running_loops`: gives each greenlet a running loop and a current task of its own. greenlet calls it at
//! each switch (`greenlet.settrace`).
//!
//! asyncio has one running loop per thread and, from Python 3.14 on, one current task per thread. Earlier versions keep
//! the current tasks in a dict whose keys are the loops, which needs no exchange. A greenlet that is suspended while a
//! loop runs in it keeps the loop and the task in its attribute `_grapeshot_running`.

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

/// `_asyncio._swap_current_task`, from Python 3.14 on.
static SWAP_CURRENT_TASK: PyOnceLock<Option<Kept>> = PyOnceLock::new();

thread_local! {
    /// The target of the last switch, only to be compared. A second tracer may report the same switch again.
    static LAST_TARGET: Cell<*mut ffi::PyObject> = const { Cell::new(ptr::null_mut()) };
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
    Ok(Some(kept.cast_into::<PyTuple>()?))
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
    let (attribute, swap) = (names(py)._grapeshot_running, swap_current_task(py)?);
    let running = names(py).read_running_loop.bind(py).call0()?;
    let kept = take(&target, attribute)?;
    if !running.is_none() {
        let task = match swap {
            Some(swap) => swap.bind(py).call1((&running, none(py)))?,
            None => none(py),
        };
        dict_of(&origin)?.set_item(attribute.bind(py), (&running, task))?;
    }
    if let Some(kept) = kept {
        let (event_loop, task) = (kept.get_item(0)?, kept.get_item(1)?);
        names(py).set_running_loop.bind(py).call1((&event_loop,))?;
        if let Some(swap) = swap
            && !task.is_none()
        {
            swap.bind(py).call1((event_loop, task))?;
        }
    } else if !running.is_none() {
        names(py).set_running_loop.bind(py).call1((none(py),))?;
    }
    Ok(none(py))
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
