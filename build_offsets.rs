//! Offsets in the interpreter's structures, checked by a C compiler against its headers: every
//!
//! ```text
//!     const NAME: usize = 16; // int PyThreadState.tracing
//!     const NAME: Option<usize> = Some(16); // void *PyThreadState.context
//!     const NAME: usize = 24; // sizeof(_PyCFrame)
//! ```
//!
//! in `src/coro/pystate` becomes a static assertion about the offset and the size of that field. The numbers are written
//! only there. Where there are no headers or no compiler, and when the build is for another machine, a warning says so,
//! and the check at import (`pystate/check.rs`) remains.
//!
//! The compiler is called directly: it only has to read one file, which needs no crate.

use std::env;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use pyo3_build_config::InterpreterConfig;

const FOLDER: &str = "src/coro/pystate";
/// Beside the file of the version.
const COMMON: [&str; 4] = ["mod.rs", "chunk.rs", "check.rs", "code.rs"];
const HEADERS: &str = "#define Py_BUILD_CORE 1
#include <stddef.h>
#include <Python.h>
#include <internal/pycore_frame.h>
#if PY_VERSION_HEX >= 0x030E0000
#include <internal/pycore_interpframe_structs.h>
#include <internal/pycore_tstate.h>
#endif
";
/// Prints the folders of headers, one per line, then the compiler that the interpreter was built with.
const QUESTION: &str = "
import sysconfig
print(sysconfig.get_path('include'))
print(sysconfig.get_path('platinclude'))
print(sysconfig.get_config_var('CC') or '')
";

/// Err if a number is wrong, with one line per field.
pub fn check() -> Result<(), String> {
    println!("cargo::rerun-if-changed=build_offsets.rs");
    println!("cargo::rerun-if-changed={FOLDER}");
    println!("cargo::rerun-if-env-changed=CC");
    println!("cargo::rerun-if-env-changed=PYO3_PYTHON");
    let config = pyo3_build_config::get();
    let version = config.version();
    let file = format!("v{}{}.rs", version.major, version.minor);
    if config.is_free_threaded() || !Path::new(FOLDER).join(&file).exists() {
        return Ok(()); // none.rs: `coro` refuses to be imported
    }
    let assertions = assertions(&file)?;
    match Compiler::find(config).and_then(|compiler| compiler.read(HEADERS).map(|()| compiler)) {
        Ok(compiler) => compiler
            .read(&format!("{HEADERS}{assertions}"))
            .map_err(|output| {
                format!(
                    "{FOLDER}/{file} does not fit the headers of Python {}.{}:\n{output}",
                    version.major, version.minor
                )
            }),
        Err(reason) => {
            let reason = reason.lines().next().unwrap_or_default();
            println!(
                "cargo::warning=the offsets in {FOLDER}/{file} were not compared with Python's headers: {reason}"
            );
            Ok(())
        }
    }
}

/// The static assertions of the constants of this version. Err if one of its constants does not name its field.
fn assertions(file: &str) -> Result<String, String> {
    let mut text = String::new();
    for name in COMMON.into_iter().chain([file]) {
        let path = format!("{FOLDER}/{name}");
        let source = fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
        for (number, line) in source.lines().enumerate() {
            let Some((constant, value)) = constant(line) else {
                continue;
            };
            match line
                .split_once("// ")
                .and_then(|(_, field)| assertion(field, constant, value))
            {
                Some(assertion) => text.push_str(&assertion),
                None if name == file => {
                    return Err(format!(
                        "{path}:{}: {constant} does not name its field",
                        number + 1
                    ));
                }
                None => {}
            }
        }
    }
    Ok(text)
}

/// Name and number of a line that defines an offset, None for any other line, and for a field that is not there.
fn constant(line: &str) -> Option<(&str, usize)> {
    let (name, rest) = line
        .trim_start()
        .trim_start_matches("pub(super) ")
        .strip_prefix("const ")?
        .split_once(": ")?;
    let value = rest
        .strip_prefix("usize = ")
        .or_else(|| rest.strip_prefix("Option<usize> = Some("))?
        .split([';', ')'])
        .next()?;
    Some((name, value.parse().ok()?))
}

/// `field` is `type Struct.field` or `sizeof(type)`.
fn assertion(field: &str, constant: &str, value: usize) -> Option<String> {
    let mut text = String::new();
    if field.starts_with("sizeof(") && field.ends_with(')') {
        writeln!(
            text,
            "_Static_assert({field} == {value}, \"{constant}: {field} is not {value}\");"
        )
        .ok()?;
        return Some(text);
    }
    let (owner, name) = field.split_once('.')?;
    let start = owner.rfind([' ', '*'])? + 1;
    let (kind, owner) = (owner[..start].trim_end(), &owner[start..]);
    writeln!(
        text,
        "_Static_assert(offsetof({owner}, {name}) == {value}, \"{constant}: {owner}.{name} is not at {value}\");\n\
         _Static_assert(sizeof((({owner} *)0)->{name}) == sizeof({kind}), \"{constant}: {owner}.{name} is no {kind}\");"
    )
    .ok()?;
    Some(text)
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
            return Err("this is built for another machine".to_owned());
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

    /// Has `text` read and nothing generated. Err with what is wrong, one line each.
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
