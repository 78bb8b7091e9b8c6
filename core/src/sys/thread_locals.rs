//! Finds thread-local variables of other libraries that point into a given range of addresses: variables in the
//! libraries' segments (`PT_TLS`), and values of `pthread_getspecific`. A thread can find only its own variables.
//!
//! Source: `dl_iterate_phdr(3)`, `pthread_getspecific(3)`.

use std::ffi::c_void;
use std::ops::Range;

/// Longer segments are skipped, because they contain tables. The callers search for something else: the head of a
/// linked list whose items are on a stack, such as pybind11's list of the calls that a thread is in.
const MAX_SEGMENT_LEN: usize = 4096;
/// At least this many keys are checked.
const MIN_KEYS: u32 = 32;
/// How many keys after the first free one are checked.
const MORE_KEYS: u32 = 8;

/// The place of one thread-local variable.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// A variable at this address.
    Variable(usize),
    /// The value of a key of `pthread_key_create`.
    Key(u32),
}

impl Place {
    /// Reads the variable.
    ///
    /// # Safety
    /// This thread has found the place.
    pub unsafe fn read(self) -> usize {
        // SAFETY: by the contract; libraries with such variables stay loaded. A deleted key gives null.
        unsafe {
            match self {
                Self::Variable(address) => *(address as *const usize),
                Self::Key(key) => libc::pthread_getspecific(key as libc::pthread_key_t) as usize,
            }
        }
    }

    /// Writes the variable.
    ///
    /// # Safety
    /// This thread has found the place, and the value is valid for the library that owns the variable.
    pub unsafe fn write(self, value: usize) {
        // SAFETY: by the contract. For a deleted key the call fails.
        unsafe {
            match self {
                Self::Variable(address) => *(address as *mut usize) = value,
                Self::Key(key) => {
                    libc::pthread_setspecific(key as libc::pthread_key_t, value as *const c_void);
                }
            }
        }
    }
}

/// The variables of this thread that are searched.
#[derive(Default)]
pub struct Variables {
    /// The addresses of the segments.
    segments: Vec<Range<usize>>,
    /// How many libraries the loader had loaded, and unloaded, when the segments were found.
    loaded: (u64, u64),
    /// Keys below this number are searched.
    keys: u32,
}

impl Variables {
    /// Finds the segments again if libraries were loaded or unloaded since the last call. If `with_keys` is true, the
    /// values of keys are searched too from now on.
    pub fn refresh(&mut self, with_keys: bool) {
        let loaded = imp::loaded();
        if loaded != self.loaded {
            self.loaded = loaded;
            self.segments = imp::segments(MAX_SEGMENT_LEN);
        }
        if with_keys && self.keys == 0 {
            self.keys = keys();
        }
    }

    /// The variables that contain an address in this range, with their values.
    pub fn pointing_into(&self, range: &Range<usize>) -> Vec<(Place, usize)> {
        let words = self
            .segments
            .iter()
            .flat_map(|segment| segment.clone().step_by(size_of::<usize>()));
        words
            .map(Place::Variable)
            .chain((0..self.keys).map(Place::Key))
            // SAFETY: this thread has found these places, and each word lies inside a segment that the loader reported.
            .map(|place| (place, unsafe { place.read() }))
            .filter(|(_, value)| range.contains(value))
            .collect()
    }
}

/// How many keys to check: up to the first free one, and some more.
fn keys() -> u32 {
    let mut key: libc::pthread_key_t = 0;
    // SAFETY: the key is new, and deleted at once.
    unsafe {
        if libc::pthread_key_create(&raw mut key, None) != 0 {
            return MIN_KEYS;
        }
        libc::pthread_key_delete(key);
    }
    MIN_KEYS.max(key as u32 + MORE_KEYS)
}

#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
mod imp {
    use std::ffi::{CStr, c_int, c_void};
    use std::ops::Range;

    use libc::dl_phdr_info;

    /// How many libraries were loaded, and how many unloaded.
    pub(super) fn loaded() -> (u64, u64) {
        unsafe extern "C" fn note(info: *mut dl_phdr_info, _: usize, numbers: *mut c_void) -> c_int {
            // SAFETY: `info` is the loader's structure, and `numbers` is the tuple below.
            unsafe { *numbers.cast::<(u64, u64)>() = ((*info).dlpi_adds, (*info).dlpi_subs) };
            1
        }
        let mut numbers = (0, 0);
        // SAFETY: the function keeps no pointer.
        unsafe { libc::dl_iterate_phdr(Some(note), (&raw mut numbers).cast()) };
        numbers
    }

    struct Search {
        max_len: usize,
        found: Vec<Range<usize>>,
    }

    /// This thread's segments of at most `max_len` bytes in all libraries, except those that `is_left_out` excludes.
    pub(super) fn segments(max_len: usize) -> Vec<Range<usize>> {
        let mut search = Search {
            max_len,
            found: Vec::new(),
        };
        // SAFETY: the function keeps no pointer.
        unsafe { libc::dl_iterate_phdr(Some(add_segment), (&raw mut search).cast()) };
        search.found
    }

    /// Adds the segment of one library to `search`, unless the library has none or the segment is not to be searched.
    unsafe extern "C" fn add_segment(info: *mut dl_phdr_info, _: usize, search: *mut c_void) -> c_int {
        // SAFETY: `info` is the loader's structure, valid during the call; `search` is the `Search` in `segments`.
        unsafe {
            let (info, search) = (&*info, &mut *search.cast::<Search>());
            if info.dlpi_tls_modid == 0 || info.dlpi_phdr.is_null() || is_left_out(info) {
                return 0;
            }
            let headers = std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into());
            let len = headers
                .iter()
                .find(|header| header.p_type == libc::PT_TLS)
                .map_or(0, |header| header.p_memsz as usize);
            let start = start_of(info);
            if start != 0 && len <= search.max_len {
                let end = (start + len) & !(size_of::<usize>() - 1);
                search.found.push(start.next_multiple_of(size_of::<usize>())..end);
            }
        }
        0
    }

    /// The address of this thread's segment, or 0 if it cannot be found. The loader allocates the segment if it does
    /// not exist yet.
    fn start_of(info: &dl_phdr_info) -> usize {
        type GetAddress = unsafe extern "C" fn(*const [usize; 2]) -> *mut c_void;
        if !info.dlpi_tls_data.is_null() {
            return info.dlpi_tls_data as usize;
        }
        // SAFETY: this is the function that compiled code calls to access a thread-local variable, with the module and
        // an offset ("ELF Handling For Thread-Local Storage"). The pointer is null if the function does not exist.
        unsafe {
            let function = libc::dlsym(libc::RTLD_DEFAULT, c"__tls_get_addr".as_ptr());
            if function.is_null() || cfg!(not(any(target_arch = "x86_64", target_arch = "aarch64"))) {
                return 0;
            }
            let index = [info.dlpi_tls_modid, 0];
            let get_address = std::mem::transmute::<*mut c_void, GetAddress>(function);
            get_address(&raw const index) as usize
        }
    }

    /// Whether `info` describes the program itself (which has no name), the library of the interpreter, the C library,
    /// the loader, the kernel's vDSO, or this library.
    fn is_left_out(info: &dl_phdr_info) -> bool {
        // SAFETY: the pointer is a C string or null.
        let name = unsafe {
            if info.dlpi_name.is_null() {
                return true;
            }
            CStr::from_ptr(info.dlpi_name).to_bytes()
        };
        let file = name.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
        file.is_empty()
            || [b"libpython".as_slice(), b"libc.", b"ld-", b"linux-vdso"]
                .iter()
                .any(|start| file.starts_with(start))
            || is_this_library(info)
    }

    fn is_this_library(info: &dl_phdr_info) -> bool {
        // SAFETY: the address is in this library. The structure is a local variable, for which all zeros are valid.
        unsafe {
            let mut own: libc::Dl_info = std::mem::zeroed();
            libc::dladdr(segments as *const c_void, &raw mut own) != 0
                && own.dli_fbase as u64 == info.dlpi_addr
        }
    }
}

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
mod imp {
    use std::ops::Range;

    pub(super) fn loaded() -> (u64, u64) {
        (0, 0)
    }

    pub(super) fn segments(_max_len: usize) -> Vec<Range<usize>> {
        Vec::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_keys_are_found_and_replaced() {
        let mut key: libc::pthread_key_t = 0;
        let target = [1_usize, 2, 3];
        let range = target.as_ptr() as usize..target.as_ptr() as usize + size_of_val(&target);
        // SAFETY: the key belongs to this test.
        unsafe {
            assert_eq!(libc::pthread_key_create(&raw mut key, None), 0);
            libc::pthread_setspecific(key, (&raw const target[1]).cast());
        }
        let mut variables = Variables::default();
        variables.refresh(false);
        let place = Place::Key(key as u32);
        assert!(
            !variables
                .pointing_into(&range)
                .iter()
                .any(|(found, _)| *found == place)
        );
        variables.refresh(true);
        let address = &raw const target[1] as usize;
        assert!(variables.pointing_into(&range).contains(&(place, address)));
        // SAFETY: as above.
        unsafe {
            place.write(0);
            assert_eq!(place.read(), 0);
            libc::pthread_key_delete(key);
        }
    }
}
