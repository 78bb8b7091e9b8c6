//! The arguments of a native call, as CPython passes them (`METH_FASTCALL|METH_KEYWORDS`), and the check whether they
//! fit the function's signature.

use std::marker::PhantomData;
use std::ptr;

use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyString, PyTuple};

use super::signature::Signature;

/// The arguments of one call, borrowed from the caller, which keeps them alive until the call returns (even while the
/// coro that makes the call waits).
#[derive(Clone, Copy)]
pub(crate) struct Args<'a, 'py> {
    py: Python<'py>,
    /// The positional values, followed by the values of the keywords. May be null if there are none.
    values: *const *mut ffi::PyObject,
    positional: usize,
    kwnames: *mut ffi::PyObject,
    signature: &'static Signature,
    call: PhantomData<&'a ffi::PyObject>,
}

impl<'a, 'py> Args<'a, 'py> {
    /// # Safety
    /// `values`, `nargs` and `kwnames` come from one `METH_FASTCALL|METH_KEYWORDS` call, and the result is used only
    /// until that call returns.
    #[inline]
    pub(crate) unsafe fn new(
        py: Python<'py>,
        values: *const *mut ffi::PyObject,
        nargs: ffi::Py_ssize_t,
        kwnames: *mut ffi::PyObject,
        signature: &'static Signature,
    ) -> Self {
        Self {
            py,
            values,
            positional: nargs as usize,
            kwnames,
            signature,
            call: PhantomData,
        }
    }

    #[inline]
    pub(crate) fn py(&self) -> Python<'py> {
        self.py
    }

    /// The first `len` values. The call has at least that many.
    #[inline]
    fn first(&self, len: usize) -> &'a [*mut ffi::PyObject] {
        if len == 0 {
            return &[];
        }
        // SAFETY: the array holds at least `len` values by the calling convention. It lives until the call returns,
        // which is at least as long as `'a` (contract of `new`).
        unsafe { std::slice::from_raw_parts(self.values, len) }
    }

    /// The positional arguments as borrowed pointers.
    #[inline]
    pub(crate) fn positional(&self) -> &'a [*mut ffi::PyObject] {
        self.first(self.positional)
    }

    /// The positional arguments as borrowed pointers; None if there are also keyword arguments.
    #[inline]
    pub(crate) fn only_positional(&self) -> Option<&'a [*mut ffi::PyObject]> {
        self.kwnames.is_null().then(|| self.positional())
    }

    /// All values as borrowed pointers: first the positional ones, then the keyword ones.
    pub(crate) fn values(&self) -> &'a [*mut ffi::PyObject] {
        let keywords = if self.kwnames.is_null() {
            0
        } else {
            // SAFETY: kwnames is a tuple by the calling convention.
            unsafe { ffi::PyTuple_GET_SIZE(self.kwnames) as usize }
        };
        self.first(self.positional + keywords)
    }

    /// The tuple of keyword names, null if there is none.
    pub(crate) fn kwnames(&self) -> *mut ffi::PyObject {
        self.kwnames
    }

    /// Positional argument `index` as a new reference.
    #[inline]
    pub(crate) fn get(&self, index: usize) -> Option<Bound<'py, PyAny>> {
        let object = *self.positional().get(index)?;
        // SAFETY: arguments are alive for the length of the call; from_borrowed adds a reference.
        Some(unsafe { Bound::from_borrowed_ptr(self.py, object) })
    }

    /// The positional arguments as new references. Raises TypeError unless there are exactly `N`.
    pub(crate) fn exactly<const N: usize>(&self) -> PyResult<[Bound<'py, PyAny>; N]> {
        let values: Vec<_> = (0..self.positional).filter_map(|index| self.get(index)).collect();
        values
            .try_into()
            .map_err(|_| self.wrong_count(&format!("exactly {N}"), None))
    }

    /// The name of the function that was called.
    pub(crate) fn name(&self) -> &'static str {
        self.signature.name()
    }

    /// Whether the call gives all required parameters by position, and the signature allows the call's other arguments.
    /// If all parameters are required (`is_fixed`), no other arguments are allowed. Otherwise, more positional
    /// arguments are allowed, and keyword arguments if the signature accepts them. The called function itself checks
    /// these other arguments (for example with `bind`).
    #[inline(always)]
    fn fits_signature(&self) -> bool {
        if self.signature.is_fixed() {
            self.positional == self.signature.required() && self.kwnames.is_null()
        } else {
            self.positional >= self.signature.required()
                && (self.signature.accepts_keywords() || self.kwnames.is_null())
        }
    }

    /// Calls `body` with `receiver` and with arguments that fit the signature.
    #[inline(always)]
    pub(crate) fn pass_to<C, R>(
        self,
        receiver: C,
        body: impl FnOnce(C, Args<'_, 'py>) -> PyResult<R>,
    ) -> PyResult<R> {
        if self.fits_signature() {
            body(receiver, self)
        } else {
            // Without `black_box`, the compiler makes a second copy of the body for this call, and then does not inline
            // the first one.
            let body = std::hint::black_box(body);
            self.rearrange(|args| body(receiver, args))
        }
    }

    /// Handles arguments that do not fit (see `fits_signature`): moves the required parameters that are given by name
    /// to their positions, and calls `body`. Raises TypeError if the arguments do not fit even then.
    #[cold]
    #[inline(never)]
    fn rearrange<R>(self, body: impl FnOnce(Args<'_, 'py>) -> PyResult<R>) -> PyResult<R> {
        let required = self.signature.required();
        let names = self.signature.parameters();
        let mut values = self.positional().to_vec();
        let mut others: Vec<_> = self.keywords().collect();
        while values.len() < required {
            let name = names[values.len()];
            let found = others
                .iter()
                .position(|(keyword, _)| !name.is_empty() && keyword.to_string() == name);
            match found {
                Some(index) => values.push(others.remove(index).1),
                None => break,
            }
        }
        let is_left_over = (self.signature.is_fixed() && values.len() > required)
            || (!self.signature.accepts_keywords() && !others.is_empty());
        if values.len() < required || is_left_over {
            for (keyword, _) in &others {
                let keyword = keyword.to_string();
                if names.iter().take(self.positional).any(|name| *name == keyword) {
                    return Err(self.multiple_values(&keyword));
                }
            }
            let kind = if self.signature.is_fixed() {
                "exactly"
            } else {
                "at least"
            };
            return Err(self.wrong_count(&format!("{kind} {required}"), others.first()));
        }
        let positional = values.len();
        values.extend(others.iter().map(|(_, value)| *value));
        let kwnames = if others.is_empty() {
            None
        } else {
            Some(PyTuple::new(self.py, others.iter().map(|(name, _)| name))?)
        };
        body(Args {
            py: self.py,
            values: values.as_ptr(),
            positional,
            kwnames: kwnames.as_ref().map_or(ptr::null_mut(), Bound::as_ptr),
            signature: self.signature,
            call: PhantomData,
        })
    }

    /// The TypeError for a call that should have `expected` positional arguments, or, if `keyword` is given, for that
    /// unexpected keyword argument.
    #[cold]
    pub(crate) fn wrong_count(
        &self,
        expected: &str,
        keyword: Option<&(Bound<'py, PyAny>, *mut ffi::PyObject)>,
    ) -> PyErr {
        let name = self.name();
        if let Some((keyword, _)) = keyword {
            return PyTypeError::new_err(format!(
                "{name}() got an unexpected keyword argument {}",
                keyword
                    .repr()
                    .map_or_else(|_| String::new(), |text| text.to_string())
            ));
        }
        let given = match self.positional {
            1 => "1 was given".to_owned(),
            count => format!("{count} were given"),
        };
        PyTypeError::new_err(match expected {
            "exactly 0" => format!("{name}() takes no arguments, but {given}"),
            "exactly 1" => format!("{name}() takes exactly one argument, but {given}"),
            expected => {
                let plural = if expected.ends_with(" 1") { "" } else { "s" };
                format!("{name}() takes {expected} positional argument{plural}, but {given}")
            }
        })
    }

    /// The keyword arguments as (name, borrowed value).
    pub(crate) fn keywords(&self) -> impl Iterator<Item = (Bound<'py, PyAny>, *mut ffi::PyObject)> + 'a
    where
        'py: 'a,
    {
        let (py, kwnames) = (self.py, self.kwnames);
        self.values()[self.positional..]
            .iter()
            .enumerate()
            .map(move |(index, value)| {
                // SAFETY: the tuple has one name for each keyword value, by the calling convention.
                let name = unsafe {
                    Bound::from_borrowed_ptr(py, ffi::PyTuple_GET_ITEM(kwnames, index as ffi::Py_ssize_t))
                };
                (name, *value)
            })
    }

    #[cold]
    fn multiple_values(&self, parameter: &str) -> PyErr {
        PyTypeError::new_err(format!(
            "{}() got multiple values for argument '{parameter}'",
            self.name()
        ))
    }

    /// The values of the signature's `N` parameters; None for each parameter that the call does not give. Raises
    /// TypeError for too many, unknown or duplicate arguments.
    pub(crate) fn bind<const N: usize>(&self) -> PyResult<[Option<Bound<'py, PyAny>>; N]> {
        let mut bound: [Option<Bound<'py, PyAny>>; N] = [const { None }; N];
        let by_position = self.signature.by_position();
        if self.positional > by_position {
            let expected = format!("at most {by_position}");
            return Err(self.wrong_count(&expected, self.keywords().next().as_ref()));
        }
        for (index, value) in bound.iter_mut().enumerate() {
            *value = self.get(index);
        }
        if self.kwnames.is_null() {
            return Ok(bound);
        }
        let names = self.signature.parameters();
        debug_assert_eq!(names.len(), N);
        for (name, value) in self.keywords() {
            let text = name.cast::<PyString>()?.to_string_lossy().into_owned();
            let Some(index) = names.iter().position(|known| !text.is_empty() && *known == text) else {
                return Err(PyTypeError::new_err(format!(
                    "{}() got an unexpected keyword argument '{text}'",
                    self.name()
                )));
            };
            if bound[index].is_some() {
                return Err(self.multiple_values(&text));
            }
            // SAFETY: keyword values are alive for the length of the call; from_borrowed adds a reference.
            bound[index] = Some(unsafe { Bound::from_borrowed_ptr(self.py, value) });
        }
        Ok(bound)
    }
}
