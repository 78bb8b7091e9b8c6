//! Lets a C compiler compare our offsets in the interpreter's structures with the interpreter's headers.
//!
//! The tables of offsets in `src/coro/pystate` are modules of this script, too. Each row (`pystate/mod.rs` explains the
//! notation) becomes static assertions about the offset and the size of a field, or about the size of a structure. If
//! there are no headers or no compiler, or if the build is for another machine, the build prints a warning, and the
//! offsets are checked only at import (`pystate/check.rs`).
//!
//! This script calls the compiler directly, because checking a single file does not need a crate such as `cc`.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use pyo3_build_config::InterpreterConfig;

/// A row of a table of offsets.
struct Row {
    name: &'static str,
    /// None if this version does not have the field.
    value: Option<usize>,
    place: Option<Place>,
}

/// What a row describes.
enum Place {
    /// A field: its C type, its structure, and its name in that structure.
    Field(&'static str, &'static str, &'static str),
    /// A whole structure.
    Whole(&'static str),
}

macro_rules! offsets {
    ($(
        $name:ident: $kind:ty = $value:expr
        $(=> $c_type:literal $owner:ident . $field:ident $(. $inner:ident)*)?
        $(=> sizeof($whole:ident))?
    ;)*) => {
        pub(super) fn rows() -> Vec<super::Row> {
            vec![$(super::Row {
                name: stringify!($name),
                value: <$kind as Into<Option<usize>>>::into($value),
                place: None
                    $(.or(Some(super::Place::Field(
                        $c_type,
                        stringify!($owner),
                        concat!(stringify!($field) $(, ".", stringify!($inner))*),
                    ))))?
                    $(.or(Some(super::Place::Whole(stringify!($whole)))))?,
            }),*]
        }
    };
}

#[path = "src/coro/pystate/common_offsets.rs"]
mod common;
#[path = "src/coro/pystate/v311_offsets.rs"]
mod v311;
#[path = "src/coro/pystate/v312_offsets.rs"]
mod v312;
#[path = "src/coro/pystate/v313_offsets.rs"]
mod v313;
#[path = "src/coro/pystate/v314_offsets.rs"]
mod v314;
#[path = "src/coro/pystate/v314t_offsets.rs"]
mod v314t;
#[path = "src/coro/pystate/v315_offsets.rs"]
mod v315;
#[path = "src/coro/pystate/v315t_offsets.rs"]
mod v315t;

const FOLDER: &str = "src/coro/pystate";
const HEADERS: &str = "#define Py_BUILD_CORE 1
#include <stddef.h>
#include <Python.h>
#include <internal/pycore_frame.h>
#if PY_VERSION_HEX >= 0x030E0000
#include <internal/pycore_interpframe_structs.h>
#include <internal/pycore_tstate.h>
#endif
";
/// A Python script that prints the folders of headers, one per line, and then the compiler that the interpreter was
/// built with.
const QUESTION: &str = "
import sysconfig
print(sysconfig.get_path('include'))
print(sysconfig.get_path('platinclude'))
print(sysconfig.get_config_var('CC') or '')
";

/// Err, with one line for each wrong offset or size, if a table does not fit the headers.
pub fn check() -> Result<(), String> {
    println!("cargo::rerun-if-changed=build_offsets.rs");
    println!("cargo::rerun-if-changed={FOLDER}");
    println!("cargo::rerun-if-env-changed=CC");
    println!("cargo::rerun-if-env-changed=PYO3_PYTHON");
    let config = pyo3_build_config::get();
    let version = config.version();
    let rows = match (version.major, version.minor, config.is_free_threaded()) {
        (3, 11, false) => v311::rows(),
        (3, 12, false) => v312::rows(),
        (3, 13, false) => v313::rows(),
        (3, 14, false) => v314::rows(),
        (3, 14, true) => v314t::rows(),
        (3, 15, false) => v315::rows(),
        (3, 15, true) => v315t::rows(),
        _ => return Ok(()), // this build uses `pystate/none.rs`, with which `coro` refuses to be imported
    };
    let flag = if config.is_free_threaded() { "t" } else { "" };
    let file = format!("{FOLDER}/v{}{}{flag}_offsets.rs", version.major, version.minor);
    let mut text = HEADERS.to_owned();
    for row in common::rows().iter().chain(&rows) {
        text += &assertions(row).map_err(|error| format!("{file}: {error}"))?;
    }
    match Compiler::find(config).and_then(|compiler| compiler.read(HEADERS).map(|()| compiler)) {
        Ok(compiler) => compiler.read(&text).map_err(|output| {
            format!(
                "{file} does not fit the headers of Python {}.{}:\n{output}",
                version.major, version.minor
            )
        }),
        Err(reason) => {
            let reason = reason.lines().next().unwrap_or_default();
            println!(
                "cargo::warning=the offsets in {file} were not compared with Python's headers: {reason}"
            );
            Ok(())
        }
    }
}

/// The static assertions of a row. Err if the row has a value but names neither a field nor a structure, or if it names
/// one of them but has no value.
fn assertions(row: &Row) -> Result<String, String> {
    let name = row.name;
    match (row.value, &row.place) {
        (None, None) => Ok(String::new()),
        (Some(value), Some(Place::Whole(owner))) => Ok(format!(
            "_Static_assert(sizeof({owner}) == {value}, \"{name}: sizeof({owner}) is not {value}\");\n"
        )),
        (Some(value), Some(Place::Field(c_type, owner, path))) => Ok(format!(
            "_Static_assert(offsetof({owner}, {path}) == {value}, \"{name}: {owner}.{path} is not at {value}\");\n\
             _Static_assert(sizeof((({owner} *)0)->{path}) == sizeof({c_type}), \"{name}: {owner}.{path} is not a {c_type}\");\n"
        )),
        _ => Err(format!("{name} needs both a value and a field, or neither")),
    }
}

struct Compiler {
    command: Vec<String>,
    folders: Vec<String>,
    file: PathBuf,
}

impl Compiler {
    /// Err with the reason why the headers cannot be read.
    fn find(config: &InterpreterConfig) -> Result<Self, String> {
        let variable = |name| env::var(name).map_err(|_| format!("no {name}"));
        if variable("HOST")? != variable("TARGET")? {
            return Err("the build is for another machine".to_owned());
        }
        let answer = config
            .run_python_script(QUESTION)
            .map_err(|error| error.to_string())?;
        let mut lines: Vec<String> = answer.lines().map(str::to_owned).collect();
        let built_with = lines.pop().unwrap_or_default();
        let command = [variable("CC").ok(), Some("cc".to_owned()), Some(built_with)]
            .into_iter()
            .flatten()
            .map(|command| command.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
            .find(|command| {
                command
                    .first()
                    .is_some_and(|program| Command::new(program).arg("--version").output().is_ok())
            })
            .ok_or("there is no C compiler")?;
        Ok(Self {
            command,
            folders: lines,
            file: PathBuf::from(variable("OUT_DIR")?).join("offsets.c"),
        })
    }

    /// Lets the compiler check `text` without generating code. Err with the compiler's errors, one per line.
    fn read(&self, text: &str) -> Result<(), String> {
        fs::write(&self.file, text).map_err(|error| error.to_string())?;
        let mut command = Command::new(&self.command[0]);
        command
            .args(&self.command[1..])
            .args(["-fsyntax-only", "-w", "-x", "c"]);
        for folder in &self.folders {
            command
                .arg("-I")
                .arg(folder)
                .arg("-I")
                .arg(Path::new(folder).join("internal"));
        }
        let output = command
            .arg(&self.file)
            .output()
            .map_err(|error| error.to_string())?;
        if output.status.success() {
            return Ok(());
        }
        let errors = String::from_utf8_lossy(&output.stderr);
        let lines: Vec<&str> = errors.lines().filter(|line| line.contains("error: ")).collect();
        Err(if lines.is_empty() {
            errors.into_owned()
        } else {
            lines.join("\n")
        })
    }
}
