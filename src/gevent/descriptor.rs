//! A source of the loop: a descriptor for gevent's io watchers.
//!
//! Each wait of a greenlet starts a watcher and stops it. A descriptor stays registered when its last watcher has
//! stopped, so that the next wait needs no system call. The descriptor is deregistered in these cases:
//!
//! - An event comes while no watcher is active, and the poller waits for no other event of this descriptor.
//! - A watcher is closed, and no other watcher is active.
//! - The descriptor is closed.
//! - A transport or `add_reader` of asyncio takes over the descriptor.
//!
//! (libev, too, keeps a descriptor registered until it is closed, or until an event comes that no watcher wants.)

use std::cell::{Cell, RefCell};
use std::ffi::{CStr, c_int, c_void};
use std::io;
use std::os::fd::RawFd;
use std::process;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use grapeshot_core::sys::poller::{Interest, Readiness, Token};
use pyo3::exceptions::PyRuntimeError;
use pyo3::ffi;
use pyo3::prelude::*;

use super::io::{self as watchers, Io, READ, WRITE};
use crate::binding::errors;
use crate::binding::native_type::{NativeType, This, new_type, represent, slot};
use crate::binding::object_cell::ObjectCell;
use crate::binding::object_ref::ObjectRef;
use crate::event_loop::pyloop::LoopObject;
use crate::event_loop::reactor::{Descriptors, Direction, FdUse};
use crate::event_loop::source::{Source, SourceRef};
use crate::event_loop::watching::refuse_transport;

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// Not in the loop's fd table, so no event can come.
    Unregistered,
    Registered,
    /// In the fd table, but not in the poller, which refuses a file that is always ready. The watchers of such a file
    /// fire in each iteration.
    AlwaysReady,
}

#[repr(C)]
pub(super) struct DescriptorObject {
    base: ffi::PyObject,
    event_loop: ObjectCell,
    fd: Cell<RawFd>,
    state: Cell<State>,
    /// Identifies the entry in the fd table while the descriptor is registered.
    token: Cell<Token>,
    /// The process that has registered the descriptor. A forked child shares the poller with its parent at first.
    pid: Cell<u32>,
    /// What the poller waits for; may be more than the watchers want.
    armed: Cell<Interest>,
    /// Whether `fire_always` is in the ready queue.
    is_queued: Cell<bool>,
    /// The active watchers. Borrowed only while no other code runs.
    watchers: RefCell<Vec<ObjectRef>>,
}

pub(super) type Descriptor<'py> = This<'py, DescriptorObject>;

static DESCRIPTOR_TYPE: AtomicPtr<ffi::PyTypeObject> = AtomicPtr::new(ptr::null_mut());

impl NativeType for DescriptorObject {
    const NAME: &'static CStr = c"grapeshot._core._HubDescriptor";
    const DOC: &'static CStr = c"A descriptor for gevent's io watchers.";
    const FLAGS: u64 = ffi::Py_TPFLAGS_DISALLOW_INSTANTIATION;

    fn cells(&self) -> impl IntoIterator<Item = &ObjectCell> {
        [&self.event_loop]
    }

    unsafe fn traverse_rest(&self, visit: ffi::visitproc, arg: *mut c_void) -> c_int {
        let Ok(watchers) = self.watchers.try_borrow() else {
            return 0;
        };
        for watcher in watchers.iter() {
            // SAFETY: the list holds a reference; visit and arg are the collector's.
            let result = unsafe { visit(watcher.as_ptr(), arg) };
            if result != 0 {
                return result;
            }
        }
        0
    }

    fn clear(this: This<'_, Self>) {
        Self::empty_cells(this);
        let watchers = this.watchers.take();
        drop(watchers);
    }

    fn with_access<R>(this: This<'_, Self>, body: impl FnOnce() -> PyResult<R>) -> PyResult<R> {
        LoopObject::with_access_of(this.py(), &this.event_loop, body)
    }
}

impl Source for DescriptorObject {
    /// `io::fire` makes the hub's loop the running one if the watcher's callback may need it.
    const NEEDS_RUNNING_LOOP: bool = false;

    fn on_ready(this: This<'_, Self>, readiness: Readiness) -> PyResult<()> {
        let mut events = 0;
        if readiness.is_readable() {
            events |= READ;
        }
        if readiness.is_writable() {
            events |= WRITE;
        }
        disarm(this, events & !this.wanted());
        fire_all(this, events, true)
    }

    fn interest(&self) -> Interest {
        self.armed.get()
    }

    /// Also false if no watcher is active, because asyncio's code may take over such a descriptor. The caller takes the
    /// descriptor for closed and does not remove it from the poller. But the descriptor may still be open, so this
    /// function deregisters it.
    fn has_descriptor(this: This<'_, Self>) -> bool {
        if this.watchers.borrow().is_empty() {
            end(this);
            return false;
        }
        Self::is_in_force(this)
    }

    fn on_displaced(this: This<'_, Self>) {
        this.state.set(State::Unregistered);
        this.armed.set(Interest::NONE);
        if let Some(event_loop) = this.event_loop.get(this.py()) {
            LoopObject::of(&event_loop)
                .reactor()
                .ready
                .defer(this.to_bound(), wake_all_closed);
        }
    }
}

impl DescriptorObject {
    /// The events that the active watchers want.
    fn wanted(&self) -> c_int {
        let watchers = self.watchers.borrow();
        watchers
            .iter()
            .map(|watcher| {
                // SAFETY: only `join` fills the list, with watchers, and the list keeps them alive.
                unsafe { &*watcher.as_ptr().cast::<watchers::IoObject>() }
                    .events
                    .get()
            })
            .fold(0, |all, events| all | events)
    }

    /// Whether the number still belongs to the file that was registered. Costs a system call.
    fn is_in_force(this: Descriptor<'_>) -> bool {
        this.state.get() == State::AlwaysReady
            || with_descriptors(this, |descriptors| {
                descriptors.is_in_force(this.fd.get(), this.token.get(), this.armed.get())
            }) == Some(true)
    }

    fn join(&self, watcher: Io<'_>) {
        if let Some(event_loop) = self.event_loop.get(watcher.py()) {
            watchers::note_start(watcher, LoopObject::of(&event_loop).reactor().poll_count());
        }
        self.watchers
            .borrow_mut()
            .push(ObjectRef::new(watcher.to_bound()));
    }
}

fn interest_of(events: c_int) -> Interest {
    let mut interest = Interest::NONE;
    if events & READ != 0 {
        interest = interest.with(Interest::READ);
    }
    if events & WRITE != 0 {
        interest = interest.with(Interest::WRITE);
    }
    interest
}

/// `object` as a descriptor; None if it is of another type.
pub(super) fn of<'a>(object: &'a Bound<'_, PyAny>) -> Option<Descriptor<'a>> {
    // SAFETY: attached; objects of this type, which has no subclasses, have the layout, and `object` keeps it alive.
    unsafe {
        let is_descriptor = ffi::Py_TYPE(object.as_ptr()) == DESCRIPTOR_TYPE.load(Ordering::Relaxed);
        is_descriptor.then(|| This::new(object.py(), object.as_ptr()))
    }
}

/// Calls `body` with the loop, unless the collector has cleared this object.
fn with_loop<R>(this: Descriptor<'_>, body: impl FnOnce(&Bound<'_, PyAny>) -> R) -> Option<R> {
    this.event_loop.get(this.py()).as_ref().map(body)
}

/// `with_loop` for the loop's descriptors.
fn with_descriptors<R>(this: Descriptor<'_>, body: impl FnOnce(&Descriptors) -> R) -> Option<R> {
    with_loop(this, |event_loop| {
        body(&LoopObject::of(event_loop).reactor().descriptors)
    })
}

// ---- watchers come and go -------------------------------------------------------------------------------------------

/// Puts a watcher back on the descriptor that it was on before. Returns false if the descriptor is not registered any
/// more; its number may belong to another file by now.
#[inline]
pub(super) fn rejoin(this: Descriptor<'_>, watcher: Io<'_>) -> bool {
    let is_known = match this.state.get() {
        State::Registered | State::AlwaysReady => {
            is_in_table(this) && arm(this, interest_of(watcher.events.get()))
        }
        State::Unregistered => false,
    };
    if is_known {
        this.join(watcher);
    }
    is_known
}

/// Whether the descriptor is in the loop's fd table, which is empty once the loop is closed.
fn is_in_table(this: Descriptor<'_>) -> bool {
    with_descriptors(this, |descriptors| descriptors.is_registered(this.token.get())) == Some(true)
}

/// Takes a watcher off the descriptor, which stays registered.
#[inline]
pub(super) fn leave(this: Descriptor<'_>, watcher: Io<'_>) {
    let left = {
        let mut watchers = this.watchers.borrow_mut();
        let index = watchers
            .iter()
            .position(|other| other.as_ptr() == watcher.as_ptr());
        index.map(|index| watchers.remove(index))
    };
    drop(left);
}

/// Puts a watcher on its descriptor for the first time, or after the descriptor was deregistered. Returns the
/// `DescriptorObject`, or None if the descriptor is closed.
///
/// Raises RuntimeError if a transport, a task or a callback of asyncio uses the descriptor, and OSError if the system
/// refuses to watch it.
pub(super) fn watch<'py>(
    event_loop: &Bound<'py, PyAny>,
    watcher: Io<'py>,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let (py, fd) = (watcher.py(), watcher.fd.get());
    let native = LoopObject::of(event_loop);
    native.reactor().check_closed()?;
    let wanted = interest_of(watcher.events.get());
    let object = if let Some(found) = registered_at(py, event_loop, fd) {
        found
    } else {
        refuse_transport(native, py, fd)?;
        refuse_watched(native, fd)?;
        new(py, event_loop, fd)?
    };
    let Some(descriptor) = of(&object) else {
        return Ok(None);
    };
    let is_known = !descriptor.watchers.borrow().is_empty()
        && DescriptorObject::is_in_force(descriptor)
        && arm(descriptor, wanted);
    descriptor.join(watcher);
    if is_known {
        return Ok(Some(object));
    }
    // The number may belong to another file than the one that was registered.
    end(descriptor);
    match enter(descriptor, native) {
        Ok(()) => Ok(Some(object)),
        Err(error) => {
            leave(descriptor, watcher);
            match error.raw_os_error() {
                Some(libc::EBADF | libc::ENOENT) => Ok(None),
                _ => Err(errors::os_error(&error)),
            }
        }
    }
}

/// Raises RuntimeError if a task or a callback of asyncio waits for the descriptor.
fn refuse_watched(native: &LoopObject, fd: RawFd) -> PyResult<()> {
    let descriptors = &native.reactor().descriptors;
    let is_watched =
        descriptors.is_watched(fd, Direction::Read) || descriptors.is_watched(fd, Direction::Write);
    if is_watched && descriptors.is_watch_in_force(fd) {
        return Err(PyRuntimeError::new_err(format!(
            "asyncio waits for file descriptor {fd}, so a greenlet cannot wait for it"
        )));
    }
    Ok(())
}

/// The registered `DescriptorObject` of a descriptor.
fn registered_at<'py>(
    py: Python<'py>,
    event_loop: &Bound<'py, PyAny>,
    fd: RawFd,
) -> Option<Bound<'py, PyAny>> {
    let (_, source) = LoopObject::of(event_loop).reactor().descriptors.source(fd)?;
    let source = source.to_bound(py);
    of(&source).is_some().then_some(source)
}

fn new<'py>(py: Python<'py>, event_loop: &Bound<'py, PyAny>, fd: RawFd) -> PyResult<Bound<'py, PyAny>> {
    // SAFETY: attached. The allocation is large enough for the layout and consists of zero bytes. The fields for which
    // zero bytes are not valid are written before any other code can see the object.
    unsafe {
        let made = ffi::PyType_GenericAlloc(DESCRIPTOR_TYPE.load(Ordering::Relaxed), 0);
        let made = Bound::from_owned_ptr_or_err(py, made)?;
        let object = made.as_ptr().cast::<DescriptorObject>();
        (&raw mut (*object).state).write(Cell::new(State::Unregistered));
        (&raw mut (*object).token).write(Cell::new(Token(0)));
        (&raw mut (*object).armed).write(Cell::new(Interest::NONE));
        (&raw mut (*object).watchers).write(RefCell::new(Vec::new()));
        (*object).fd.set(fd);
        (*object).event_loop.set(event_loop.clone());
        Ok(made)
    }
}

// ---- the registration -----------------------------------------------------------------------------------------------

/// Registers the descriptor for the events that its watchers want. If it is a file that the poller refuses because the
/// file is always ready, its watchers fire in each iteration.
fn enter(this: Descriptor<'_>, native: &LoopObject) -> io::Result<()> {
    let reactor = native.reactor();
    let register = |interest| -> io::Result<()> {
        let source = SourceRef::new::<DescriptorObject>(this);
        let fd_use = FdUse::Source(source);
        let token = reactor
            .descriptors
            .register(this.py(), this.fd.get(), fd_use, interest)?;
        this.token.set(token);
        this.pid.set(process::id());
        this.armed.set(interest);
        Ok(())
    };
    match register(interest_of(this.wanted())) {
        Ok(()) => this.state.set(State::Registered),
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => {
            register(Interest::NONE)?;
            this.state.set(State::AlwaysReady);
            fire_soon(this, native);
        }
        Err(error) => return Err(error),
    }
    Ok(())
}

/// Lets the watchers of a file that is always ready fire in the next iteration.
fn fire_soon(this: Descriptor<'_>, native: &LoopObject) {
    if !this.is_queued.replace(true) {
        native.reactor().ready.defer(this.to_bound(), fire_always);
    }
}

/// Makes the poller wait for these events too. Returns false if the system refuses that, for example because other code
/// has closed the descriptor.
#[inline]
fn arm(this: Descriptor<'_>, wanted: Interest) -> bool {
    let armed = this.armed.get();
    let all = armed.with(wanted);
    if all == armed || this.state.get() == State::AlwaysReady {
        return true;
    }
    let told = with_descriptors(this, |descriptors| {
        descriptors.set_interest(this.fd.get(), this.token.get(), armed, all)
    });
    let is_armed = matches!(told, Some(Ok(())));
    if is_armed {
        this.armed.set(all);
    }
    is_armed
}

/// Makes the poller stop waiting for these events: they have happened, but no watcher wants them.
#[inline]
fn disarm(this: Descriptor<'_>, unwanted: c_int) {
    let armed = this.armed.get();
    let left = armed.without(interest_of(unwanted));
    if left == armed {
        return;
    }
    if left.is_empty() {
        end(this);
        return;
    }
    let told = with_descriptors(this, |descriptors| {
        descriptors.set_interest(this.fd.get(), this.token.get(), armed, left)
    });
    if matches!(told, Some(Ok(()))) {
        this.armed.set(left);
    }
}

/// Deregisters the descriptor.
fn end(this: Descriptor<'_>) {
    let armed = this.armed.replace(Interest::NONE);
    if this.state.replace(State::Unregistered) != State::Unregistered {
        let armed = if is_own(this) { armed } else { Interest::NONE };
        let fd_use = with_descriptors(this, |descriptors| {
            descriptors.unregister(this.token.get(), armed)
        });
        drop(fd_use);
    }
}

/// Whether this process has registered the descriptor. A forked child must leave the poller alone, because the poller
/// is the parent's until `reinit` of the hub's loop is called.
fn is_own(this: Descriptor<'_>) -> bool {
    this.pid.get() == process::id()
}

/// Deregisters the descriptor if no watcher is active.
pub(super) fn end_if_idle(this: Descriptor<'_>) {
    if this.watchers.borrow().is_empty() {
        end(this);
    }
}

// ---- events ---------------------------------------------------------------------------------------------------------

/// Fires the watchers that want one of these events. If the events come from a poll, this leaves out watchers that were
/// started after that poll, because the events may be over by now. If they are not over, the next poll reports them.
fn fire_all(this: Descriptor<'_>, events: c_int, is_polled: bool) -> PyResult<()> {
    let py = this.py();
    let polled = if is_polled {
        with_loop(this, |event_loop| {
            LoopObject::of(event_loop).reactor().poll_count()
        })
    } else {
        None
    };
    let watchers = this.watchers.borrow();
    let first = match watchers.as_slice() {
        [] => return Ok(()),
        [only] => only.new_ref(),
        all => {
            let all: Vec<_> = all.iter().map(ObjectRef::new_ref).collect();
            drop(watchers);
            return fire_several(this, all, events, polled);
        }
    };
    drop(watchers);
    fire_one(this, &first.into_bound(py), events, polled)
}

#[inline(never)]
fn fire_several(
    this: Descriptor<'_>,
    watchers: Vec<ObjectRef>,
    events: c_int,
    polled: Option<u64>,
) -> PyResult<()> {
    let mut result = Ok(());
    for watcher in watchers {
        let fired = fire_one(this, &watcher.into_bound(this.py()), events, polled);
        result = result.and(fired);
    }
    result
}

/// Fires a watcher of the descriptor, if the watcher wants one of these events. `polled` is the number of the poll that
/// has found the events. Err is an exception that leaves the loop.
#[inline]
fn fire_one(
    this: Descriptor<'_>,
    watcher: &Bound<'_, PyAny>,
    events: c_int,
    polled: Option<u64>,
) -> PyResult<()> {
    // SAFETY: both callers pass an entry of the list.
    let watcher = unsafe { watchers::of(watcher) };
    let events = events & watcher.events.get();
    // An earlier callback may have stopped the watcher, or started it on another descriptor.
    if events == 0
        || !watcher.is_active.get()
        || !watchers::is_on(watcher, this)
        || polled == Some(watcher.started_at.get())
    {
        return Ok(());
    }
    match watchers::fire(watcher, events, polled.is_some()) {
        Ok(()) => Ok(()),
        Err(error) => report(this, error),
    }
}

/// Reports an exception that the hub could not handle.
#[cold]
#[inline(never)]
fn report(this: Descriptor<'_>, error: PyErr) -> PyResult<()> {
    let reported = with_loop(this, |event_loop| {
        let native = LoopObject::of(event_loop);
        native.reactor().show(this.py(), native)?;
        errors::report(event_loop, "gevent's hub cannot handle an error", error, &[])
    });
    reported.unwrap_or(Ok(()))
}

/// Fires the watchers of a file that is always ready, and queues itself for the next iteration. If no watcher is active
/// any more, deregisters the descriptor instead.
unsafe fn fire_always(py: Python<'_>, object: *mut ffi::PyObject) -> PyResult<()> {
    // SAFETY: queued by `fire_soon` with a descriptor, to which the queue holds a reference.
    let this: Descriptor<'_> = unsafe { This::new(py, object) };
    this.is_queued.set(false);
    if this.state.get() != State::AlwaysReady {
        return Ok(());
    }
    if this.watchers.borrow().is_empty() {
        end(this);
        return Ok(());
    }
    with_loop(this, |event_loop| fire_soon(this, LoopObject::of(event_loop)));
    fire_all(this, READ | WRITE, false)
}

/// Lets the hub wake the watchers of a descriptor that other code has closed.
unsafe fn wake_all_closed(py: Python<'_>, object: *mut ffi::PyObject) -> PyResult<()> {
    // SAFETY: queued by `on_displaced` with a descriptor, to which the queue holds a reference.
    let this: Descriptor<'_> = unsafe { This::new(py, object) };
    if this.state.get() != State::Unregistered {
        return Ok(()); // registered again in the meantime
    }
    let mut result = Ok(());
    for watcher in take(py, this) {
        // SAFETY: it comes from the list.
        result = result.and(watchers::wake_closed(unsafe { watchers::of(&watcher) }));
    }
    result
}

/// Takes the watchers off the descriptor. They stay active.
fn take<'py>(py: Python<'py>, this: Descriptor<'_>) -> Vec<Bound<'py, PyAny>> {
    let taken = this.watchers.take();
    let taken: Vec<_> = taken.into_iter().map(|watcher| watcher.into_bound(py)).collect();
    for watcher in &taken {
        // SAFETY: it comes from the list.
        watchers::forget_descriptor(unsafe { watchers::of(watcher) });
    }
    taken
}

// ---- for the hub's loop ---------------------------------------------------------------------------------------------

/// Deregisters a descriptor that is about to be closed, and takes off its watchers, which stay active.
pub(super) fn take_watchers<'py>(
    py: Python<'py>,
    event_loop: &Bound<'py, PyAny>,
    fd: RawFd,
) -> Vec<Bound<'py, PyAny>> {
    let Some(found) = registered_at(py, event_loop, fd) else {
        return Vec::new();
    };
    let Some(descriptor) = of(&found) else {
        return Vec::new();
    };
    end(descriptor);
    take(py, descriptor)
}

/// Deregisters all descriptors of the hub, and takes off their watchers, which stay active. In the child of a fork, the
/// poller is not told, because it is still the parent's.
pub(super) fn take_all_watchers<'py>(
    py: Python<'py>,
    event_loop: &Bound<'py, PyAny>,
    is_forked: bool,
) -> Vec<Bound<'py, PyAny>> {
    let mut taken = Vec::new();
    for source in LoopObject::of(event_loop).reactor().descriptors.sources(py) {
        let Some(descriptor) = of(&source) else { continue };
        if is_forked {
            descriptor.state.set(State::Unregistered);
            descriptor.armed.set(Interest::NONE);
            descriptor.is_queued.set(false); // the ready queue is the parent's
        } else {
            end(descriptor);
        }
        taken.extend(take(py, descriptor));
    }
    taken
}

unsafe extern "C" fn repr(slf: *mut ffi::PyObject) -> *mut ffi::PyObject {
    // SAFETY: CPython calls tp_repr, attached, with an object of this type.
    unsafe {
        represent::<DescriptorObject>(slf, |this| {
            let count = this.watchers.borrow().len();
            Ok(format!("<_HubDescriptor fd={} watchers={count}>", this.fd.get()))
        })
    }
}

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let slots = [slot(ffi::Py_tp_repr, repr as *mut c_void)];
    // SAFETY: the functions are for this layout.
    let kind = unsafe { new_type::<DescriptorObject>(module, None, &slots)? };
    DESCRIPTOR_TYPE.store(kind.into_ptr().cast(), Ordering::Release);
    Ok(())
}
