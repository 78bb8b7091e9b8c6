//! Exposes pyo3's version and build flags (`Py_3_12`, `Py_GIL_DISABLED`, ...) to this crate's `cfg`. It also has the C
//! compiler compare the offsets in `src/coro/pystate` with the headers of the interpreter that this build is for.

#[path = "build_offsets.rs"]
mod offsets;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    pyo3_build_config::use_pyo3_cfgs();
    if let Err(mismatch) = offsets::check() {
        for line in mismatch.lines() {
            println!("cargo::error={line}");
        }
    }
}
