//! Checks the sizes that are proposed for the next read. If a size is proposed after a read, it must exceed the length
//! of that read by 1 to 4096 bytes.
#![no_main]

use grapeshot_core::queue::read_size::ReadSize;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|reads: Vec<(u32, Option<u32>, u8)>| {
    let size = ReadSize::new();
    for (len_bytes, capacity, times) in reads {
        let len_bytes = len_bytes as usize % (1 << 20);
        for _ in 0..times {
            let proposed = size.capacity();
            assert!(proposed == 0 || (8 << 10..=256 << 10).contains(&proposed));
            assert_eq!(proposed % 4096, 0);
            assert!(proposed == 0 || size.suits(proposed));
            let capacity = match capacity {
                _ if proposed > 0 => proposed,
                Some(capacity) => capacity as usize,
                None => 1 << 18,
            };
            size.note(len_bytes.min(capacity), capacity);
            if size.capacity() > 0 {
                assert!(len_bytes < size.capacity() && size.capacity() - len_bytes <= 4096);
            }
        }
    }
    size.reset();
    assert_eq!(size.capacity(), 0);
    assert!(!size.suits(8 << 10));
});
