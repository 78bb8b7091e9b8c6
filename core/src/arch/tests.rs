//! Tests of the switch alone: between the thread's own stack and one made of plain memory, without Python.

use std::cell::Cell;
use std::ffi::c_void;
use std::hint::black_box;

use super::{prefetch, prepare, switch};

const STACK_LEN: usize = 256 * 1024;

/// A second stack for the thread, and the stack pointer of each of the two stacks while it is suspended.
struct Pair {
    memory: Vec<u128>,
    main_sp: Cell<usize>,
    other_sp: Cell<usize>,
    log: Cell<u64>,
}

impl Pair {
    #[allow(clippy::unnecessary_box_returns)] // the new stack has a pointer to the pair, which must not move
    fn new(entry: unsafe extern "C" fn(*mut c_void) -> !) -> Box<Self> {
        let mut pair = Box::new(Self {
            memory: vec![0; STACK_LEN / 16],
            main_sp: Cell::new(0),
            other_sp: Cell::new(0),
            log: Cell::new(0),
        });
        let top = pair.memory.as_mut_ptr_range().end as usize;
        let argument = (&raw mut *pair).cast();
        // SAFETY: the memory below `top` belongs to the pair and is unused.
        pair.other_sp.set(unsafe { prepare(top, entry, argument) });
        pair
    }

    fn resume(&self) {
        // SAFETY: `other_sp` was returned by `prepare` or stored by the last switch in `back`.
        unsafe { switch(self.main_sp.as_ptr(), self.other_sp.get()) }
    }

    fn back(&self) {
        // SAFETY: `resume` stored `main_sp` when it left the thread's own stack.
        unsafe { switch(self.other_sp.as_ptr(), self.main_sp.get()) }
    }
}

unsafe extern "C" fn count(argument: *mut c_void) -> ! {
    // SAFETY: the argument is the `Pair` of the test, which outlives all switches.
    let pair = unsafe { &*argument.cast::<Pair>() };
    let mut local = 0;
    loop {
        local += 1;
        pair.log.set(local);
        pair.back();
    }
}

#[test]
fn each_side_continues_where_it_stopped() {
    let pair = Pair::new(count);
    for round in 1..=1000 {
        pair.resume();
        assert_eq!(pair.log.get(), round);
    }
}

unsafe extern "C" fn clobber(argument: *mut c_void) -> ! {
    // SAFETY: as in `count`.
    let pair = unsafe { &*argument.cast::<Pair>() };
    let mut value = 0.5_f64;
    loop {
        let words: [u64; 12] = std::array::from_fn(|index| black_box(index as u64 * 31));
        value = black_box(value) * 1.5 + words.iter().sum::<u64>() as f64;
        pair.log.set(value.to_bits());
        pair.back();
    }
}

#[test]
fn registers_of_the_caller_survive() {
    let pair = Pair::new(clobber);
    let words: [u64; 12] = std::array::from_fn(|index| black_box(index as u64 * 7 + 1));
    let floats: [f64; 12] = std::array::from_fn(|index| black_box(index as f64 + 0.25));
    let mut sum = 0.0;
    for _ in 0..100 {
        pair.resume();
        sum += words.iter().sum::<u64>() as f64 + floats.iter().sum::<f64>();
    }
    assert_eq!(
        sum,
        100.0 * (words.iter().sum::<u64>() as f64 + floats.iter().sum::<f64>())
    );
}

#[cfg(target_arch = "x86_64")]
mod control_words {
    use std::arch::asm;

    use super::*;

    fn mxcsr() -> u32 {
        let mut word = 0_u32;
        // SAFETY: stores four bytes into a local.
        unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut word, options(nostack)) };
        word
    }

    fn set_mxcsr(word: u32) {
        // SAFETY: a valid value (the default with other rounding bits). This function has no floating point operations
        // that another rounding mode could affect.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const word, options(nostack)) };
    }

    fn x87() -> u16 {
        let mut word = 0_u16;
        // SAFETY: stores two bytes into a local.
        unsafe { asm!("fnstcw [{}]", in(reg) &raw mut word, options(nostack)) };
        word
    }

    /// Checks that its stack starts with the default control words, and sets its own rounding mode to "down".
    unsafe extern "C" fn round_down(argument: *mut c_void) -> ! {
        // SAFETY: as in `count`.
        let pair = unsafe { &*argument.cast::<Pair>() };
        assert_eq!((mxcsr(), x87()), (0x1f80, 0x037f));
        set_mxcsr(0x1f80 | 0x2000);
        loop {
            pair.log.set(u64::from(mxcsr()));
            pair.back();
        }
    }

    #[test]
    fn each_side_keeps_its_control_words() {
        let pair = Pair::new(round_down);
        let own = (mxcsr(), x87());
        for _ in 0..3 {
            pair.resume();
            assert_eq!(pair.log.get(), 0x1f80 | 0x2000);
            assert_eq!((mxcsr() & !0x3f, x87()), (own.0 & !0x3f, own.1));
        }
    }
}

unsafe extern "C" fn panics(argument: *mut c_void) -> ! {
    // SAFETY: as in `count`.
    let pair = unsafe { &*argument.cast::<Pair>() };
    loop {
        let caught = std::panic::catch_unwind(|| {
            std::panic::resume_unwind(Box::new(17_u64));
        });
        let value = caught.err().and_then(|payload| payload.downcast::<u64>().ok());
        pair.log.set(value.map_or(0, |value| *value));
        pair.back();
    }
}

#[test]
fn a_panic_is_caught_on_the_other_stack() {
    let pair = Pair::new(panics);
    pair.resume();
    assert_eq!(pair.log.get(), 17);
}

unsafe extern "C" fn trace(argument: *mut c_void) -> ! {
    // SAFETY: as in `count`.
    let pair = unsafe { &*argument.cast::<Pair>() };
    let text = std::backtrace::Backtrace::force_capture().to_string();
    pair.log.set(text.len() as u64);
    pair.back();
    std::process::abort()
}

#[test]
fn the_unwind_chain_ends_at_the_start() {
    let pair = Pair::new(trace);
    pair.resume();
    assert!(pair.log.get() > 0);
}

#[test]
fn any_address_can_be_prefetched() {
    let here = 0_u8;
    for address in [
        &raw const here,
        std::ptr::null(),
        std::ptr::without_provenance(usize::MAX),
    ] {
        prefetch(address);
    }
}
