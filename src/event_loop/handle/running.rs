//! Runs a handle's callback and reports its exception.

use std::ptr;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::methods::describe_call;
use super::{Handle, INLINE_ARGS, flag, slots};
use crate::binding::native_type::with_critical_section;
use crate::binding::{HAS_GIL, errors};
use crate::event_loop::contexts::Contexts;
use crate::event_loop::pyloop::LoopObject;

impl<'py> Handle<'py> {
    /// Runs the callback in its context and reports its exception. Err is only for exceptions that leave
    /// `run_forever` (`KeyboardInterrupt`, `SystemExit`).
    #[inline]
    pub(crate) fn run(self) -> PyResult<()> {
        if self.has(flag::CANCELLED) {
            return Ok(());
        }
        if !HAS_GIL || self.has(flag::REPEATS) || self.more_args.is_set() {
            return self.run_kept();
        }
        let is_begun = self.begin_run();
        let result = self.run_moved();
        if is_begun {
            self.end_run();
        }
        result
    }

    /// `run` for a handle that runs once and has its arguments inline, in builds with the GIL. The references to
    /// callback, arguments and context move out of the handle, so the call needs no additional references.
    #[inline(always)]
    fn run_moved(self) -> PyResult<()> {
        let (this, py) = (self, self.py());
        // The references are moved out of the handle first, because the callback may cancel its own handle.
        let args_len = this.args_len.get() as usize;
        let mut call = [ptr::null_mut(); INLINE_ARGS + 2];
        for (place, cell) in call[2..].iter_mut().zip(&this.args[..args_len]) {
            *place = cell.take_ptr();
        }
        this.args_len.set(0);
        let is_shared = this.has(flag::SHARES_CONTEXT);
        let callback = this.callback.take_ptr();
        let mut context = this.context.take_ptr();
        let event_loop = this.event_loop.take_ptr();
        if callback.is_null() || context.is_null() || event_loop.is_null() {
            drop_rest(py, &[callback, context, event_loop], &call[2..2 + args_len]);
            return Ok(());
        }
        let mut template = ptr::null_mut();
        if is_shared {
            this.lower_flag(flag::SHARES_CONTEXT);
            template = context;
            // SAFETY: `event_loop` and `template` are references that were moved out of the cells, and the template
            // belongs to this loop.
            context = unsafe { contexts_of(event_loop).begin_run(template) };
            if context.is_null() {
                let failed = self.fail_to_copy(event_loop);
                drop_rest(py, &[callback, template, event_loop], &call[2..2 + args_len]);
                return failed;
            }
        }
        // SAFETY: the references were moved out of the cells, so they live until they are dropped below. call[1] is the
        // free place in front of the arguments that PY_VECTORCALL_ARGUMENTS_OFFSET promises.
        unsafe {
            if ffi::PyContext_Enter(context) == 0 {
                let result = ffi::PyObject_Vectorcall(
                    callback,
                    call[2..].as_ptr(),
                    args_len | ffi::PY_VECTORCALL_ARGUMENTS_OFFSET,
                    ptr::null_mut(),
                );
                if result.is_null() {
                    let error = PyErr::fetch(py);
                    ffi::PyContext_Exit(context);
                    error.restore(py);
                } else {
                    ffi::Py_DECREF(result);
                    if ffi::PyContext_Exit(context) == 0 {
                        for arg in &call[2..2 + args_len] {
                            ffi::Py_DECREF(*arg);
                        }
                        ffi::Py_DECREF(callback);
                        if is_shared {
                            contexts_of(event_loop).end_run(template, context);
                            context = template;
                        }
                        ffi::Py_DECREF(context);
                        ffi::Py_DECREF(event_loop);
                        return Ok(());
                    }
                }
            }
            ffi::Py_XDECREF(template);
            // The callback has failed, or its context could not be entered or left. The references go back into the
            // handle, so that the report can show the callback and its arguments.
            let error = PyErr::fetch(py);
            let args: Vec<_> = call[2..2 + args_len]
                .iter()
                .map(|arg| Bound::from_owned_ptr(py, *arg))
                .collect();
            let callback = Bound::from_owned_ptr(py, callback);
            let context = Bound::from_owned_ptr(py, context);
            let event_loop = Bound::from_owned_ptr(py, event_loop);
            if !this.has(flag::CANCELLED) {
                // The handle keeps the references until the report is done: exception handlers read the handle and run
                // in its context.
                this.callback.set(callback.clone());
                this.context.set(context.clone());
                this.event_loop.set(event_loop.clone());
                this.args_len.set(args_len as u8);
                for (cell, arg) in this.args.iter().zip(&args) {
                    cell.set(arg.clone());
                }
            }
            let result = PyTuple::new(py, &args)
                .and_then(|args| self.report(&event_loop, &context, &callback, &args, error));
            this.drop_call();
            result
        }
    }

    /// `handle._run()`, for code that runs the handle itself. The loop still runs the handle later, as in asyncio. If
    /// the loop has already run the handle and emptied it, nothing happens.
    pub(super) fn run_by_hand(self) -> PyResult<()> {
        if self.is_cancelled() {
            return Ok(());
        }
        self.run_and_keep()
    }

    /// The callback that the handle is going to call. None for an empty handle.
    pub(crate) fn callback(self) -> Option<Bound<'py, PyAny>> {
        with_critical_section(self, || self.callback.get(self.py()))
    }

    /// Makes a handle that runs once drop its callback, arguments, context and loop, if it still has them. Does nothing
    /// for a handle that runs repeatedly.
    pub(crate) fn forget_call(self) {
        if !self.has(flag::REPEATS) {
            with_critical_section(self, || self.drop_call());
        }
    }

    /// `forget_call`, unless other code keeps the handle. Called in debug mode, in which a handle that other code keeps
    /// still shows its callback after the run. Because the handle keeps its references, the collector must track it.
    pub(crate) fn forget_call_unless_kept(self) {
        if self.is_kept() {
            self.track();
        } else {
            self.forget_call();
        }
    }

    /// `run` for handles that run repeatedly or have their arguments in a tuple, and in free-threaded builds for all
    /// handles.
    fn run_kept(self) -> PyResult<()> {
        let result = self.run_and_keep();
        self.forget_call();
        result
    }

    /// Runs the callback like `run`, but leaves it in the handle, where it can still be read.
    pub(crate) fn run_and_keep(self) -> PyResult<()> {
        let (this, py) = (self, self.py());
        let taken = with_critical_section(this, || {
            this.own_context(py)?;
            let call = (
                this.callback.get(py),
                this.context.get(py),
                this.event_loop.get(py),
            );
            let (Some(callback), Some(context), Some(event_loop)) = call else {
                return Ok(None);
            };
            let args = this.args_tuple(py)?;
            let is_begun = self.begin_run();
            Ok(Some((callback, context, event_loop, args, is_begun)))
        });
        match taken {
            Ok(Some((callback, context, event_loop, args, is_begun))) => {
                let result = self.call(&event_loop, &context, &callback, &args);
                if is_begun {
                    self.end_run();
                }
                result
            }
            Ok(None) => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn call(
        self,
        event_loop: &Bound<'_, PyAny>,
        context: &Bound<'_, PyAny>,
        callback: &Bound<'_, PyAny>,
        args: &Bound<'_, PyTuple>,
    ) -> PyResult<()> {
        let py = self.py();
        // SAFETY: the context is alive, because this function holds a reference to it. PyContext_Exit below exits it.
        let entered = unsafe { ffi::PyContext_Enter(context.as_ptr()) };
        if entered != 0 {
            return self.report(event_loop, context, callback, args, PyErr::fetch(py));
        }
        let result = callback.call1(args);
        // SAFETY: entered above on this thread.
        let left = unsafe { ffi::PyContext_Exit(context.as_ptr()) };
        match result {
            Err(error) => self.report(event_loop, context, callback, args, error),
            Ok(_) if left != 0 => self.report(event_loop, context, callback, args, PyErr::fetch(py)),
            Ok(_) => Ok(()),
        }
    }

    /// Called when the context could not be copied. Reports the exception that is set.
    #[cold]
    fn fail_to_copy(self, event_loop: *mut ffi::PyObject) -> PyResult<()> {
        let py = self.py();
        let (error, own) = (PyErr::fetch(py), self.to_bound());
        // SAFETY: the caller holds the loop.
        let event_loop = unsafe { Bound::from_borrowed_ptr(py, event_loop) };
        errors::report(
            &event_loop,
            "A callback could not run: copying its context failed",
            error,
            &[("handle", &own)],
        )
    }

    #[cold]
    fn report(
        self,
        event_loop: &Bound<'_, PyAny>,
        context: &Bound<'_, PyAny>,
        callback: &Bound<'_, PyAny>,
        args: &Bound<'_, PyTuple>,
        error: PyErr,
    ) -> PyResult<()> {
        let py = self.py();
        let result = if errors::leaves_loop(py, &error) {
            Err(error)
        } else {
            self.report_error(event_loop, callback, args, error)
        };
        result.or_else(|error| leave(py, event_loop, context, error))
    }

    fn report_error(
        self,
        event_loop: &Bound<'_, PyAny>,
        callback: &Bound<'_, PyAny>,
        args: &Bound<'_, PyTuple>,
        error: PyErr,
    ) -> PyResult<()> {
        let is_debug = LoopObject::of(event_loop).reactor().probe.is_debug();
        let source = describe_call(callback, args, is_debug).unwrap_or_else(|_| "<unknown>".to_owned());
        let message = format!("Exception in callback {source}");
        let own = self.to_bound();
        match slots::source_traceback(self)? {
            Some(traceback) => errors::report(
                event_loop,
                &message,
                error,
                &[("handle", &own), ("source_traceback", &traceback)],
            ),
            None => errors::report(event_loop, &message, error, &[("handle", &own)]),
        }
    }
}

/// Lets the exception leave the loop. But if `asyncio.run()` in a coro borrows the loop, and the callback belongs to
/// that run, the exception ends only that run.
#[cold]
fn leave(
    py: Python<'_>,
    event_loop: &Bound<'_, PyAny>,
    context: &Bound<'_, PyAny>,
    error: PyErr,
) -> PyResult<()> {
    let ledger = event_loop.getattr("_ledger")?;
    if ledger.is_none() || !errors::leaves_loop(py, &error) {
        return Err(error);
    }
    let is_taken = ledger.call_method1("exit_raised", (context, error.value(py)))?;
    if is_taken.is_truthy()? { Ok(()) } else { Err(error) }
}

/// Drops the references that were moved out of a handle that cannot run. Either the handle has already run, is running
/// or was cleared by the collector, or copying its context has failed.
#[cold]
fn drop_rest(py: Python<'_>, call: &[*mut ffi::PyObject], args: &[*mut ffi::PyObject]) {
    for object in call.iter().chain(args) {
        // SAFETY: references that were moved out of the handle's cells, or null.
        drop(unsafe { Bound::from_owned_ptr_or_opt(py, *object) });
    }
}

/// The contexts that the handles of this loop share.
///
/// # Safety
/// `event_loop` is a live `LoopObject`, to which the caller holds a reference for as long as it uses the result.
#[inline]
unsafe fn contexts_of<'a>(event_loop: *mut ffi::PyObject) -> &'a Contexts {
    // SAFETY: by the contract.
    unsafe { &(*event_loop.cast::<LoopObject>()).reactor().contexts }
}
