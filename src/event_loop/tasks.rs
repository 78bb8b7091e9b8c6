//! `create_future`, `create_task` and the task factory. They create stock `asyncio.Future` and `asyncio.Task` objects.

use std::ffi::CStr;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use pyo3::exceptions::{PyAttributeError, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyTuple};

use super::probe::Mode;
use super::pyloop::LoopObject;
use crate::binding::args::Args;
use crate::binding::names::{Kept, names};
use crate::binding::native_type::This;
use crate::binding::object_result::{ObjectResult, none};
use crate::binding::rows::row;
use crate::binding::{HAS_GIL, current_thread, new_objects};

/// The number of values (the coroutine, and the values of keywords such as name, context and `eager_start`) that fit
/// into the array of the fast call.
const MAX_TASK_VALUES: usize = 6;

/// The class `name` of an asyncio module. Looked up in the module's dict each time, because programs replace
/// `asyncio.tasks.Task`.
#[inline]
fn class_in(py: Python<'_>, module_dict: Kept, name: Kept) -> PyResult<Bound<'_, PyAny>> {
    match module_dict
        .bind(py)
        .cast_into::<PyDict>()?
        .get_item(name.bind(py))?
    {
        Some(class) => Ok(class),
        None => Err(PyAttributeError::new_err(
            "asyncio.futures.Future or asyncio.tasks.Task has been deleted",
        )),
    }
}

/// `{"loop": self}`, created once per run. Passing this dict saves a third of the cost of creating a future. None while
/// the loop does not run. In free-threaded builds, only the thread that runs the loop gets the dict, because it drops
/// the dict at the end of the run. All other threads get None.
#[inline]
fn future_kwargs(this: This<'_, LoopObject>) -> PyResult<Option<Bound<'_, PyAny>>> {
    let py = this.py();
    if !HAS_GIL && this.reactor().access.owner() != current_thread() {
        return Ok(None);
    }
    if let Some(kwargs) = this.future_kwargs.get(py) {
        return Ok(Some(kwargs));
    }
    if this.reactor().access.owner() == 0 {
        return Ok(None);
    }
    let kwargs = new_objects::dict(py)?;
    kwargs.set_item(names(py).loop_keyword.bind(py), this.to_bound())?;
    this.future_kwargs.set(kwargs.clone().into_any());
    Ok(Some(kwargs.into_any()))
}

fn create_future<'py>(this: This<'py, LoopObject>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    let py = this.py();
    let future_type = class_in(py, names(py).futures_dict, names(py).Future)?;
    if future_type.as_ptr() == names(py).future_type.as_ptr()
        && let Some(kwargs) = future_kwargs(this)?
    {
        // SAFETY: attached; all three are live. The type is CPython's own Future, which does not change the dict.
        return unsafe {
            let made = ffi::PyObject_Call(future_type.as_ptr(), names(py).no_args.as_ptr(), kwargs.as_ptr());
            Bound::from_owned_ptr_or_err(py, made)
        };
    }
    let call = [std::ptr::null_mut(), this.as_ptr()];
    // SAFETY: Future(loop=self): one keyword value, its name in the kept tuple. call[0] is the free place that the
    // offset flag requires.
    unsafe {
        Bound::from_owned_ptr_or_err(
            py,
            ffi::PyObject_Vectorcall(
                future_type.as_ptr(),
                call[1..].as_ptr(),
                ffi::PY_VECTORCALL_ARGUMENTS_OFFSET,
                names(py).kw_loop.as_ptr(),
            ),
        )
    }
}

/// The method table entry of `task_wakeup`, the callback with which CPython's own `Task` waits for a future. Null until
/// the entry is found.
static TASK_WAKEUP: AtomicPtr<ffi::PyMethodDef> = AtomicPtr::new(ptr::null_mut());

/// Whether the callback is the one with which CPython's own `Task` waits for a future.
#[inline]
fn wakes_task(callback: &Bound<'_, PyAny>) -> bool {
    // SAFETY: attached, with a live object; a builtin function has this layout.
    unsafe {
        if ffi::PyCFunction_CheckExact(callback.as_ptr()) == 0 {
            return false;
        }
        let function = &*callback.as_ptr().cast::<ffi::PyCFunctionObject>();
        let known = TASK_WAKEUP.load(Ordering::Relaxed);
        function.m_ml == known || (known.is_null() && learn_wakeup(callback.py(), function))
    }
}

/// Returns whether the function is `task_wakeup`. If it is, stores its method table entry.
///
/// # Safety
/// `function` is a live builtin function.
#[cold]
unsafe fn learn_wakeup(py: Python<'_>, function: &ffi::PyCFunctionObject) -> bool {
    let task_type = names(py).task_type.as_ptr().cast();
    // SAFETY: by the contract; each entry of a method table has a name.
    let is_wakeup = unsafe {
        !function.m_self.is_null()
            && ffi::PyObject_TypeCheck(function.m_self, task_type) != 0
            && CStr::from_ptr((*function.m_ml).ml_name) == c"task_wakeup"
    };
    if is_wakeup {
        TASK_WAKEUP.store(function.m_ml, Ordering::Relaxed);
    }
    is_wakeup
}

impl LoopObject {
    /// Schedules `callback(awaited)`. `awaited` is one of our own objects that tasks await, and its wait has ended
    /// without an exception.
    ///
    /// If the callback is that of a CPython task, it gets a done future instead of `awaited`, for speed. The task asks
    /// the object that it gets for a result, and drops the result. If that object were not an `asyncio.Future`, the
    /// task would make a new string "result" to look up the method. CPython's cache of methods compares names by
    /// address, so it never contains a new string, and each lookup would be slow. Each lookup would also write its
    /// string into the cache. In free-threaded builds, all threads would write into the same entry.
    #[inline]
    pub(crate) fn soon_after_wait(
        &self,
        callback: &Bound<'_, PyAny>,
        awaited: *mut ffi::PyObject,
        context: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        if wakes_task(callback)
            && self.is_owned_here()
            && let Some(future) = self.done_future.get(callback.py())
        {
            return self.soon(callback, &[future.as_ptr()], context);
        }
        self.soon(callback, &[awaited], context)
    }

    /// Makes the future that `soon_after_wait` passes to tasks. This is done before a run: if it failed during a
    /// wake-up, the wake-up would be lost.
    pub(super) fn make_done_future(&self, py: Python<'_>) -> PyResult<()> {
        let kwargs = names(py).done_future_kwargs.bind(py).cast_into::<PyDict>()?;
        let future = names(py).future_type.bind(py).call((), Some(&kwargs))?;
        future.call_method1(names(py).set_result.bind(py).cast::<PyString>()?, (py.None(),))?;
        self.done_future.set(future);
        Ok(())
    }
}

/// The keyword argument that the loop itself gives to a task.
const LOOP: &str = "loop";

#[cold]
fn unexpected(keyword: &str) -> PyErr {
    PyTypeError::new_err(format!(
        "create_task() got an unexpected keyword argument '{keyword}'"
    ))
}

/// The keyword names for a call of Task: "loop", followed by the names that the program gave, which must not include
/// "loop". A call site passes the same constant tuple each time, so the last tuple and its result are remembered.
fn task_kwnames(this: This<'_, LoopObject>, kwnames: *mut ffi::PyObject) -> ObjectResult<'_> {
    let py = this.py();
    if kwnames.is_null() {
        return Ok(names(py).kw_loop.bind(py));
    }
    if this.task_kwnames.0.as_ptr() == kwnames
        && let Some(known) = this.task_kwnames.1.get(py)
    {
        return Ok(known);
    }
    // SAFETY: by the calling convention kwnames is a live tuple of strings.
    let given = unsafe { Bound::from_borrowed_ptr(py, kwnames) }.cast_into::<PyTuple>()?;
    if given.contains(names(py).loop_keyword.bind(py))? {
        return Err(unexpected(LOOP));
    }
    let mut all = vec![names(py).loop_keyword.bind(py)];
    all.extend(given.iter());
    let all = new_objects::tuple(py, all.into_iter())?.into_any();
    this.task_kwnames.0.set(given.into_any());
    this.task_kwnames.1.set(all.clone());
    Ok(all)
}

/// Whether the call has no keyword, or only `name=None`, which `asyncio.create_task` of Python 3.13 passes.
#[inline]
fn has_plain_keywords(args: &Args<'_, '_>) -> bool {
    let kwnames = args.kwnames();
    if kwnames.is_null() {
        return true;
    }
    // SAFETY: by the calling convention kwnames is a live tuple with a name for each keyword value, which is alive too.
    unsafe {
        ffi::PyTuple_GET_SIZE(kwnames) == 1
            && ffi::PyTuple_GET_ITEM(kwnames, 0) == names(args.py()).name.as_ptr()
            && args.values().last() == Some(&ffi::Py_None())
    }
}

/// Whether asyncio's C code knows this loop as the one that runs in this thread. Before Python 3.14, finding out costs
/// more than it saves, so the result is always false.
#[inline]
fn is_running_loop(this: This<'_, LoopObject>) -> PyResult<bool> {
    let Some(get_running_loop) = names(this.py()).get_running_loop else {
        return Ok(false);
    };
    // SAFETY: attached; the function is kept forever.
    let running = unsafe {
        let running = ffi::PyObject_CallNoArgs(get_running_loop.as_ptr());
        Bound::from_owned_ptr_or_err(this.py(), running)?
    };
    Ok(running.as_ptr() == this.as_ptr())
}

/// `Task(coro, loop=self)` for CPython's own `Task`, without keywords if possible. For a call with keywords, CPython
/// makes a dict, which is a tenth of the cost of creating, running and dropping a task. So either the task finds the
/// running loop itself, or it gets the dict of `future_kwargs`. None if neither is possible.
#[inline]
fn create_stock_task<'py>(
    this: This<'py, LoopObject>,
    task_type: &Bound<'py, PyAny>,
    coro: *mut ffi::PyObject,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let py = this.py();
    if is_running_loop(this)? {
        // SAFETY: attached; both are alive.
        let made = unsafe { ffi::PyObject_CallOneArg(task_type.as_ptr(), coro) };
        // SAFETY: the result of a call.
        return unsafe { Bound::from_owned_ptr_or_err(py, made) }.map(Some);
    }
    let Some(kwargs) = future_kwargs(this)? else {
        return Ok(None);
    };
    // SAFETY: attached; the coroutine is an argument, alive for the length of the call.
    let args = new_objects::tuple(py, [unsafe { Bound::from_borrowed_ptr(py, coro) }].into_iter())?;
    // SAFETY: attached; all three are live. The type is CPython's own Task, which does not change the dict.
    unsafe {
        let made = ffi::PyObject_Call(task_type.as_ptr(), args.as_ptr(), kwargs.as_ptr());
        Bound::from_owned_ptr_or_err(py, made).map(Some)
    }
}

fn create_task<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let py = this.py();
    this.reactor().check_closed()?;
    if args.positional().len() > 1 {
        return Err(args.wrong_count("exactly 1", None));
    }
    let factory = this.task_factory.get(py);
    if factory.is_some() || args.positional().is_empty() || this.reactor().probe.has(Mode::TASKS) {
        let task = create_task_slowly(this, args, factory)?;
        this.reactor().probe.note_task(&task)?;
        return Ok(task);
    }
    let values = args.values();
    if values.len() > MAX_TASK_VALUES {
        return create_task_slowly(this, args, None);
    }
    let task_type = class_in(py, names(py).tasks_dict, names(py).Task)?;
    if has_plain_keywords(&args)
        && task_type.as_ptr() == names(py).task_type.as_ptr()
        && let Some(task) = create_stock_task(this, &task_type, values[0])?
    {
        return Ok(task);
    }
    let kwnames = task_kwnames(this, args.kwnames())?;
    let mut call = [std::ptr::null_mut(); MAX_TASK_VALUES + 2];
    call[1] = values[0];
    call[2] = this.as_ptr();
    call[3..2 + values.len()].copy_from_slice(&values[1..]);
    // SAFETY: Task(coro, loop=self, **kwargs): one positional value, then the keyword values in the order of their
    // names. call[0] is the free place that the offset flag requires.
    unsafe {
        Bound::from_owned_ptr_or_err(
            py,
            ffi::PyObject_Vectorcall(
                task_type.as_ptr(),
                call[1..].as_ptr(),
                1 | ffi::PY_VECTORCALL_ARGUMENTS_OFFSET,
                kwnames.as_ptr(),
            ),
        )
    }
}

/// `create_task` for all unusual calls. If there is a task factory, calls `factory(loop, coro, **kwargs)`; on Python
/// versions before 3.13.3, `name` and `context` are handled as in the asyncio of that version.
#[cold]
fn create_task_slowly<'py>(
    this: This<'py, LoopObject>,
    args: Args<'_, 'py>,
    factory: Option<Bound<'py, PyAny>>,
) -> ObjectResult<'py> {
    let py = this.py();
    let kwargs = PyDict::new(py);
    for (name, value) in args.keywords() {
        // SAFETY: keyword values are alive for the length of the call.
        kwargs.set_item(name, unsafe { Bound::from_borrowed_ptr(py, value) })?;
    }
    let coro = match args.get(0) {
        Some(coro) => coro,
        None => match kwargs.get_item("coro")? {
            Some(coro) => {
                kwargs.del_item("coro")?;
                coro
            }
            None => {
                return Err(PyTypeError::new_err(
                    "create_task() missing 1 required positional argument: 'coro'",
                ));
            }
        },
    };
    let Some(factory) = factory else {
        if kwargs.contains(LOOP)? {
            return Err(unexpected(LOOP));
        }
        kwargs.set_item(LOOP, this.to_bound())?;
        return class_in(py, names(py).tasks_dict, names(py).Task)?.call((coro,), Some(&kwargs));
    };
    if py.version_info() >= (3, 14) || (py.version_info() >= (3, 13) && py.version_info().patch >= 3) {
        return factory.call((this.to_bound(), coro), Some(&kwargs));
    }
    // Earlier versions know only two keywords. They pass the context to the factory only if it is not None, and set the
    // task's name themselves.
    for keyword in kwargs.keys() {
        let keyword = keyword.cast_into::<PyString>()?;
        if !matches!(&*keyword.to_string_lossy(), "name" | "context") {
            return Err(unexpected(&keyword.to_string_lossy()));
        }
    }
    let name = kwargs.get_item("name")?.filter(|name| !name.is_none());
    let passed = PyDict::new(py);
    if let Some(context) = kwargs.get_item("context")?.filter(|context| !context.is_none()) {
        passed.set_item("context", context)?;
    }
    let task = factory.call((this.to_bound(), coro), Some(&passed))?;
    if let Some(name) = name
        && let Ok(set_name) = task.getattr("set_name")
    {
        set_name.call1((name,))?;
    }
    Ok(task)
}

fn set_task_factory<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let [factory] = args.bind()?;
    let py = this.py();
    match factory {
        None => {
            return Err(PyTypeError::new_err(
                "set_task_factory() missing 1 required positional argument: 'factory'",
            ));
        }
        Some(factory) if factory.is_none() => drop(this.task_factory.take(py)),
        Some(factory) if factory.is_callable() => this.task_factory.set(factory),
        Some(_) => return Err(PyTypeError::new_err("task factory must be a callable or None")),
    }
    Ok(none(py))
}

fn get_task_factory<'py>(this: This<'py, LoopObject>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    Ok(this
        .task_factory
        .get(this.py())
        .unwrap_or_else(|| none(this.py())))
}

pub(super) fn methods() -> Vec<ffi::PyMethodDef> {
    vec![
        row!(
            threadsafe_method,
            create_future,
            Loop.create_future,
            "A new asyncio.Future on this loop."
        ),
        row!(
            method,
            create_task,
            Loop.create_task,
            "Run a coroutine as an asyncio.Task on this loop."
        ),
        row!(
            method,
            set_task_factory,
            Loop.set_task_factory,
            "Let create_task() call factory(loop, coro, **kwargs); None restores the default."
        ),
        row!(
            method,
            get_task_factory,
            Loop.get_task_factory,
            "The task factory, or None."
        ),
    ]
}
