//! Reports a stack overflow: when an access hits the guard below a stack, the process writes a message about the owner
//! of the stack before it dies.
//!
//! ```text
//!   SIGSEGV, SIGBUS --> on_fault, on the thread's alternate stack
//!                         address in a watched guard?  -- yes -->  one line to stderr, about the stack's owner
//!                         then the handler that was there before (faulthandler's), or the default action
//! ```
//!
//! The handlers are installed once per process, with the first watched guard. A thread that runs on guarded stacks
//! needs an [`AlternateStack`], because the stack that it runs on has no space left when the handler is called.
//!
//! Any thread may use this module. The handler takes no lock and does not allocate.
//!
//! Source: `sigaction(2)`, `sigaltstack(2)`, `signal-safety(7)`; CPython's `Modules/faulthandler.c`, whose handler
//! reinstalls the one that was there before it and raises the signal again.

use std::ffi::{c_int, c_void};
use std::io;
use std::mem::{self, MaybeUninit};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Mutex, Once, PoisonError};

use super::pages;

/// Writes a description of a stack's owner into the message. It is called in a signal handler, so it may do nothing
/// but read memory and write to the message.
pub type Describe = unsafe fn(owner: *const c_void, message: &mut FaultMessage);

/// The length of an alternate stack. It is enough for faulthandler's report, which runs on the same stack.
const ALTERNATE_LEN: usize = 64 * 1024;

/// On x86-64, code may use this many bytes below the stack pointer (elsewhere fewer). So when an access hits the guard,
/// the stack pointer may still be up to this far above the guard.
const RED_ZONE_LEN: usize = 128;

const SIGNALS: [c_int; 2] = [libc::SIGSEGV, libc::SIGBUS];

/// The most stacks that one [`Guards`] may have.
pub const MAX_STACKS: usize = 128;

/// The addresses of the guards below some stacks. There is one guard for each stack, and the distance from each to the
/// next is the same.
#[derive(Clone, Copy)]
pub struct Guards {
    /// The first address of the first guard.
    pub start: usize,
    /// The distance from the start of one guard to the start of the next.
    pub stride: usize,
    /// The length of a guard. The stack is above it.
    pub len_bytes: usize,
    /// The number of guards, at most `MAX_STACKS`.
    pub count: usize,
}

/// Some guards, and the owners of the stacks above them. Entries are reused but never freed, because a handler may read
/// them at any time.
struct Entry {
    next: *const Entry,
    start: AtomicUsize,
    stride: AtomicUsize,
    len_bytes: AtomicUsize,
    /// 0 while the entry is free.
    count: AtomicUsize,
    owners: [AtomicPtr<c_void>; MAX_STACKS],
    describe: AtomicPtr<c_void>,
}

/// The head of the list of all entries that were ever made.
static ENTRIES: AtomicPtr<Entry> = AtomicPtr::new(ptr::null_mut());
/// The addresses of the free entries. The handler does not use this list.
static FREE: Mutex<Vec<usize>> = Mutex::new(Vec::new());

/// Watches some guards for as long as it lives.
pub struct WatchedGuards {
    entry: *const Entry,
}

impl WatchedGuards {
    /// Watches `guards`. At a fault in one of them the handler calls `describe(owner, ...)`, if the stack has an owner.
    pub fn new(guards: Guards, describe: Describe) -> Self {
        install();
        debug_assert!(guards.count <= MAX_STACKS);
        let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
        let entry: *const Entry = if let Some(address) = free.pop() {
            ptr::with_exposed_provenance(address)
        } else {
            let entry = Box::into_raw(Box::new(Entry {
                next: ENTRIES.load(Ordering::Acquire),
                start: AtomicUsize::new(0),
                stride: AtomicUsize::new(1),
                len_bytes: AtomicUsize::new(0),
                count: AtomicUsize::new(0),
                owners: [const { AtomicPtr::new(ptr::null_mut()) }; MAX_STACKS],
                describe: AtomicPtr::new(ptr::null_mut()),
            }));
            // The lock is held, so no other thread changes the head.
            ENTRIES.store(entry, Ordering::Release);
            entry
        };
        drop(free);
        // SAFETY: entries are never freed.
        let fields = unsafe { &*entry };
        fields.describe.store(describe as *mut c_void, Ordering::Release);
        fields.start.store(guards.start, Ordering::Release);
        fields.stride.store(guards.stride.max(1), Ordering::Release);
        fields.len_bytes.store(guards.len_bytes, Ordering::Release);
        fields
            .count
            .store(guards.count.min(MAX_STACKS), Ordering::Release);
        Self { entry }
    }

    /// Sets the owner of the stack above the guard with this index. A null pointer removes the owner. An owner must
    /// stay at its address as long as it is set.
    #[inline]
    pub fn set_owner(&self, index: usize, owner: *const c_void) {
        // SAFETY: entries are never freed.
        let owners = unsafe { &(*self.entry).owners };
        if let Some(place) = owners.get(index) {
            place.store(owner.cast_mut(), Ordering::Release);
        }
    }
}

impl Drop for WatchedGuards {
    fn drop(&mut self) {
        // SAFETY: entries are never freed.
        let fields = unsafe { &*self.entry };
        fields.count.store(0, Ordering::Release);
        for owner in &fields.owners {
            owner.store(ptr::null_mut(), Ordering::Release);
        }
        let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
        free.push(self.entry.expose_provenance());
    }
}

/// A line of text in a fixed buffer, so that it can be built without allocating. Text that does not fit is left out.
pub struct FaultMessage {
    bytes: [u8; 512],
    len: usize,
}

impl FaultMessage {
    const fn new() -> Self {
        Self {
            bytes: [0; 512],
            len: 0,
        }
    }

    /// Appends as much of `text` as fits.
    pub fn push_str(&mut self, text: &str) {
        for byte in text.bytes() {
            // One byte is reserved for the end of the line.
            if self.len + 1 < self.bytes.len() {
                self.bytes[self.len] = byte;
                self.len += 1;
            }
        }
    }

    /// Appends one character. A question mark takes the place of control characters, and of code points that are not
    /// characters (surrogates).
    pub fn push_code_point(&mut self, code_point: u32) {
        let mut bytes = [0; 4];
        let character = char::from_u32(code_point).filter(|character| !character.is_control());
        let text = character.unwrap_or('?').encode_utf8(&mut bytes);
        if self.len + text.len() < self.bytes.len() {
            self.push_str(text);
        }
    }

    /// Appends a number in decimal digits.
    pub fn push_number(&mut self, mut number: u64) {
        let mut digits = [0; 20];
        let mut start = digits.len();
        loop {
            start -= 1;
            digits[start] = b'0' + (number % 10) as u8;
            number /= 10;
            if number == 0 {
                break;
            }
        }
        for digit in &digits[start..] {
            self.push_code_point(u32::from(*digit));
        }
    }

    fn write(&mut self) {
        self.bytes[self.len] = b'\n';
        // SAFETY: the bytes belong to this message. If stderr does not accept them, nothing can be done about it.
        unsafe { libc::write(libc::STDERR_FILENO, self.bytes.as_ptr().cast(), self.len + 1) };
    }
}

// ---- the handlers ----------------------------------------------------------------------------------------------

/// The signal actions that were installed before this module's, in the order of `SIGNALS`.
struct Previous([MaybeUninit<libc::sigaction>; SIGNALS.len()]);

static PREVIOUS: AtomicPtr<Previous> = AtomicPtr::new(ptr::null_mut());

fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let mut previous = Box::new(Previous([const { MaybeUninit::uninit() }; SIGNALS.len()]));
        // SAFETY: plain system calls on live structures. The handlers are installed only after `PREVIOUS` has the old
        // actions.
        unsafe {
            let mut is_known = true;
            for (signal, place) in SIGNALS.into_iter().zip(&mut previous.0) {
                is_known &= libc::sigaction(signal, ptr::null(), place.as_mut_ptr()) == 0;
            }
            if !is_known {
                return;
            }
            PREVIOUS.store(Box::into_raw(previous), Ordering::Release);
            let mut action: libc::sigaction = mem::zeroed();
            action.sa_sigaction = on_fault as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigemptyset(&raw mut action.sa_mask);
            for signal in SIGNALS {
                // If the system refuses this, the process dies without the message.
                libc::sigaction(signal, &raw const action, ptr::null_mut());
            }
        }
    });
}

unsafe extern "C" fn on_fault(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes valid pointers to both structures, and entries are never freed.
    unsafe {
        // `si_code` is positive for a fault, but not for a signal that a process has sent (kill, raise).
        let is_sent = (*info).si_code <= 0;
        let context_of = &mut *context.cast::<libc::ucontext_t>();
        if is_sent && interrupts_handler(context_of) {
            // faulthandler was enabled after this handler was installed, so its handler ran first. It has written its
            // report and raised the signal again, and that signal has no fault address. So this handler raises the
            // signal once more, and blocks it until faulthandler's handler has returned. The signal then interrupts the
            // code that caused the fault, and the interrupted stack pointer is the same as at the fault.
            libc::sigaddset(&raw mut context_of.uc_sigmask, signal);
            libc::raise(signal);
            return;
        }
        if !is_sent {
            report((*info).si_addr() as usize);
        } else if let Some(sp) = interrupted_sp(context_of) {
            report(sp);
        }
        pass_on(signal, info, context, is_sent);
    }
}

/// Whether the signal came while another handler ran on the alternate stack.
fn interrupts_handler(context: &libc::ucontext_t) -> bool {
    let stack = &context.uc_stack;
    let start = stack.ss_sp as usize;
    stack.ss_flags & libc::SS_DISABLE == 0
        && interrupted_sp(context).is_some_and(|sp| (start..start + stack.ss_size).contains(&sp))
}

/// The stack pointer at the interruption, or `None` on systems for which this code cannot read it.
fn interrupted_sp(context: &libc::ucontext_t) -> Option<usize> {
    #[cfg(all(target_os = "linux", target_arch = "x86_64"))]
    return Some(context.uc_mcontext.gregs[libc::REG_RSP as usize] as usize);
    #[cfg(all(target_os = "linux", target_arch = "aarch64"))]
    return Some(context.uc_mcontext.sp as usize);
    #[cfg(not(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))))]
    {
        let _ = context;
        None
    }
}

/// If `address` lies in a watched guard, writes the message about the owner of its stack.
unsafe fn report(address: usize) {
    let mut entry: *const Entry = ENTRIES.load(Ordering::Acquire);
    // SAFETY: entries are never freed, and their list only grows.
    while let Some(fields) = unsafe { entry.as_ref() } {
        if let Some(owner) = owner_at(fields, address) {
            let mut message = FaultMessage::new();
            // SAFETY: `new` has stored a function of this type, and the owner lives as long as it is set.
            unsafe {
                let describe =
                    mem::transmute::<*mut c_void, Describe>(fields.describe.load(Ordering::Acquire));
                describe(owner, &mut message);
            }
            message.write();
            return;
        }
        entry = fields.next;
    }
}

/// The owner of the stack whose guard contains the address. The address may be a stack pointer that is still a little
/// above the guard: see `RED_ZONE_LEN`.
fn owner_at(entry: &Entry, address: usize) -> Option<*const c_void> {
    let count = entry.count.load(Ordering::Acquire);
    let offset = address.checked_sub(entry.start.load(Ordering::Acquire))?;
    let stride = entry.stride.load(Ordering::Acquire);
    let (index, offset) = (offset / stride, offset % stride);
    if index >= count || offset >= entry.len_bytes.load(Ordering::Acquire) + RED_ZONE_LEN {
        return None;
    }
    let owner = entry.owners.get(index)?.load(Ordering::Acquire);
    (!owner.is_null()).then_some(owner.cast_const())
}

/// Calls the handler that was installed before, or takes the default action, which ends the process.
unsafe fn pass_on(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void, is_sent: bool) {
    // SAFETY: `PREVIOUS` was stored before the handler was installed, and is never freed.
    let previous = unsafe { PREVIOUS.load(Ordering::Acquire).as_ref() };
    let index = SIGNALS.iter().position(|known| *known == signal);
    if let (Some(previous), Some(index)) = (previous, index) {
        // SAFETY: the actions were filled in before they were stored. This handler was installed for this signal, and
        // the flags of the action tell the handler's type.
        unsafe {
            let action = previous.0[index].assume_init_ref();
            let handler = action.sa_sigaction;
            if handler != libc::SIG_DFL && handler != libc::SIG_IGN {
                if action.sa_flags & libc::SA_SIGINFO != 0 {
                    mem::transmute::<usize, unsafe extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void)>(
                        handler,
                    )(signal, info, context);
                } else {
                    mem::transmute::<usize, unsafe extern "C" fn(c_int)>(handler)(signal);
                }
                return;
            }
        }
    }
    // SAFETY: plain system calls. A fault occurs again when the handler returns; a signal that was sent must be sent
    // again.
    unsafe {
        let mut action: libc::sigaction = mem::zeroed();
        action.sa_sigaction = libc::SIG_DFL;
        libc::sigaction(signal, &raw const action, ptr::null_mut());
        if is_sent {
            libc::raise(signal);
        }
    }
}

// ---- the stack that handlers run on ----------------------------------------------------------------------------

/// A stack for the signal handlers of one thread. The handlers run on it until this value is dropped, which must happen
/// on the same thread.
pub struct AlternateStack {
    mapping: *mut c_void,
}

impl AlternateStack {
    /// Gives the calling thread an alternate stack. Returns `None` if the thread has one already.
    ///
    /// # Errors
    /// `ENOMEM` if there is no memory.
    pub fn install() -> io::Result<Option<Self>> {
        // SAFETY: plain system calls; the mapping is new and belongs to the result.
        unsafe {
            let mut present: libc::stack_t = mem::zeroed();
            if libc::sigaltstack(ptr::null(), &raw mut present) != 0 {
                return Err(io::Error::last_os_error());
            }
            if present.ss_flags & libc::SS_DISABLE == 0 {
                return Ok(None);
            }
            let mapping = libc::mmap(
                ptr::null_mut(),
                ALTERNATE_LEN,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | pages::NO_RESERVE,
                -1,
                0,
            );
            if mapping == libc::MAP_FAILED {
                return Err(io::Error::last_os_error());
            }
            let made = Self { mapping };
            let wanted = stack(mapping, 0);
            if libc::sigaltstack(&raw const wanted, ptr::null_mut()) != 0 {
                return Err(io::Error::last_os_error());
            }
            Ok(Some(made))
        }
    }
}

fn stack(mapping: *mut c_void, flags: c_int) -> libc::stack_t {
    // SAFETY: `stack_t` is plain data, and valid if all of its bytes are zero.
    let mut stack: libc::stack_t = unsafe { mem::zeroed() };
    stack.ss_sp = mapping.cast();
    stack.ss_size = ALTERNATE_LEN;
    stack.ss_flags = flags;
    stack
}

impl Drop for AlternateStack {
    fn drop(&mut self) {
        // SAFETY: plain system calls. If other code has installed another stack since, that one stays.
        unsafe {
            let mut present: libc::stack_t = mem::zeroed();
            let is_known = libc::sigaltstack(ptr::null(), &raw mut present) == 0;
            if is_known && present.ss_sp.cast::<c_void>() == self.mapping {
                let none = stack(self.mapping, libc::SS_DISABLE);
                if libc::sigaltstack(&raw const none, ptr::null_mut()) != 0 {
                    return; // the stack must stay mapped: a handler runs on it, or the system refuses to remove it
                }
            }
            libc::munmap(self.mapping, ALTERNATE_LEN);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    unsafe fn say_seven(_: *const c_void, message: &mut FaultMessage) {
        message.push_str("seven");
    }

    #[test]
    fn a_message_holds_as_much_as_fits() {
        let mut message = FaultMessage::new();
        message.push_str("n ");
        message.push_number(0);
        message.push_number(u64::MAX);
        for code_point in [0xe9, 0xd800, 0x1f347, 7] {
            message.push_code_point(code_point);
        }
        assert_eq!(
            &message.bytes[..message.len],
            "n 018446744073709551615\u{e9}?\u{1f347}?".as_bytes()
        );
        for _ in 0..1000 {
            message.push_code_point(0x1f347);
        }
        assert!(message.len < message.bytes.len() && message.len > message.bytes.len() - 5);
        assert!(std::str::from_utf8(&message.bytes[..message.len]).is_ok());
    }

    const GUARDS: Guards = Guards {
        start: 0x1000,
        stride: 0x1000,
        len_bytes: 0x100,
        count: 3,
    };

    #[test]
    fn entries_are_used_again() {
        let first = WatchedGuards::new(GUARDS, say_seven);
        let entry = first.entry;
        first.set_owner(0, ptr::without_provenance(7));
        drop(first);
        let others: Vec<WatchedGuards> = (0..3).map(|_| WatchedGuards::new(GUARDS, say_seven)).collect();
        assert!(others.iter().any(|other| other.entry == entry));
        // SAFETY: entries are never freed.
        let fields = unsafe { &*entry };
        assert_eq!(owner_at(fields, 0x1000), None);
    }

    #[test]
    fn an_address_in_a_guard_tells_the_owner() {
        let guards = WatchedGuards::new(GUARDS, say_seven);
        let [first, last] = [ptr::without_provenance(7), ptr::without_provenance(8)];
        guards.set_owner(0, first);
        guards.set_owner(2, last);
        guards.set_owner(MAX_STACKS, last); // there is no such stack
        // SAFETY: entries are never freed.
        let fields = unsafe { &*guards.entry };
        assert_eq!(owner_at(fields, 0xfff), None);
        assert_eq!(owner_at(fields, 0x1000), Some(first));
        assert_eq!(owner_at(fields, 0x10ff + RED_ZONE_LEN), Some(first));
        assert_eq!(owner_at(fields, 0x1100 + RED_ZONE_LEN), None);
        assert_eq!(owner_at(fields, 0x2000), None);
        assert_eq!(owner_at(fields, 0x3000), Some(last));
        assert_eq!(owner_at(fields, 0x4000), None);
    }

    #[test]
    fn a_thread_gets_one_alternate_stack() {
        std::thread::spawn(|| {
            let other = AlternateStack::install().unwrap();
            // On systems where Rust itself reports overflows, its threads already have an alternate stack.
            assert!(other.is_none() || AlternateStack::install().unwrap().is_none());
        })
        .join()
        .unwrap();
    }
}
