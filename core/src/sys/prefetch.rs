//! A hint for the processor that memory will be read soon.
//!
//! Source: `PREFETCHT0` (x86-64) and `PRFM PLDL1KEEP` (`AArch64`); both are hints, and never fault.

/// Tells the processor that the cache line at `address` will be read soon. `address` need not be valid.
#[inline]
pub fn prefetch<T>(address: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the instruction is part of every x86-64 processor, and it never faults.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(address.cast());
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: the instruction is part of every AArch64 processor, never faults, and changes no memory.
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{}]", in(reg) address, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = address;
}

#[cfg(test)]
mod tests {
    use super::prefetch;

    #[test]
    fn takes_any_address() {
        prefetch(std::ptr::null::<u8>());
        prefetch("text".as_ptr());
        prefetch(std::ptr::without_provenance::<u8>(usize::MAX));
    }
}
