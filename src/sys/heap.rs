//! The C allocator's treatment of large blocks.
//!
//! glibc maps blocks above a threshold (128 KiB at first) one by one and gives free memory at the heap's end back to
//! the kernel, so that a service which receives 100 KiB at a time may fault in all its pages anew for each message,
//! or not, depending on what else was freed before (measured: 5 against 25 us per message). Both thresholds rise
//! to the size of the largest mapped block that was ever freed (mallopt(3), "dynamic mmap threshold").
//!
//! Any thread may call this. It must not know what the blocks are for.

use std::sync::Once;

/// Twice the largest object that is received at once, so that such objects stay well below the threshold.
#[cfg(target_env = "gnu")]
const LARGEST_LEN: usize = 512 * 1024;

static KEPT: Once = Once::new();

/// Makes the allocator keep blocks of up to 512 KiB for reuse. Does its work once per process.
pub fn keep_large_blocks() {
    KEPT.call_once(raise_thresholds);
}

#[cfg(target_env = "gnu")]
fn raise_thresholds() {
    // SAFETY: a block is allocated and freed; free(3) takes null too. The compiler must not see that nothing happens
    // to the block in between, or it would leave both calls out.
    unsafe { libc::free(std::hint::black_box(libc::malloc(LARGEST_LEN))) };
}

#[cfg(not(target_env = "gnu"))]
fn raise_thresholds() {}
