//! Sets pyo3's `cfg` flags (`Py_3_12`, `Py_GIL_DISABLED`, ...) for this crate. They tell the version and the build
//! flags of the interpreter that this build is for. This script also lets the C compiler compare the offsets in
//! `src/coro/pystate` with the headers of that interpreter, and passes the signatures in `_core.pyi` to `row!`.

#[path = "build_offsets.rs"]
mod offsets;
#[path = "build_stub.rs"]
mod stub;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    pyo3_build_config::use_pyo3_cfgs();
    for outcome in [offsets::check(), stub::pass_to_compiler()] {
        for line in outcome.err().iter().flat_map(|problem| problem.lines()) {
            println!("cargo::error={line}");
        }
    }
}
