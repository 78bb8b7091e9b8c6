//! Passes to the compiler the signatures of the functions and methods that `_core.pyi` declares. So each signature is
//! written only once, in the stub.
//!
//! For the method `call_at` of the class `Loop`, the environment variable `_core.Loop.call_at` has the text
//! `call_at(when, callback, *args, context=None)`: without `self` and types, with defaults as `repr()` shows them. The
//! macro `row!` reads it (`src/binding/rows.rs`). If the stub declares a function once per Python version, the last
//! declaration is used, which is for the oldest versions.
//!
//! The code below understands only the parts of Python's syntax that the stub uses. Anything else is an error that
//! names the line. A crate that parses all of Python would make every clean build longer.

use std::collections::BTreeMap;
use std::fs;

const STUB: &str = "python/grapeshot/_core.pyi";

/// A statement of the stub: one line, or several if a bracket or a string continues over the end of a line.
struct Statement<'a> {
    line: usize,
    indent: usize,
    /// Strings, words (names, keywords, numbers) and single characters, without spaces and comments.
    tokens: Vec<&'a str>,
}

/// The signatures by name (`Loop.call_at`).
type Signatures = BTreeMap<String, String>;

/// Err says which line of the stub could not be read, and why.
pub fn pass_to_compiler() -> Result<(), String> {
    println!("cargo::rerun-if-changed=build_stub.rs");
    println!("cargo::rerun-if-changed={STUB}");
    let source = fs::read_to_string(STUB).map_err(|error| format!("{STUB}: {error}"))?;
    let signatures = statements(&source)
        .and_then(signatures)
        .map_err(|(line, problem)| format!("{STUB}:{line}: {problem}"))?;
    for (name, signature) in signatures {
        println!("cargo::rustc-env=_core.{name}={signature}");
    }
    Ok(())
}

/// Splits the stub into statements. An error is the line number and a description of the problem.
fn statements(source: &str) -> Result<Vec<Statement<'_>>, (usize, String)> {
    let mut statements: Vec<Statement> = Vec::new();
    let (mut at, mut line, mut line_start) = (0, 1, 0);
    let (mut is_new, mut depth) = (true, 0);
    while at < source.len() {
        let token = first_token(&source[at..]).map_err(|problem| (line, problem))?;
        if token == "\n" {
            is_new |= depth == 0;
            line_start = at + 1;
        } else if token != " " && !token.starts_with('#') {
            if is_new {
                let (indent, tokens) = (at - line_start, Vec::new());
                statements.push(Statement { line, indent, tokens });
                is_new = false;
            }
            if let Some(statement) = statements.last_mut() {
                statement.tokens.push(token);
            }
            depth += nesting(token);
        }
        line += token.matches('\n').count();
        at += token.len();
    }
    Ok(statements)
}

fn nesting(token: &str) -> i32 {
    match token {
        "(" | "[" | "{" => 1,
        ")" | "]" | "}" => -1,
        _ => 0,
    }
}

/// The token at the start of the text: a string, a word, a comment, or a single character.
fn first_token(text: &str) -> Result<&str, String> {
    let word = text.find(|next| !is_of_word(next)).unwrap_or(text.len());
    let rest = &text[word..]; // after the prefix, if this is a string
    let len = match rest.chars().next().unwrap_or('\n') {
        quote @ ('"' | '\'') => {
            let triple = [quote; 3].iter().collect::<String>();
            let quotes = if rest.starts_with(&triple) {
                &triple
            } else {
                &triple[..1]
            };
            word + string_len(rest, quotes).ok_or("a string does not end")?
        }
        _ if word > 0 => word,
        '#' => rest.find('\n').unwrap_or(rest.len()),
        ' ' | '\n' | '(' | ')' | '[' | ']' | '{' | '}' | ':' | ',' | '.' | '=' | '*' | '/' | '|' | '-'
        | '>' | '@' => 1,
        other => return Err(format!("build_stub.rs does not know the character {other:?}")),
    };
    Ok(&text[..len])
}

fn is_of_word(next: char) -> bool {
    next.is_ascii_alphanumeric() || next == '_'
}

/// The length of the string at the start of the text, including the `quotes` on both sides. None if it does not end.
fn string_len(text: &str, quotes: &str) -> Option<usize> {
    let mut at = quotes.len();
    while !text[at..].starts_with(quotes) {
        let mut characters = text[at..].chars();
        at += match characters.next()? {
            '\\' => 1 + characters.next()?.len_utf8(),
            '\n' if quotes.len() == 1 => return None,
            other => other.len_utf8(),
        };
    }
    Some(at + quotes.len())
}

fn signatures(statements: Vec<Statement<'_>>) -> Result<Signatures, (usize, String)> {
    let mut signatures = Signatures::new();
    let (mut class, mut is_property) = ("", false);
    for Statement { line, indent, tokens } in statements {
        if indent == 0 {
            class = "";
        }
        match tokens[..] {
            ["class", name, ..] if indent == 0 => class = name,
            ["@", "property"] => is_property = true,
            ["def", ..] if is_property => is_property = false,
            ["def", name, "(", ref rest @ ..] => {
                let is_method = !class.is_empty();
                let parameters = parameters(rest, is_method).map_err(|problem| (line, problem))?;
                let path = if is_method {
                    format!("{class}.{name}")
                } else {
                    name.into()
                };
                let previous = signatures.insert(path, format!("{name}({parameters})"));
                let depends_on_version = indent > if is_method { 4 } else { 0 };
                if previous.is_some() && !depends_on_version {
                    return Err((line, format!("`{name}` is declared twice")));
                }
            }
            ["import" | "from", ..]
            | ["@", "final" | "disjoint_base"]
            | ["if", "sys", ".", "version_info", ..]
            | ["else", ":"] => {}
            // An attribute, or a docstring.
            [name, ":" | "=", _, ..] if name.chars().all(is_of_word) => {}
            [text] if text.ends_with('"') => {}
            _ => return Err((line, "build_stub.rs does not know this kind of statement".into())),
        }
    }
    Ok(signatures)
}

/// The parameters at the start of the tokens, up to the bracket that closes their list.
fn parameters(tokens: &[&str], is_method: bool) -> Result<String, String> {
    let mut depth = 0;
    let end = tokens.iter().position(|token| {
        depth += nesting(token);
        depth < 0
    });
    let list = &tokens[..end.ok_or("the list of parameters does not end")?];
    depth = 0;
    let mut parameters = list
        .split(|token| {
            depth += nesting(token);
            depth == 0 && *token == ","
        })
        .filter(|parameter| !parameter.is_empty()) // a comma at the end of the list is followed by nothing
        .map(parameter)
        .collect::<Result<Vec<_>, _>>()?;
    if is_method {
        let receiver = (!parameters.is_empty()).then(|| parameters.remove(0));
        if !matches!(receiver.as_deref(), Some("self" | "cls")) {
            return Err("the first parameter of a method must be `self` or `cls`".into());
        }
    }
    Ok(parameters.join(", "))
}

/// A parameter without its type.
fn parameter(tokens: &[&str]) -> Result<String, String> {
    let mut sides = tokens.splitn(2, |token| *token == "=");
    let declared = sides.next().unwrap_or_default();
    let name = declared
        .split(|token| *token == ":")
        .next()
        .unwrap_or_default()
        .concat();
    let stars = name.len() - name.trim_start_matches('*').len();
    if stars > 2 || (name != "/" && !name[stars..].chars().all(is_of_word)) {
        return Err(format!(
            "build_stub.rs cannot read the parameter `{}`",
            tokens.concat()
        ));
    }
    let Some(default) = sides.next() else {
        return Ok(name);
    };
    let has_spaces = default
        .windows(2)
        .any(|pair| pair.iter().all(|token| token.starts_with(is_of_word)));
    let default = default.iter().copied().map(single_quoted).collect::<String>();
    if has_spaces || default.contains(',') {
        return Err(format!(
            "the default of `{name}` must contain neither spaces nor a comma"
        ));
    }
    Ok(format!("{name}={default}"))
}

fn single_quoted(token: &str) -> String {
    if token.contains('\'') {
        token.to_owned()
    } else {
        token.replace('"', "'")
    }
}
