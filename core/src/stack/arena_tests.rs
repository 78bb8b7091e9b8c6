//! Tests of arenas with both kinds of guards, with simulated limits of mappings, and with a fault in a child process.

use std::process::Command;
use std::sync::atomic::AtomicUsize;

use super::*;
use crate::sys::faults::FaultMessage;

/// The environment variable that tells a child process where to fault: the kind of guard, and "first" or "last" for the
/// byte of the guard.
const CHILD: &str = "GRAPESHOT_TEST_GUARD";
const MARKS: &str = "marks";
const MAPPINGS: &str = "mappings";

static UNLIMITED: Budget = Budget::new(|| None);

unsafe fn say_number(owner: *const c_void, message: &mut FaultMessage) {
    message.push_str("stack ");
    message.push_number(owner.addr() as u64);
}

/// The kinds of guards that this system has: true for marks, false for mappings.
fn kinds() -> impl Iterator<Item = bool> {
    [true, false]
        .into_iter()
        .filter(|has_marks| !has_marks || pages::has_guards())
}

fn arenas(has_marks: bool, budget: &'static Budget) -> Arenas {
    Arenas::with(8 * MIB, say_number, has_marks, budget)
}

fn write(address: usize, value: u8) {
    // SAFETY: the address is in a stack of this test, or the test expects the fault.
    unsafe { (address as *mut u8).write_volatile(value) };
}

fn read(address: usize) -> u8 {
    // SAFETY: as in `write`.
    unsafe { (address as *const u8).read_volatile() }
}

/// How many pages of the range have physical memory.
fn resident_pages(start: usize, end: usize) -> usize {
    let page = pages::page_len();
    let mut residency = vec![0_u8; (end - start).div_ceil(page)];
    // SAFETY: the range is whole pages of an arena of this test, and the vector has a byte for each.
    let outcome = unsafe {
        libc::mincore(
            start as *mut libc::c_void,
            end - start,
            residency.as_mut_ptr().cast(),
        )
    };
    assert_eq!(outcome, 0);
    residency.iter().filter(|page| **page & 1 != 0).count()
}

#[test]
fn stacks_do_not_overlap() {
    for has_marks in kinds() {
        let arenas = arenas(has_marks, &UNLIMITED);
        let stacks: Vec<Lease> = (0..300).map(|_| arenas.take().unwrap()).collect();
        for (number, stack) in stacks.iter().enumerate() {
            assert!((8 * MIB..9 * MIB).contains(&(stack.top() - stack.base())));
            assert_eq!(stack.top() % LINE_LEN, 0);
            write(stack.top() - 1, number as u8);
            write(stack.base(), number as u8);
        }
        for (number, stack) in stacks.iter().enumerate() {
            assert_eq!(
                (read(stack.top() - 1), read(stack.base())),
                (number as u8, number as u8)
            );
        }
        let mut ends: Vec<(usize, usize)> = stacks
            .iter()
            .map(|stack| (stack.base() - GUARD_LEN, stack.top()))
            .collect();
        ends.sort_unstable();
        assert!(ends.windows(2).all(|pair| pair[0].1 <= pair[1].0));
        // The used end of a stack and the guard above it are in the same page table.
        let shares_table = |pair: &[(usize, usize)]| (pair[0].1 - 1) / TABLE_LEN == pair[1].0 / TABLE_LEN;
        assert!(ends.windows(2).filter(|pair| shares_table(pair)).count() > 250);
    }
}

#[test]
fn marks_split_no_mapping() {
    if !pages::has_guards() {
        return; // not Linux, or an older kernel
    }
    let mappings = |start: usize, end: usize| {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let overlaps = |line: &&str| {
            let (first, behind) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
            let [first, behind] = [first, behind].map(|text| usize::from_str_radix(text, 16).unwrap());
            first < end && start < behind
        };
        maps.lines().filter(overlaps).count()
    };
    let arenas = arenas(true, &UNLIMITED);
    let stacks: Vec<Lease> = (0..300).map(|_| arenas.take().unwrap()).collect();
    let state = arenas.inner.state.borrow();
    let mut counts = [0; 2];
    for arena in state.arenas.iter().flatten() {
        let is_partial = arena.opened < arena.capacity;
        counts[usize::from(is_partial)] += 1;
        let end = arena.start + arena.capacity * arenas.inner.stride;
        assert_eq!(mappings(arena.start, end), 1 + usize::from(is_partial));
    }
    assert!(counts[0] > 1 && counts[1] == 1, "{counts:?}");
    drop((state, stacks));
}

#[test]
fn a_stack_is_used_again_and_keeps_little_memory() {
    for has_marks in kinds() {
        let arenas = arenas(has_marks, &UNLIMITED);
        let first = arenas.take().unwrap();
        let (base, top) = (first.base(), first.top());
        for address in (base..top).step_by(pages::page_len()) {
            write(address, 7);
        }
        write(top - 1, 7);
        drop(first);
        let end = top.next_multiple_of(pages::page_len());
        assert!(resident_pages(base, end) <= WARM_LEN / pages::page_len() + 1);
        let again = arenas.take().unwrap();
        assert_eq!((again.base(), again.top()), (base, top));
        assert_eq!((read(base), read(top - 1)), (0, 7));
    }
}

#[test]
fn free_stacks_beyond_a_number_keep_no_memory_and_empty_arenas_are_unmapped() {
    static BUDGET: Budget = Budget::new(|| None);
    for has_marks in kinds() {
        let arenas = arenas(has_marks, &BUDGET);
        let stacks: Vec<Lease> = (0..2 * KEPT_STACKS).map(|_| arenas.take().unwrap()).collect();
        let [first, last] = [0, stacks.len() - 1].map(|number| (stacks[number].base(), stacks[number].top()));
        for stack in &stacks {
            write(stack.top() - 1, 7);
        }
        let most = BUDGET.taken();
        if has_marks {
            assert!(most < stacks.len() / 16);
        }
        // The last stack is kept, so that its arena stays.
        let mut stacks = stacks.into_iter().rev();
        let kept = stacks.next();
        let mut stacks: Vec<Lease> = stacks.collect();
        while let Some(stack) = stacks.pop() {
            drop(stack);
        }
        let state = arenas.inner.state.borrow();
        assert_eq!(state.warm, KEPT_STACKS);
        assert!((KEPT_STACKS..KEPT_STACKS + MAX_STACKS).contains(&state.free));
        assert!(state.capacity <= state.free + 2 * MAX_STACKS);
        assert!(BUDGET.taken() < most);
        drop(state);
        assert_eq!((read(first.1 - 1), read(last.1 - 1)), (7, 7));
        // The stack below the last one is free, and must have given its memory back.
        let page = last.1.next_multiple_of(pages::page_len());
        assert_eq!(resident_pages(last.0 - 2 * MIB, last.0 - GUARD_LEN), 0);
        assert!(resident_pages(last.0, page) >= 1);
        drop(kept);
        assert!(arenas.inner.state.borrow().capacity < KEPT_STACKS + 2 * MAX_STACKS);
        drop(arenas);
        assert_eq!(BUDGET.taken(), 0);
    }
}

#[test]
fn at_the_limit_of_mappings_take_fails_and_existing_stacks_stay() {
    static BUDGET: Budget = Budget::new(|| {
        Some(MappingUsage {
            count: 100 + BUDGET.taken(),
            limit: 512,
        })
    });
    let arenas = arenas(false, &BUDGET);
    let mut stacks = Vec::new();
    let error = loop {
        match arenas.take() {
            Ok(stack) => stacks.push(stack),
            Err(error) => break error,
        }
        assert!(stacks.len() < 512);
    };
    assert!(matches!(error, StackError::Mappings(_)), "{error:?}");
    assert!(error.to_string().contains("vm.max_map_count"), "{error}");
    // 396 mappings are neither in use nor reserved, and each stack takes two.
    assert!((150..198).contains(&stacks.len()), "{}", stacks.len());
    assert!(BUDGET.taken() <= 396);
    for stack in &stacks {
        write(stack.base(), 7);
        write(stack.top() - 1, 7);
    }
    assert!(arenas.promise().is_err());
    stacks.truncate(stacks.len() - 2);
    // One of the two free stacks is promised, so `take` cannot have it.
    arenas.promise().unwrap();
    let last = arenas.take().unwrap();
    assert!(arenas.take().is_err());
    let promised = arenas.take_promised().unwrap();
    drop(last);
    arenas.promise().unwrap();
    assert!(arenas.take().is_err());
    arenas.forgo();
    assert!(arenas.take().is_ok());
    drop((stacks, promised, arenas));
    assert_eq!(BUDGET.taken(), 0);
}

#[test]
fn the_reason_of_a_refusal_is_found() {
    static USED: AtomicUsize = AtomicUsize::new(0);
    static BUDGET: Budget = Budget::new(|| {
        Some(MappingUsage {
            count: USED.load(std::sync::atomic::Ordering::Relaxed),
            limit: 65_530,
        })
    });
    let refused = || StackError::Memory(io::Error::from_raw_os_error(libc::ENOMEM));
    let inner = &arenas(false, &BUDGET).inner;
    let memory = inner.explain(refused());
    assert!(matches!(memory, StackError::Memory(_)));
    assert!(memory.to_string().contains("RLIMIT_AS"), "{memory}");
    USED.store(65_529, std::sync::atomic::Ordering::Relaxed);
    let mappings = inner.explain(refused()).to_string();
    assert_eq!(
        mappings,
        "the process has 65529 memory mappings, and the kernel's limit vm.max_map_count is 65530"
    );
}

#[test]
fn more_addresses_than_the_system_has_are_an_error() {
    let arenas = Arenas::with(1 << 50, say_number, false, &UNLIMITED);
    assert!(matches!(arenas.take(), Err(StackError::Memory(_))));
    assert!(arenas.inner.state.borrow().arenas.is_empty());
}

#[test]
fn stacks_keep_their_arena_alive() {
    static BUDGET: Budget = Budget::new(|| None);
    let stack = arenas(true, &BUDGET).take().unwrap();
    write(stack.top() - 1, 7);
    assert!(BUDGET.taken() > 0);
    drop(stack);
    assert_eq!(BUDGET.taken(), 0);
}

/// Not a test by itself: the next test runs this in a child process.
#[test]
fn touch_a_guard() {
    let Ok(kind) = std::env::var(CHILD) else {
        return;
    };
    let arenas = arenas(kind.starts_with(MARKS), &UNLIMITED);
    let stacks: Vec<Lease> = (0..20).map(|_| arenas.take().unwrap()).collect();
    for (number, stack) in stacks.iter().enumerate() {
        stack.set_owner(std::ptr::without_provenance(number + 1));
        write(stack.base(), 1);
    }
    let stack = &stacks[14];
    let (first, last) = (stack.base() - GUARD_LEN, stack.base() - 1);
    write(if kind.ends_with("first") { first } else { last }, 1);
}

#[test]
fn a_fault_in_a_guard_tells_whose_stack_it_was() {
    use std::os::unix::process::ExitStatusExt;

    for kind in kinds().map(|has_marks| if has_marks { MARKS } else { MAPPINGS }) {
        for end in ["first", "last"] {
            let done = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "stack::arena::tests::touch_a_guard", "--nocapture"])
                .env(CHILD, format!("{kind} {end}"))
                .output()
                .unwrap();
            let told = String::from_utf8_lossy(&done.stderr);
            assert!(told.contains("stack 15\n"), "{kind} {end}: {told}");
            let signal = done.status.signal();
            assert!(
                signal == Some(libc::SIGSEGV) || signal == Some(libc::SIGBUS),
                "{signal:?}"
            );
        }
    }
}
