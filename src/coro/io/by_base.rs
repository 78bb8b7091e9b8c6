//! Calls of the base's own methods, which may be repeated after a wait.
//!
//! The arguments are taken in once, before the first attempt: an iterator becomes a tuple, an `__index__` is asked, and
//! a buffer stays exported until the call is over, so it cannot be resized meanwhile. What cannot be taken in goes to the
//! base as it is. The base then raises Python's own error in the first attempt, before any wait.

use std::ffi::c_int;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyInt, PyList, PyMemoryView, PyString, PyTuple};

use grapeshot_core::sys::readiness;

use super::call::{Attempt, RawArgs, is_would_block};
use super::socket::Socket;
use super::socket_type::{Method, base_method};
use crate::binding::new_objects;
use crate::coro::sync::Limit;
use crate::event_loop::reactor::Direction;

/// What a parameter of a base method takes.
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

/// The parameters of a method in their order. The names are those that can be given by keyword.
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

/// A call of a method of the base.
pub(super) struct BaseCall {
    method: Method,
    pub(super) args: RawArgs,
    /// The arguments by position, once they are taken in.
    taken: Option<Box<[Py<PyAny>]>>,
    has_begun: bool,
}

impl BaseCall {
    #[inline]
    pub(super) const fn new(method: Method, args: RawArgs) -> Self {
        Self {
            method,
            args,
            taken: None,
            has_begun: false,
        }
    }

    /// Calls the method, which never blocks.
    #[cold]
    #[inline(never)]
    pub(super) fn attempt<'py>(
        &mut self,
        socket: &Socket<'py>,
        direction: Direction,
    ) -> PyResult<Attempt<'py>> {
        let py = socket.py();
        let function = base_method(py, self.method)?;
        if !self.has_begun {
            self.taken = take_in(socket, self.method, &self.args)?;
            self.has_begun = true;
        }
        let mut values = vec![socket.object().as_ptr()];
        let mut kwnames = std::ptr::null_mut();
        let mut count = values.len();
        if let Some(taken) = &self.taken {
            values.extend(taken.iter().map(Py::as_ptr));
            count += taken.len();
        } else {
            values.extend_from_slice(self.args.all());
            count += self.args.positional().len();
            kwnames = self.args.kwnames;
        }
        // SAFETY: attached; the values are alive for the call, positional ones first, then those of `kwnames`.
        let called = unsafe {
            let result = ffi::PyObject_Vectorcall(function.as_ptr(), values.as_ptr(), count, kwnames);
            Bound::from_owned_ptr_or_err(py, result)
        };
        match called {
            Ok(value) => Ok(Attempt::Done(value)),
            Err(error) if is_would_block(py, &error) => Ok(Attempt::Blocked(direction)),
            Err(error) if direction == Direction::Read && self.finds_no_urgent_data(socket, &error) => {
                Ok(Attempt::Blocked(direction))
            }
            Err(error) => Err(error),
        }
    }

    /// Whether the call has asked for urgent data, of which there is none, and a socket of Python's would wait first:
    /// one with a timeout and with nothing to read.
    #[cold]
    fn finds_no_urgent_data(&self, socket: &Socket<'_>, error: &PyErr) -> bool {
        let py = socket.py();
        let errno = || error.value(py).getattr("errno").and_then(|errno| errno.extract());
        let flags = self.taken.as_ref().and_then(|taken| taken.last());
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

/// The arguments of a call by position, as they are for all attempts. None: they do not fit the parameters.
fn take_in(socket: &Socket<'_>, method: Method, args: &RawArgs) -> PyResult<Option<Box<[Py<PyAny>]>>> {
    let py = socket.py();
    let parameters = parameters(method);
    let Some(given) = arranged(py, method, parameters, args) else {
        return Ok(None);
    };
    let last = given.iter().rposition(Option::is_some).unwrap_or(0);
    let flags_at = parameters.iter().position(|(_, parameter)| *parameter == Flags);
    let count = (last + 1).max(flags_at.map_or(0, |index| index + 1));
    let mut taken = Vec::with_capacity(count);
    for (value, (_, parameter)) in given.into_iter().zip(parameters).take(count) {
        taken.push(match value {
            Some(value) => taken_value(socket, *parameter, value)?.unbind(),
            None => default(py, *parameter)?.unbind(),
        });
    }
    Ok(Some(taken.into_boxed_slice()))
}

/// The given arguments in the places of their parameters.
fn arranged<'py>(
    py: Python<'py>,
    method: Method,
    parameters: &[(&str, Parameter)],
    args: &RawArgs,
) -> Option<Vec<Option<Bound<'py, PyAny>>>> {
    let positional = args.positional();
    if positional.len() > parameters.len() || args.all().is_empty() {
        return None;
    }
    let mut given: Vec<Option<Bound<'py, PyAny>>> = vec![None; parameters.len()];
    for (place, value) in given.iter_mut().zip(positional) {
        // SAFETY: an argument of the call, which its caller keeps.
        *place = Some(unsafe { Bound::from_borrowed_ptr(py, *value) });
    }
    for (index, value) in args.all().iter().enumerate().skip(positional.len()) {
        // SAFETY: there are values behind the positional ones, so there is a tuple with a name for each of them.
        let (name, value) = unsafe {
            let name = ffi::PyTuple_GET_ITEM(args.kwnames, (index - positional.len()) as ffi::Py_ssize_t);
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
            // The flags are left out, not the address.
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
        Buffer | Buffers | Address => crate::binding::native_type::none(py),
    })
}

/// An argument as it is for all attempts. Fails with what an iterator or a resolver has raised.
fn taken_value<'py>(
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

/// The items of an iterable; None for another object, of which the base says that it is none.
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

/// A view of a bytes-like object, which keeps it from being resized. Anything else stays what it is.
fn exported(object: Bound<'_, PyAny>) -> Bound<'_, PyAny> {
    if object.is_exact_instance_of::<PyBytes>() {
        return object;
    }
    PyMemoryView::from(&object).map_or(object, Bound::into_any)
}

/// `(level, type, data)` with a copy of the data, as the base makes one. Anything else stays what it is.
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

/// The int that an object with `__index__` stands for. Anything else stays what it is.
fn number(object: Bound<'_, PyAny>) -> Bound<'_, PyAny> {
    if object.is_exact_instance_of::<PyInt>() {
        return object;
    }
    // SAFETY: attached; a live object.
    let index = unsafe { Bound::from_owned_ptr_or_err(object.py(), ffi::PyNumber_Index(object.as_ptr())) };
    index.unwrap_or(object)
}
