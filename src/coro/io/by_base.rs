//! The methods of the base classes (`_socket.socket` and `socket.socket`), and calls that repeat one of these methods
//! after a wait.
//!
//! The arguments are converted once, before the first attempt: an iterable becomes a tuple, an object with `__index__`
//! becomes an int, and a buffer stays exported until the call is over, so it cannot be resized during a wait. An
//! argument that cannot be converted is passed to the base unchanged. The base then raises Python's own error in the
//! first attempt, before any wait.

use std::ffi::c_int;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use grapeshot_core::sys::readiness;
use pyo3::exceptions::PyRuntimeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyInt, PyList, PyMemoryView, PyString, PyTuple, PyType};

use super::call::{Operation, Surroundings, is_would_block};
use super::socket::Socket;
use crate::binding::args::Args;
use crate::binding::new_objects;
use crate::coro::sync::Limit;
use crate::event_loop::progress::{Attempt, WaitReason};
use crate::event_loop::reactor::Direction;

/// The methods of `_socket.socket` and `socket.socket` that native code calls.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Method {
    Recv,
    RecvInto,
    RecvFrom,
    RecvFromInto,
    RecvMsg,
    RecvMsgInto,
    Send,
    SendAll,
    SendTo,
    SendMsg,
    SetTimeout,
    Bind,
    Detach,
    RealClose,
    Init,
}

impl Method {
    fn direction(self) -> Direction {
        match self {
            Self::Send | Self::SendAll | Self::SendTo | Self::SendMsg => Direction::Write,
            _ => Direction::Read,
        }
    }
}

const COUNT: usize = 15;
const NAMES: [&str; COUNT] = [
    "recv",
    "recv_into",
    "recvfrom",
    "recvfrom_into",
    "recvmsg",
    "recvmsg_into",
    "send",
    "sendall",
    "sendto",
    "sendmsg",
    "settimeout",
    "bind",
    "detach",
    "_real_close",
    "__init__",
];
/// The base methods, in the order of `NAMES`. They are never freed.
static METHODS: [AtomicPtr<ffi::PyObject>; COUNT] = [const { AtomicPtr::new(ptr::null_mut()) }; COUNT];

/// A base method, as it was when the native type was made.
pub(super) fn base_method(py: Python<'_>, method: Method) -> PyResult<Bound<'_, PyAny>> {
    let method = METHODS[method as usize].load(Ordering::Acquire);
    // SAFETY: null, or a method that is never freed.
    unsafe { Bound::from_borrowed_ptr_or_opt(py, method) }
        .ok_or_else(|| PyRuntimeError::new_err("the native socket type has not been created yet"))
}

/// Stores the methods of `socket.socket` (`base`) and `_socket.socket` (`raw`). Called once, when the native type is
/// made.
pub(super) fn learn_methods(base: &Bound<'_, PyType>, raw: &Bound<'_, PyType>) -> PyResult<()> {
    for ((place, name), index) in METHODS.iter().zip(NAMES).zip(0..) {
        let owner = if index >= Method::Detach as usize {
            base
        } else {
            raw
        };
        place.store(owner.getattr(name)?.into_ptr(), Ordering::Release);
    }
    Ok(())
}

/// The kind of value that a parameter of a base method takes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Parameter {
    /// A bytes-like object.
    Buffer,
    /// An iterable of bytes-like objects.
    Buffers,
    /// An iterable of `(level, type, data)`.
    Ancillary,
    Number,
    /// The flags of the system call, to which `MSG_DONTWAIT` is added.
    Flags,
    Address,
}

use Parameter::{Address, Ancillary, Buffer, Buffers, Flags, Number};

/// The parameters of a method, in order. A parameter with a name can also be given by keyword.
fn parameters(method: Method) -> &'static [(&'static str, Parameter)] {
    match method {
        Method::Recv | Method::RecvFrom => &[("", Number), ("", Flags)],
        Method::RecvInto | Method::RecvFromInto => {
            &[("buffer", Buffer), ("nbytes", Number), ("flags", Flags)]
        }
        Method::RecvMsg => &[("", Number), ("", Number), ("", Flags)],
        Method::RecvMsgInto => &[("", Buffers), ("", Number), ("", Flags)],
        Method::Send | Method::SendAll => &[("", Buffer), ("", Flags)],
        Method::SendTo => &[("", Buffer), ("", Flags), ("", Address)],
        Method::SendMsg => &[("", Buffers), ("", Ancillary), ("", Flags), ("", Address)],
        Method::SetTimeout | Method::Bind | Method::Detach | Method::RealClose | Method::Init => &[],
    }
}

/// A call of a base method, which is repeated until it does not block.
pub(super) struct BaseCall {
    method: Method,
    pub(super) args: Args<'static, 'static>,
    /// The converted arguments, by position. None before the first attempt. If the arguments do not fit the parameters,
    /// this stays None.
    converted: Option<Box<[Py<PyAny>]>>,
    has_begun: bool,
}

impl BaseCall {
    #[inline]
    pub(super) const fn new(method: Method, args: Args<'static, 'static>) -> Self {
        Self {
            method,
            args,
            converted: None,
            has_begun: false,
        }
    }

    /// Whether the call asked for urgent data, found none, and has to wait. Python's own socket waits in this case if
    /// it has a timeout and there is nothing to read.
    #[cold]
    fn finds_no_urgent_data(&self, socket: &Socket<'_>, error: &PyErr) -> bool {
        let py = socket.py();
        let errno = || error.value(py).getattr("errno").and_then(|errno| errno.extract());
        let flags = self.converted.as_ref().and_then(|converted| converted.last());
        let asks = flags
            .and_then(|flags| flags.extract::<i32>(py).ok())
            .is_some_and(|flags| flags & libc::MSG_OOB != 0);
        asks && matches!(socket.extra().limit(), Limit::For { .. })
            && errno().ok() == Some(libc::EINVAL)
            && socket
                .descriptor()
                .is_ok_and(|fd| matches!(readiness::wait_ready(fd, false, Some(0)), Ok(false)))
    }
}

impl Operation for BaseCall {
    /// Calls the method. It never blocks, because the base's timeout is 0 and the flags contain `MSG_DONTWAIT`.
    #[cold]
    #[inline(never)]
    fn attempt<'py>(&mut self, socket: &Socket<'py>, _: &Surroundings<'_>) -> PyResult<Attempt<'py>> {
        let py = socket.py();
        let direction = self.method.direction();
        if direction == Direction::Read {
            // The method's result does not show whether data is left in the socket.
            socket.extra().is_drained.set(false);
        }
        let function = base_method(py, self.method)?;
        if !self.has_begun {
            self.converted = convert_arguments(socket, self.method, &self.args)?;
            self.has_begun = true;
        }
        if direction == Direction::Read
            && socket.extra().has_unread.get()
            && let Some(converted) = &self.converted
            && let Some(value) = receive_unread(socket, self.method, converted)?
        {
            return Ok(Attempt::Done(value));
        }
        let mut values = vec![socket.object().as_ptr()];
        let mut kwnames = ptr::null_mut();
        let mut count = values.len();
        if let Some(converted) = &self.converted {
            values.extend(converted.iter().map(Py::as_ptr));
            count += converted.len();
        } else {
            values.extend_from_slice(self.args.values());
            count += self.args.positional().len();
            kwnames = self.args.kwnames();
        }
        // SAFETY: attached; the values are alive during the call: the positional ones, then the values for `kwnames`.
        let called = unsafe {
            let result = ffi::PyObject_Vectorcall(function.as_ptr(), values.as_ptr(), count, kwnames);
            Bound::from_owned_ptr_or_err(py, result)
        };
        match called {
            Ok(value) => Ok(Attempt::Done(value)),
            Err(error)
                if is_would_block(py, &error)
                    || (direction == Direction::Read && self.finds_no_urgent_data(socket, &error)) =>
            {
                Ok(Attempt::MustWait(WaitReason::WouldBlock(direction)))
            }
            Err(error) => Err(error),
        }
    }
}

/// The result of the call, taken from data that was put back (`_put_back`). None if no such data is left, or if the
/// call asks for other data.
#[cold]
fn receive_unread<'py>(
    socket: &Socket<'py>,
    method: Method,
    converted: &[Py<PyAny>],
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let py = socket.py();
    let arguments = PyTuple::new(py, converted.iter().map(|value| value.bind(py)))?;
    let name = NAMES[method as usize];
    let value = socket
        .object()
        .call_method1("_receive_unread", (name, arguments))?;
    Ok((!value.is_none()).then_some(value))
}

/// Converts the arguments of a call, once for all of its attempts. None if they do not fit the parameters.
fn convert_arguments(
    socket: &Socket<'_>,
    method: Method,
    args: &Args<'_, '_>,
) -> PyResult<Option<Box<[Py<PyAny>]>>> {
    let py = socket.py();
    let parameters = parameters(method);
    let Some(given) = arrange(py, method, parameters, args) else {
        return Ok(None);
    };
    let last = given.iter().rposition(Option::is_some).unwrap_or(0);
    let flags_at = parameters.iter().position(|(_, parameter)| *parameter == Flags);
    let count = (last + 1).max(flags_at.map_or(0, |index| index + 1));
    let mut converted = Vec::with_capacity(count);
    for (value, (_, parameter)) in given.into_iter().zip(parameters).take(count) {
        converted.push(match value {
            Some(value) => convert_value(socket, *parameter, value)?.unbind(),
            None => default(py, *parameter)?.unbind(),
        });
    }
    Ok(Some(converted.into_boxed_slice()))
}

/// Puts the given arguments in the places of their parameters. None if they do not fit.
fn arrange<'py>(
    py: Python<'py>,
    method: Method,
    parameters: &[(&str, Parameter)],
    args: &Args<'_, '_>,
) -> Option<Vec<Option<Bound<'py, PyAny>>>> {
    let positional = args.positional();
    if positional.len() > parameters.len() || args.values().is_empty() {
        return None;
    }
    let mut given: Vec<Option<Bound<'py, PyAny>>> = vec![None; parameters.len()];
    for (place, value) in given.iter_mut().zip(positional) {
        // SAFETY: an argument of the call, which its caller keeps alive.
        *place = Some(unsafe { Bound::from_borrowed_ptr(py, *value) });
    }
    for (index, value) in args.values().iter().enumerate().skip(positional.len()) {
        // SAFETY: there are values after the positional ones, so there is a tuple with a name for each of them.
        let (name, value) = unsafe {
            let name = ffi::PyTuple_GET_ITEM(args.kwnames(), (index - positional.len()) as ffi::Py_ssize_t);
            (
                Bound::from_borrowed_ptr(py, name),
                Bound::from_borrowed_ptr(py, *value),
            )
        };
        let name = name.cast_into::<PyString>().ok()?.to_string_lossy().into_owned();
        let place = parameters
            .iter()
            .position(|(known, _)| !name.is_empty() && *known == name)?;
        if given[place].replace(value).is_some() {
            return None;
        }
    }
    if method == Method::SendTo {
        match positional.len() {
            // With two arguments, the second one is the address, because the flags are left out.
            2 => given.swap(1, 2),
            3 => {}
            _ => return None,
        }
    }
    given[0].is_some().then_some(given)
}

fn default(py: Python<'_>, parameter: Parameter) -> PyResult<Bound<'_, PyAny>> {
    Ok(match parameter {
        Ancillary => PyTuple::empty(py).into_any(),
        Flags => new_objects::int(py, libc::MSG_DONTWAIT.into())?,
        Number => 0_i32.into_pyobject(py)?.into_any(),
        Buffer | Buffers | Address => crate::binding::object_result::none(py),
    })
}

/// Converts an argument for all attempts. Fails if iterating over the argument, or looking up a host name in it, fails.
fn convert_value<'py>(
    socket: &Socket<'py>,
    parameter: Parameter,
    value: Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = value.py();
    match parameter {
        Buffer => Ok(exported(value)),
        Buffers => match items(&value)? {
            Some(items) => tuple(py, items.into_iter().map(exported)),
            None => Ok(value),
        },
        Ancillary => match items(&value)? {
            Some(items) => {
                let items = items
                    .into_iter()
                    .map(copied_message)
                    .collect::<PyResult<Vec<_>>>()?;
                tuple(py, items.into_iter())
            }
            None => Ok(value),
        },
        Number => Ok(number(value)),
        Flags => {
            let flags = number(value);
            match flags.extract::<c_int>() {
                Ok(known) => new_objects::int(py, (known | libc::MSG_DONTWAIT).into()),
                Err(_) => Ok(flags),
            }
        }
        Address if value.is_none() => Ok(value),
        Address => super::accepting::resolved(socket, value),
    }
}

/// The items of an iterable. None for any other object; the base then raises an error for the object.
fn items<'py>(iterable: &Bound<'py, PyAny>) -> PyResult<Option<Vec<Bound<'py, PyAny>>>> {
    if let Ok(list) = iterable.cast::<PyList>() {
        return Ok(Some(list.iter().collect()));
    }
    if let Ok(tuple) = iterable.cast::<PyTuple>() {
        return Ok(Some(tuple.iter().collect()));
    }
    match iterable.try_iter() {
        Ok(iterator) => iterator.collect::<PyResult<Vec<_>>>().map(Some),
        Err(_) => Ok(None),
    }
}

fn tuple<'py>(
    py: Python<'py>,
    items: impl ExactSizeIterator<Item = Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    Ok(new_objects::tuple(py, items)?.into_any())
}

/// A view of a bytes-like object. While the view exists, the object cannot be resized. A `bytes` object needs no view,
/// because it never changes. It is returned as it is, and so is an object that is not bytes-like.
fn exported(object: Bound<'_, PyAny>) -> Bound<'_, PyAny> {
    if object.is_exact_instance_of::<PyBytes>() {
        return object;
    }
    PyMemoryView::from(&object).map_or(object, Bound::into_any)
}

/// `(level, type, data)` with a copy of the data, like the copy that the base makes. Any other object is returned
/// unchanged.
fn copied_message(message: Bound<'_, PyAny>) -> PyResult<Bound<'_, PyAny>> {
    let parts = match (message.cast::<PyTuple>(), message.cast::<PyList>()) {
        (Ok(tuple), _) => tuple.iter().collect::<Vec<_>>(),
        (_, Ok(list)) => list.iter().collect::<Vec<_>>(),
        _ => return Ok(message),
    };
    let Ok([level, kind, data]) = <[Bound<'_, PyAny>; 3]>::try_from(parts) else {
        return Ok(message);
    };
    let Ok(view) = PyMemoryView::from(&data) else {
        return Ok(message);
    };
    let copy = new_objects::attribute(&view, "tobytes")?.call0()?;
    tuple(message.py(), [number(level), number(kind), copy].into_iter())
}

/// The int value of an object with `__index__`. Any other object is returned unchanged.
fn number(object: Bound<'_, PyAny>) -> Bound<'_, PyAny> {
    if object.is_exact_instance_of::<PyInt>() {
        return object;
    }
    // SAFETY: attached; a live object.
    let index = unsafe { Bound::from_owned_ptr_or_err(object.py(), ffi::PyNumber_Index(object.as_ptr())) };
    index.unwrap_or(object)
}
