//! Saves and restores the thread-local variables in which other libraries keep pointers to objects on a coro's stack.
//!
//! Extensions built with pybind11 keep a linked list of the calls that a thread is in. Its head is a thread-local
//! variable, and its items are on the stack. If a call that ends is not at the head of the list, pybind11 terminates
//! the process. So the head is saved and restored with the coro:
//!
//! ```text
//!   the coro runs:     variable --> call on its stack --> outer call on its stack --> value of the thread itself
//!   it waits:          variable --> value of the thread itself                        the pointer to the call is saved
//!   it runs again:     variable --> call on its stack --> ...
//! ```
//!
//! Which variable holds the head depends on the version of pybind11. Up to 3.0.1 the head may be the value of a pthread
//! key (pybind11 stores the key in a structure of its own). From 3.0.2 on, each extension has a thread-local variable
//! for the head. So the variable is recognized by its value: a thread-local variable that points into the stack of the
//! waiting coro belongs to the coro. The search runs only if pybind11 is loaded, and only for stacks that are deep
//! enough to contain a call through C++.
//!
//! The scheduler calls these functions on the thread's own stack.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use grapeshot_core::sys::thread_locals::{Place, Variables};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

/// A stack on which C++ code has called a Python function is longer than this. A stack with Python functions only is
/// 700 bytes long on 3.13, so it is not searched; on 3.14 it is 1,100 bytes long and is searched too.
pub(super) const MIN_DEPTH: usize = 768;
/// The largest number of list items to follow.
const MAX_ITEMS: usize = 10_000;
/// A list item on the thread's own stack is at most this many bytes above the stack pointer of that stack.
const OWN_STACK_LEN: usize = 1 << 30;
/// The key of pybind11's structure in the interpreter's dict or in `builtins` begins with this. The version number of
/// the structure's layout follows.
const INTERNALS: &str = "__pybind11_internals_v";
/// Up to this layout version the head may be a value of `pthread_getspecific`.
const LAST_WITH_KEY: u32 = 11;

/// The values that were taken out of the thread's variables when the coro was suspended.
pub(super) struct Taken(Vec<Word>);

struct Word {
    place: Place,
    value: usize,
    /// The thread's own value, which the variable gets when the coro is suspended.
    before: usize,
}

/// The state of the search for pybind11's variables in this thread.
pub(super) struct Search {
    /// The lengths of the two `DICTS` when they were last searched.
    dict_lens: Cell<(ffi::Py_ssize_t, ffi::Py_ssize_t)>,
    is_needed: Cell<bool>,
    with_keys: Cell<bool>,
    variables: RefCell<Variables>,
}

impl Search {
    pub(super) fn new() -> Self {
        Self {
            dict_lens: Cell::new((-1, -1)),
            is_needed: Cell::new(false),
            with_keys: Cell::new(false),
            variables: RefCell::new(Variables::default()),
        }
    }

    /// Whether an extension built with pybind11 is loaded, judging by the keys of the two `DICTS`.
    #[inline]
    pub(super) fn is_needed(&self, py: Python<'_>) -> bool {
        let dicts = known_dicts(py);
        // SAFETY: attached; dicts that are never freed, or null.
        let len = |dict: *mut ffi::PyObject| unsafe {
            if dict.is_null() {
                0
            } else {
                (*dict.cast::<ffi::PyDictObject>()).ma_used
            }
        };
        let lens = (len(dicts[0]), len(dicts[1]));
        if self.dict_lens.replace(lens) != lens {
            for dict in dicts {
                // SAFETY: as above.
                if let Some(dict) = unsafe { Bound::from_borrowed_ptr_or_opt(py, dict) } {
                    self.search_dict(&dict);
                }
            }
        }
        self.is_needed.get()
    }

    #[cold]
    fn search_dict(&self, dict: &Bound<'_, PyAny>) {
        let Ok(dict) = dict.cast::<PyDict>() else {
            return;
        };
        // A copy: in a free-threaded build, other threads may change the dict meanwhile.
        for key in dict.keys() {
            let Some(rest) = key
                .cast::<PyString>()
                .ok()
                .and_then(|key| key.to_str().ok()?.strip_prefix(INTERNALS).map(str::to_owned))
            else {
                continue;
            };
            let digits = rest.find(|letter: char| !letter.is_ascii_digit());
            let version = rest[..digits.unwrap_or(rest.len())].parse::<u32>();
            self.is_needed.set(true);
            if version.is_ok_and(|version| version <= LAST_WITH_KEY) {
                self.with_keys.set(true);
            }
        }
    }
}

/// The interpreter's own dict, and the dict of the module `builtins`. Neither is ever freed.
static DICTS: [AtomicPtr<ffi::PyObject>; 2] = [const { AtomicPtr::new(ptr::null_mut()) }; 2];

#[inline]
fn known_dicts(py: Python<'_>) -> [*mut ffi::PyObject; 2] {
    let builtins = DICTS[1].load(Ordering::Relaxed);
    if builtins.is_null() {
        find_dicts(py);
    }
    [DICTS[0].load(Ordering::Relaxed), DICTS[1].load(Ordering::Relaxed)]
}

#[cold]
fn find_dicts(py: Python<'_>) {
    // SAFETY: attached; the interpreter keeps its dict, or null is returned.
    let own = unsafe { ffi::PyInterpreterState_GetDict(ffi::PyInterpreterState_Get()) };
    DICTS[0].store(own, Ordering::Relaxed);
    if let Ok(builtins) = py.import("builtins") {
        DICTS[1].store(builtins.dict().into_ptr(), Ordering::Relaxed);
    }
}

/// Looks for variables of the thread that point into `stack`, saves their values in `taken`, and sets these variables
/// to the thread's own values. Also resets all variables that `put_back` has set. `stack` is empty if the coro has
/// ended; `main_sp` is the stack pointer of the thread's own stack.
///
/// # Safety
/// `stack` is the used part of a suspended stack that is in place, or empty.
pub(super) unsafe fn take(
    py: Python<'_>,
    search: &Search,
    taken: &mut Option<Box<Taken>>,
    stack: &Range<usize>,
    main_sp: usize,
) {
    let mut words = Vec::new();
    for word in taken.take().map_or_else(Vec::new, |taken| taken.0) {
        // SAFETY: this thread has found the variable, and `before` was read from it.
        let value = unsafe {
            let value = word.place.read();
            word.place.write(word.before);
            value
        };
        if stack.contains(&value) {
            words.push(Word { value, ..word });
        }
    }
    if !stack.is_empty() && search.is_needed(py) {
        let mut variables = search.variables.borrow_mut();
        variables.refresh(search.with_keys.get());
        for (place, value) in variables.pointing_into(stack) {
            // SAFETY: the stack is suspended in place. `put_back` restores the value before the coro runs again.
            let before = unsafe {
                let before = end_of_list(value, stack, main_sp);
                place.write(before);
                before
            };
            words.push(Word { place, value, before });
        }
    }
    if !words.is_empty() {
        *taken = Some(Box::new(Taken(words)));
    }
}

/// Sets the variables to the values that the coro left in them. Called when the coro is about to run.
///
/// # Safety
/// The coro's stack is in place.
#[cold]
#[inline(never)]
pub(super) unsafe fn put_back(taken: &mut Taken) {
    for word in &mut taken.0 {
        // SAFETY: this thread has found the variable, and the value points into the stack that is in place again.
        unsafe {
            word.before = word.place.read();
            word.place.write(word.value);
        }
    }
}

/// Follows a list whose items are in `stack`; the first word of each points to the next item. Returns the first item on
/// the thread's own stack, or 0.
///
/// # Safety
/// `stack` is mapped.
unsafe fn end_of_list(mut item: usize, stack: &Range<usize>, own_sp: usize) -> usize {
    for _ in 0..MAX_ITEMS {
        if !stack.contains(&item) {
            break;
        }
        if !item.is_multiple_of(size_of::<usize>()) {
            return 0;
        }
        // SAFETY: inside the stack (contract), whose end is a multiple of a word.
        item = unsafe { *(item as *const usize) };
    }
    if (own_sp..own_sp + OWN_STACK_LEN).contains(&item) && !stack.contains(&item) {
        item
    } else {
        0
    }
}
