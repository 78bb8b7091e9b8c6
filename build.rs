//! Exposes pyo3's version and build flags (`Py_3_12`, `Py_GIL_DISABLED`, ...) to this crate's `cfg`.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    #[cfg(feature = "python")]
    pyo3_build_config::use_pyo3_cfgs();
}
