//! `grapeshot._core._AioQueue`: the calls that one loop makes on files. io_uring or threads carry them out
//! (`core/src/sys/aio`).
//!
//! Source: CPython `Modules/posixmodule.c`.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_int, c_void};
use std::os::fd::RawFd;
use std::ptr;
use std::time::Duration;

use grapeshot_core::sys::aio::{self, Call, Ended, Queue};
use pyo3::exceptions::PyValueError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::binding::args::Args;
use crate::binding::arrived::Arrived;
use crate::binding::errors;
use crate::binding::exports::View;
use crate::binding::is_switched_on;
use crate::binding::native_type::{
    NativeType, This, alloc_without_arguments, new_type, slot, with_critical_section,
};
use crate::binding::new_bytes::NewBytes;
use crate::binding::object_result::{ObjectResult, bool_object, none};
use crate::binding::rows::{methods_slot, row};

#[repr(C)]
struct QueueObject {
    base: ffi::PyObject,
    /// Borrowed only while no Python code runs. Dropping memory may run Python code, so memory that leaves the queue is
    /// dropped after the borrow has ended.
    queue: RefCell<Queue<Memory>>,
    arrived: Arrived,
}

/// The owner of the memory that a call uses.
#[expect(
    dead_code,
    reason = "two of the variants are never read; they only keep the memory alive"
)]
enum Memory {
    Nothing,
    Path(CString),
    /// The unfinished `bytes` object of a read. No other code has a reference to it.
    Buffer(Py<PyAny>),
    /// The data of a write.
    Data(Box<View>),
}

impl NativeType for QueueObject {
    const NAME: &'static CStr = c"grapeshot._core._AioQueue";
    const DOC: &'static CStr = c"_AioQueue()\n--\n\nMakes calls on files while the loop goes on.";
    const FLAGS: u64 = 0;
    const IS_COLLECTED: bool = false;

    fn with_access<R>(this: This<'_, Self>, body: impl FnOnce() -> PyResult<R>) -> PyResult<R> {
        with_critical_section(this, body)
    }
}

type Aio<'py> = This<'py, QueueObject>;

/// A path as `os.fsencode` returns it.
fn path_of(path: &Bound<'_, PyAny>) -> PyResult<CString> {
    CString::new(path.cast::<PyBytes>()?.as_bytes()).map_err(|_| PyValueError::new_err("embedded null byte"))
}

/// Starts a call and returns its ticket.
fn start(this: Aio<'_>, call: Call, memory: Memory) -> ObjectResult<'_> {
    // SAFETY: each caller passes the owner of the memory to which the call's pointers refer. Moving the owner does not
    // move the memory, which is a C string, a `bytes` object or an exported buffer on the heap.
    let started = unsafe { this.queue.borrow_mut().start(call, memory) };
    match started {
        Ok(ticket) => Ok(ticket.into_pyobject(this.py())?.into_any()),
        Err((error, memory)) => {
            drop(memory);
            Err(errors::os_error(&error))
        }
    }
}

fn open<'py>(this: Aio<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let [path, flags, mode] = args.exactly()?;
    let path = path_of(&path)?;
    let call = Call::Open {
        path: path.as_ptr(),
        flags: flags.extract()?,
        mode: mode.extract()?,
    };
    start(this, call, Memory::Path(path))
}

fn close<'py>(this: Aio<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let [fd] = args.exactly()?;
    start(this, Call::Close { fd: fd.extract()? }, Memory::Nothing)
}

/// How much memory a read of `size` bytes needs: at most `MAX_LEN`, because no system call reads more than that.
fn len_of(size: usize) -> usize {
    size.min(aio::MAX_LEN)
}

fn read<'py>(this: Aio<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let [fd, size, offset] = args.exactly()?;
    let len = len_of(size.extract()?);
    let mut bytes = NewBytes::with_capacity(this.py(), len)?;
    let call = Call::Read {
        fd: fd.extract()?,
        buffer: bytes.as_mut_ptr(),
        len,
        offset: offset.extract()?,
    };
    start(this, call, Memory::Buffer(bytes.into_object().unbind()))
}

fn write<'py>(this: Aio<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let [fd, data, offset] = args.exactly()?;
    let data = View::boxed(&data, ffi::PyBUF_SIMPLE)?;
    let call = Call::Write {
        fd: fd.extract()?,
        data: data.as_mut_ptr().cast_const(),
        len: data.len(),
        offset: offset.extract()?,
    };
    start(this, call, Memory::Data(data))
}

fn sync<'py>(this: Aio<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let [fd, only_data] = args.exactly()?;
    let call = Call::Sync {
        fd: fd.extract()?,
        only_data: only_data.extract()?,
    };
    start(this, call, Memory::Nothing)
}

fn truncate<'py>(this: Aio<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let [fd, len] = args.exactly()?;
    let call = Call::Truncate {
        fd: fd.extract()?,
        len: len.extract()?,
    };
    start(this, call, Memory::Nothing)
}

fn cancel<'py>(this: Aio<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let [ticket] = args.exactly()?;
    let ticket = ticket.extract()?;
    let memory = this.queue.borrow_mut().cancel(ticket);
    Ok(bool_object(this.py(), memory.is_some()))
}

fn take<'py>(this: Aio<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let (py, [list]) = (this.py(), args.exactly()?);
    let list = list.cast::<PyList>()?;
    let ended = this.queue.borrow_mut().take();
    let new = ended.into_iter().map(|ended| (ended.ticket, ended)).collect();
    this.arrived.append(list, new, |ended| result(py, ended))?;
    Ok(none(py))
}

/// The result of a call that has ended, as a Python object. Err is the exception to raise.
fn result(py: Python<'_>, ended: Ended<Memory>) -> ObjectResult<'_> {
    match (ended.outcome, ended.memory) {
        (Ok(len), Memory::Buffer(bytes)) => {
            // SAFETY: the object comes from `NewBytes::into_object`, and nothing else has a reference to it.
            unsafe { NewBytes::from_object(bytes.into_bound(py)) }.finish(len)
        }
        (Ok(number), _) => Ok(number.into_pyobject(py)?.into_any()),
        (Err(error), _) => Err(errors::os_error(&error)),
    }
}

fn wake<'py>(this: Aio<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    this.queue.borrow().wake();
    Ok(none(this.py()))
}

fn fileno<'py>(this: Aio<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    Ok(this.queue.borrow().fd().into_pyobject(this.py())?.into_any())
}

fn has_ring<'py>(this: Aio<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    Ok(bool_object(this.py(), this.queue.borrow().has_ring()))
}

fn stop<'py>(this: Aio<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let [limit] = args.exactly()?;
    let limit = Duration::try_from_secs_f64(limit.extract()?).unwrap_or(Duration::MAX);
    // This holds the GIL while it waits, which is safe: the threads that make the calls do not need the GIL.
    let memory = this.queue.borrow_mut().stop(limit);
    drop(memory);
    // In a child of the process that made the queue, there is nothing to wait for.
    let left: Vec<u64> = match this.queue.borrow() {
        queue if queue.is_foreign() => Vec::new(),
        queue => queue.tickets().collect(),
    };
    Ok(PyList::new(this.py(), left)?.into_any())
}

/// # Safety
/// Called by CPython with the type or a subclass of it, a tuple, and a dict or null.
unsafe extern "C" fn new(
    kind: *mut ffi::PyTypeObject,
    args: *mut ffi::PyObject,
    kwargs: *mut ffi::PyObject,
) -> *mut ffi::PyObject {
    // SAFETY: attached, and the arguments are as described above. The allocation is large enough for the layout, and
    // its fields are written before anything else can see the object.
    unsafe {
        let py = Python::assume_attached();
        errors::at_boundary(py, ptr::null_mut(), || {
            let queue = Queue::new(is_switched_on("GRAPESHOT_FILE_THREADS"))
                .map_err(|error| errors::os_error(&error))?;
            let object = alloc_without_arguments(py, kind, args, kwargs)?;
            let made = object.as_ptr().cast::<QueueObject>();
            (&raw mut (*made).queue).write(RefCell::new(queue));
            (&raw mut (*made).arrived).write(Arrived::default());
            Ok(object.into_ptr())
        })
    }
}

/// `_aio_read_now(fd, size, offset)`: reads if the kernel has the data in memory. Returns None if the call would wait
/// for a disk, or if the system cannot tell.
#[pyfunction(name = "_aio_read_now")]
fn read_now(py: Python<'_>, fd: RawFd, size: usize, offset: i64) -> ObjectResult<'_> {
    let len = len_of(size);
    let mut bytes = NewBytes::with_capacity(py, len)?;
    // SAFETY: the object is unshared and has at least `len` bytes.
    match unsafe { aio::read_now(fd, bytes.as_mut_ptr(), len, offset) } {
        Ok(Some(len)) => bytes.finish(len),
        Ok(None) => Ok(none(py)),
        Err(error) => Err(errors::os_error(&error)),
    }
}

/// `_aio_open_now(path, flags)`: opens an existing file if the kernel has all parts of its path in memory. Returns None
/// if the call might wait.
#[pyfunction(name = "_aio_open_now")]
fn open_now<'py>(path: &Bound<'py, PyAny>, flags: c_int) -> ObjectResult<'py> {
    let py = path.py();
    match aio::open_now(&path_of(path)?, flags) {
        Ok(Some(fd)) => Ok(fd.into_pyobject(py)?.into_any()),
        Ok(None) => Ok(none(py)),
        Err(error) => Err(errors::os_error(&error)),
    }
}

/// `_aio_before_fork()`: ends the idle threads, because CPython warns if a process with several threads forks.
#[pyfunction(name = "_aio_before_fork")]
fn before_fork() {
    aio::before_fork();
}

/// `_aio_after_fork()`, in the child: the parent's threads do not exist here, so the child makes its own.
#[pyfunction(name = "_aio_after_fork")]
fn after_fork() {
    aio::after_fork();
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let methods = vec![
        row!(method, open, _AioQueue.open, "Open a file; return a ticket."),
        row!(method, close, _AioQueue.close, "Close a file; return a ticket."),
        row!(method, read, _AioQueue.read, "Read from a file; return a ticket."),
        row!(
            method,
            write,
            _AioQueue.write,
            "Write to a file; return a ticket."
        ),
        row!(
            method,
            sync,
            _AioQueue.sync,
            "Write a file to its disk; return a ticket."
        ),
        row!(
            method,
            truncate,
            _AioQueue.truncate,
            "Change the length of a file; return a ticket."
        ),
        row!(
            method,
            cancel,
            _AioQueue.cancel,
            "Cancel a call, unless it closes a file. Return True if the call had not begun: then it is never made."
        ),
        row!(
            method,
            take,
            _AioQueue.take,
            "Append (ticket, result) to a list for each call that has ended."
        ),
        row!(method, wake, _AioQueue.wake, "Make the descriptor readable."),
        row!(
            method,
            fileno,
            _AioQueue.fileno,
            "The descriptor that is readable when a call may have ended."
        ),
        row!(
            method,
            has_ring,
            _AioQueue.has_ring,
            "Whether io_uring makes the calls."
        ),
        row!(
            method,
            stop,
            _AioQueue.stop,
            "Cancel all calls but closes. Wait up to limit seconds for the calls left; return the tickets of the rest."
        ),
    ];
    let slots = [slot(ffi::Py_tp_new, new as *mut c_void), methods_slot(methods)];
    // SAFETY: the functions are for this layout, and the table lives forever.
    let kind = unsafe { new_type::<QueueObject>(module, None, &slots)? };
    module.add("_AioQueue", kind)?;
    module.add_function(wrap_pyfunction!(read_now, module)?)?;
    module.add_function(wrap_pyfunction!(open_now, module)?)?;
    module.add_function(wrap_pyfunction!(before_fork, module)?)?;
    module.add_function(wrap_pyfunction!(after_fork, module)?)
}
