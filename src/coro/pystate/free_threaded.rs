//! The parts of a thread state that exist only in free-threaded builds, and what the garbage collector of these builds
//! has to know about a stack that does not run.
//!
//! **Critical sections.** `PyThreadState.critical_section` is the head of a list of the locks that C code on the stack
//! holds (`Include/internal/pycore_critical_section.h`). For example, `list.sort` holds the lock of its list while it
//! calls `key`, and a step of asyncio's C task holds the lock of the task. CPython releases these locks whenever the
//! thread detaches. Leaving a stack does the same: the locks are released, and the innermost one is taken again when
//! the stack continues. (CPython takes an outer lock again when the section inside it ends.)
//!
//! **Deferred references.** A reference on a Python stack may be deferred: it does not count in the object's reference
//! count, and its lowest bit is set (`Include/internal/pycore_stackref.h`). The collector looks for deferred references
//! in the frames that it reaches through the thread states, and in the list `c_stack_refs`, whose nodes lie on the C
//! stack. It reaches neither the frames nor the nodes of a stack that does not run. So the coros' `tp_traverse` reports
//! the references in these frames and nodes. A suspended coro reports the references of its own stack. The running coro
//! reports the references of the thread's own stack, which does not run while a coro runs.
//!
//! ```text
//!   thread state   current_frame, c_stack_refs   -->  the stack that runs             seen by the collector
//!   PyState        frame, stack_refs             -->  the stack that does not run     reported by `traverse`
//! ```
//!
//! The collector calls `tp_traverse` in two phases. In the first phase, it subtracts one from an object's reference
//! count for each reference that is reported. Deferred references were never counted, so they must not be reported in
//! this phase. In the second phase, the collector looks for everything that is reachable, so deferred references must
//! be reported. To tell the phases apart, CPython's `_PyGC_VisitStackRef` compares the visitor with the two functions
//! that subtract. These functions are not exported. But they are the only visitors that get a null argument (see their
//! callers `update_refs` and `handle_resurrected_objects` in `Python/gc_free_threading.c`). So `traverse` checks the
//! argument.
//!
//! The collector runs while all other threads have stopped, each at a point where it may be interrupted. There is no
//! such point between the moment when a switch changes the thread state and the moment when the stack has changed.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCFunction, PyDict};

use super::{field, imp};
use crate::coro::threads::forks;

/// The bit that says that a stack reference is deferred. In an empty reference, only this bit is set.
const DEFERRED: usize = 1;
/// The lowest two bits of a stack reference that is an integer.
const INTEGER: usize = 3;
/// `FRAME_OWNED_BY_INTERPRETER`. A frame whose owner is this number or a higher one contains no references.
const OWNED_BY_INTERPRETER: u8 = 3;
/// The bit of `critical_section` that says that its lock has been released.
const INACTIVE: usize = 1;

/// The part of a thread state that exists only in free-threaded builds.
pub(super) struct Unlocked {
    /// The innermost critical section, 0 if there is none.
    critical_section: usize,
    /// The innermost node of the list of stack references.
    stack_refs: *mut u8,
    /// The deferred references in that list, while the stack with the nodes is evicted. None while the stack is in its
    /// place.
    evicted_refs: Option<Vec<*mut ffi::PyObject>>,
    /// `forks()` at the last switch.
    forks: u32,
}

impl Unlocked {
    pub(super) const fn empty() -> Self {
        Self {
            critical_section: 0,
            stack_refs: ptr::null_mut(),
            evicted_refs: None,
            forks: 0,
        }
    }

    /// Releases the locks of the stack that runs, and exchanges this state with the thread's. After the switch,
    /// `resume_critical_sections` must be called on the other stack.
    ///
    /// # Safety
    /// As for `PyState::swap`. The stack that was running is in its place.
    #[inline(always)]
    pub(super) unsafe fn swap(&mut self, thread: *mut u8) {
        // SAFETY: attached; the offsets fit this interpreter (checked at build and at import).
        unsafe {
            let section = field::<usize>(thread, imp::CRITICAL_SECTION);
            if is_active(*section) {
                call(&SUSPEND_ALL, thread.cast());
            }
            ptr::swap(section, &raw mut self.critical_section);
            ptr::swap(field(thread, imp::STACK_REFS), &raw mut self.stack_refs);
        }
        self.forks = forks();
    }

    /// Called in the child of a fork, for the coro that has forked.
    pub(super) fn after_fork(&mut self) {
        self.forks = forks();
    }

    /// Copies the deferred references from the list of stack references, because the stack is about to be evicted.
    ///
    /// # Safety
    /// The state belongs to a suspended stack, which is in its place.
    #[inline(always)]
    pub(super) unsafe fn leave_slot(&mut self) {
        let mut objects = Vec::new();
        let mut node = self.stack_refs;
        while !node.is_null() {
            // SAFETY: a node on the stack (contract).
            unsafe {
                objects.extend(deferred(*field(node, imp::STACK_REF)));
                node = *field(node, imp::STACK_REF_NEXT);
            }
        }
        self.evicted_refs = Some(objects);
    }

    /// Called when the stack is in its place again.
    #[inline(always)]
    pub(super) fn return_to_slot(&mut self) {
        self.evicted_refs = None;
    }

    /// Reports the deferred references of a stack that does not run. `innermost`: its innermost Python frame, or null.
    /// `is_own`: whether the stack is a thread's own stack.
    ///
    /// # Safety
    /// Called by the collector. The stack is suspended in its place, or it was evicted after a call of `leave_slot` and
    /// its frames are linked past the entry frames (`Relinked`).
    pub(super) unsafe fn traverse(
        &self,
        innermost: *mut u8,
        is_own: bool,
        visit: ffi::visitproc,
        arg: *mut c_void,
    ) -> c_int {
        if is_own && self.forks != forks() {
            // This is the child of a fork that another thread made. The thread of this stack does not exist here, and
            // the memory of its stack may be in use for something else.
            return 0;
        }
        // SAFETY: may be called at any time.
        let is_finalizing = unsafe { ffi::Py_IsFinalizing() } != 0;
        if arg.is_null() || is_finalizing {
            // While the interpreter exits, no coro is resumed (`may_run`), and CPython frees objects to which only
            // deferred references are left. So the references here may be dangling.
            return 0;
        }
        let mut report = |object: Option<*mut ffi::PyObject>| match object {
            // SAFETY: `visit` and `arg` are the collector's; the stack keeps the object alive.
            Some(object) => unsafe { visit(object, arg) },
            None => 0,
        };
        for object in self.evicted_refs.iter().flatten() {
            let result = report(Some(*object));
            if result != 0 {
                return result;
            }
        }
        // SAFETY: by the contract. The walks end at null.
        unsafe {
            let mut node = match self.evicted_refs {
                Some(_) => ptr::null_mut(),
                None => self.stack_refs,
            };
            while !node.is_null() {
                let result = report(deferred(*field(node, imp::STACK_REF)));
                if result != 0 {
                    return result;
                }
                node = *field(node, imp::STACK_REF_NEXT);
            }
            let mut frame = innermost;
            while !frame.is_null() {
                let result = report_frame(frame, &mut report);
                if result != 0 {
                    return result;
                }
                frame = *field(frame, imp::FRAME_PREVIOUS);
            }
        }
        0
    }
}

/// Reports the deferred references of one frame: its code, its function, its variables and the values it works with.
///
/// # Safety
/// A live frame of a stack that does not run.
unsafe fn report_frame(
    frame: *mut u8,
    report: &mut impl FnMut(Option<*mut ffi::PyObject>) -> c_int,
) -> c_int {
    // SAFETY: by the contract. The stack pointer of a frame is set whenever the frame calls something. The pointer is
    // null while the frame is being made.
    unsafe {
        if *field::<u8>(frame, imp::FRAME_OWNER) >= OWNED_BY_INTERPRETER {
            return 0;
        }
        let top: *mut usize = *field(frame, imp::FRAME_STACK_POINTER);
        if top.is_null() {
            return 0;
        }
        for offset in [imp::FRAME_EXECUTABLE, imp::FRAME_FUNCTION] {
            let result = report(deferred(*field(frame, offset)));
            if result != 0 {
                return result;
            }
        }
        let mut place: *mut usize = field(frame, imp::FRAME_LOCALS);
        while place < top {
            let result = report(deferred(*place));
            if result != 0 {
                return result;
            }
            place = place.add(1);
        }
    }
    0
}

/// Whether coros may be resumed: not while the interpreter exits (see `Unlocked::traverse`).
#[inline(always)]
pub(super) fn may_run() -> bool {
    // SAFETY: may be called at any time.
    unsafe { ffi::Py_IsFinalizing() == 0 }
}

/// The object of a deferred stack reference. None if the reference is empty, counted, or an integer.
fn deferred(reference: usize) -> Option<*mut ffi::PyObject> {
    let is_deferred = reference & INTEGER == DEFERRED && reference != DEFERRED;
    is_deferred.then(|| ptr::with_exposed_provenance_mut(reference & !INTEGER))
}

fn is_active(section: usize) -> bool {
    section != 0 && section & INACTIVE == 0
}

/// Takes the lock of the innermost critical section of the running stack again, if it was released.
///
/// # Safety
/// Attached, and the thread state belongs to the stack that runs. While the thread waits for the lock, it detaches.
#[inline(always)]
pub(super) unsafe fn resume_critical_sections() {
    // SAFETY: by the contract.
    unsafe {
        let thread = ffi::PyThreadState_Get();
        let section = *field::<usize>(thread.cast(), imp::CRITICAL_SECTION);
        if section & INACTIVE != 0 {
            call(&RESUME, thread);
        }
    }
}

type OfThread = unsafe extern "C" fn(*mut ffi::PyThreadState);

/// `_PyCriticalSection_SuspendAll` and `_PyCriticalSection_Resume`.
static SUSPEND_ALL: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
static RESUME: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

/// # Safety
/// Attached, and `thread` is the thread's state.
#[inline(always)]
unsafe fn call(function: &AtomicPtr<c_void>, thread: *mut ffi::PyThreadState) {
    // SAFETY: `look_up` has found a function of this type; there are no coros otherwise.
    unsafe { std::mem::transmute::<*mut c_void, OfThread>(function.load(Ordering::Relaxed))(thread) };
}

/// Finds the interpreter's functions. Returns an error text if one is missing.
pub(super) fn look_up() -> Option<&'static str> {
    for (place, name) in [
        (&SUSPEND_ALL, c"_PyCriticalSection_SuspendAll"),
        (&RESUME, c"_PyCriticalSection_Resume"),
    ] {
        // SAFETY: a name that ends in NUL; the default search order includes the interpreter.
        let function = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
        if function.is_null() {
            return Some(
                "coros need functions for critical sections, which this interpreter does not export",
            );
        }
        place.store(function, Ordering::Relaxed);
    }
    None
}

/// Checks the offsets against the running interpreter. Returns the name of a field that is not where it should be.
///
/// # Safety
/// `thread` is the attached thread's state.
pub(super) unsafe fn check(py: Python<'_>, thread: *mut u8) -> PyResult<Option<&'static str>> {
    // SAFETY: by the contract.
    unsafe {
        if !has_critical_section(py, thread) {
            return Ok(Some("the critical section"));
        }
        if !has_stack_refs(py)? {
            return Ok(Some("the stack references"));
        }
        if !has_references(py)? {
            return Ok(Some("the references in a frame"));
        }
    }
    Ok(None)
}

/// Checks that the thread state shows a critical section that was just entered.
///
/// # Safety
/// As for `check`.
unsafe fn has_critical_section(py: Python<'_>, thread: *mut u8) -> bool {
    let object = PyDict::new(py);
    // SAFETY: by the contract; a zeroed section is entered and left on this thread.
    unsafe {
        let place = field::<usize>(thread, imp::CRITICAL_SECTION);
        let before = *place;
        let mut section: ffi::PyCriticalSection = std::mem::zeroed();
        ffi::PyCriticalSection_Begin(&raw mut section, object.as_ptr());
        let inside = *place;
        ffi::PyCriticalSection_End(&raw mut section);
        inside == (&raw const section).addr() && *place == before
    }
}

/// Checks that the list of stack references contains a method while the method is called by name.
///
/// # Safety
/// As for `check`.
unsafe fn has_stack_refs(py: Python<'_>) -> PyResult<bool> {
    /// A node is at most this far above this function on the stack.
    const STACK_LEN: usize = 64 * 1024;
    // SAFETY: called attached. The field is null or points to a node on this stack. The bounds are checked before the
    // node is read.
    let innermost = PyCFunction::new_closure(py, None, None, |_, _| unsafe {
        let node: *mut u8 = *field(ffi::PyThreadState_Get().cast(), imp::STACK_REFS);
        let here = (&raw const node).addr();
        if (here..here + STACK_LEN).contains(&node.addr()) && node.addr().is_multiple_of(8) {
            *field::<usize>(node, imp::STACK_REF) & !INTEGER
        } else {
            0
        }
    })?;
    let holder = py.import("types")?.getattr("SimpleNamespace")?.call0()?;
    holder.setattr("innermost", &innermost)?;
    let found: usize = holder.call_method0("innermost")?.extract()?;
    Ok(found == innermost.as_ptr().addr())
}

/// Checks that a frame contains its code, its function and its variable at the offsets.
///
/// # Safety
/// As for `check`.
unsafe fn has_references(py: Python<'_>) -> PyResult<bool> {
    let globals = PyDict::new(py);
    // SAFETY: called attached, and only by the function below, so the innermost frame is that function's. The offsets
    // are inside the frame, which has a variable.
    let look = PyCFunction::new_closure(py, None, None, |_, _| unsafe {
        let frame = imp::innermost(*field(ffi::PyThreadState_Get().cast(), imp::FRAME));
        let reference = |offset| *field::<usize>(frame, offset) & !INTEGER;
        let top: usize = *field(frame, imp::FRAME_STACK_POINTER);
        let locals = frame.addr() + imp::FRAME_LOCALS;
        (
            reference(imp::FRAME_EXECUTABLE),
            reference(imp::FRAME_FUNCTION),
            reference(imp::FRAME_LOCALS),
            (locals..locals + 1024).contains(&top),
            *field::<u8>(frame, imp::FRAME_OWNER),
        )
    })?;
    globals.set_item("look", look)?;
    let function = py
        .run(c"def function(variable): return look()", Some(&globals), None)
        .and_then(|()| globals.get_item("function"))?;
    let Some(function) = function else {
        return Ok(false);
    };
    let found: (usize, usize, usize, bool, u8) = function.call1((&globals,))?.extract()?;
    let code = function.getattr("__code__")?;
    Ok(found
        == (
            code.as_ptr().addr(),
            function.as_ptr().addr(),
            globals.as_ptr().addr(),
            true,
            0,
        ))
}
