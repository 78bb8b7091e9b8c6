//! Signatures of native functions, written as one text, such as `call_at(when, callback, *args)`.
//!
//! The text determines the function's name, the output of `help()` and `inspect.signature()`, the number of arguments
//! that a call must have, and the names of its parameters. It is parsed at compile time. Only calls that are not on
//! the fast path read the names of the parameters from it at run time. For most functions, the build script makes the
//! text from `_core.pyi` (`build_stub.rs`).

use std::ffi::CString;

use pyo3::ffi;

/// The name and the parameters of a native function.
pub(crate) struct Signature {
    name: &'static str,
    /// The text between the parentheses.
    parameters: &'static str,
    /// The number of parameters that a call must give, and can give by position.
    required: usize,
    /// True if there are only required parameters: no defaults, no keyword-only parameters, no `*args`.
    is_fixed: bool,
    /// True if a call can give by name a parameter that is not one of the `required` ones, or if there is a `**kwargs`.
    /// (Also true if a positional-only parameter has a default. A call must not give that parameter by name; the
    /// function itself refuses the name.)
    accepts_keywords: bool,
    /// The number of parameters that can be given by position.
    by_position: usize,
}

/// The object that CPython passes as the first parameter of a native function.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Receiver {
    /// A method of an object.
    Object,
    /// A function of a module. `help()` does not show the parameter.
    Module,
}

impl Signature {
    /// Parses `name(first, second=default, /, *args, keyword=default, **kwargs)`. Defaults contain no comma.
    pub(crate) const fn new(text: &'static str) -> Self {
        let bytes = text.as_bytes();
        let mut at = 0;
        while bytes[at] != b'(' {
            at += 1;
        }
        let (name, rest) = text.split_at(at);
        let (_, parameters) = rest.split_at(1);
        let (parameters, end) = parameters.split_at(parameters.len() - 1);
        assert!(
            end.as_bytes()[0] == b')',
            "a signature must end with a parenthesis"
        );
        let bytes = parameters.as_bytes();
        at = 0;
        let (mut required, mut by_position) = (0, 0);
        let (mut is_fixed, mut is_by_position, mut accepts_keywords) = (true, true, false);
        while at < bytes.len() {
            let first = bytes[at];
            is_by_position &= first != b'*';
            accepts_keywords |=
                !is_by_position && (first != b'*' || (at + 1 < bytes.len() && bytes[at + 1] == b'*'));
            let mut is_optional = first == b'*';
            while at < bytes.len() && bytes[at] != b',' {
                is_optional |= bytes[at] == b'=';
                accepts_keywords |= bytes[at] == b'=';
                at += 1;
            }
            is_fixed &= !is_optional;
            if first != b'/' && is_fixed {
                required += 1;
            }
            if first != b'/' && is_by_position {
                by_position += 1;
            }
            at += 2; // the comma and the space after it
        }
        Self {
            name,
            parameters,
            required,
            is_fixed,
            accepts_keywords,
            by_position,
        }
    }

    /// The same parameters, for a function whose name in Python is not its name in the stub.
    pub(crate) const fn shown_as(self, name: &'static str) -> Self {
        Self { name, ..self }
    }

    #[inline]
    pub(crate) fn required(&self) -> usize {
        self.required
    }

    #[inline]
    pub(crate) fn is_fixed(&self) -> bool {
        self.is_fixed
    }

    #[inline]
    pub(crate) fn accepts_keywords(&self) -> bool {
        self.accepts_keywords
    }

    #[inline]
    pub(crate) fn by_position(&self) -> usize {
        self.by_position
    }

    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    /// The names of the parameters. A positional-only parameter has an empty name.
    pub(crate) fn parameters(&self) -> Vec<&'static str> {
        let mut names = Vec::new();
        for parameter in self.parameters.split(", ") {
            match parameter {
                "/" => names.fill(""),
                "" => {}
                _ if parameter.starts_with('*') => {}
                _ => names.push(parameter.split('=').next().unwrap_or(parameter)),
            }
        }
        names
    }

    /// The row of a method table. The texts that the row points to live forever.
    pub(crate) fn row(
        &self,
        raw: ffi::PyCFunctionFastWithKeywords,
        receiver: Receiver,
        doc: &str,
    ) -> ffi::PyMethodDef {
        let (name, parameters) = (self.name, self.parameters);
        let has_slash = parameters.split(", ").any(|parameter| parameter == "/");
        let mut shown = Vec::new();
        if receiver == Receiver::Object {
            shown.push("$self");
            if !has_slash {
                shown.push("/");
            }
        }
        if !parameters.is_empty() {
            shown.push(parameters);
        }
        let doc = format!("{name}({})\n--\n\n{doc}", shown.join(", "));
        // No text of this crate contains a NUL.
        let leak = |text: &str| CString::new(text).unwrap_or_default().into_raw().cast_const();
        ffi::PyMethodDef {
            ml_name: leak(name),
            ml_meth: ffi::PyMethodDefPointer {
                PyCFunctionFastWithKeywords: raw,
            },
            ml_flags: ffi::METH_FASTCALL | ffi::METH_KEYWORDS,
            ml_doc: leak(&doc),
        }
    }
}
