//! Rules of string literals of the sources: sentences have single blanks, and the variables of the
//! environment that programs read are in the manual.

use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Rust sources under version control with their text; `None`, with the reason printed, outside of a
/// checkout.
pub fn sources() -> Option<Vec<(String, String)>> {
    let out = Command::new("git").args(["ls-files", "-z", "*.rs"]).current_dir(root()).output();
    let Some(out) = out.ok().filter(|out| out.status.success()) else {
        println!("skipped: this is no git checkout, so there is no list of files");
        return None;
    };
    let names = String::from_utf8_lossy(&out.stdout).into_owned();
    let read = |name: &str| Some((name.to_owned(), std::fs::read_to_string(root().join(name)).ok()?));
    Some(names.split('\0').filter(|name| !name.is_empty()).filter_map(read).collect())
}

/// The string literals of a source, each with the number of its line, as the program has them but for
/// escapes.
fn literals(source: &str) -> Vec<(usize, String)> {
    let (mut found, mut rest) = (Vec::new(), source);
    let (mut counted, mut number) = (0, 1);
    let mut line = |rest: &str| {
        let at = source.len() - rest.len();
        number += source[counted..at].matches('\n').count();
        counted = at;
        number
    };
    while let Some(c) = rest.chars().next() {
        if rest.starts_with("//") {
            rest = rest.find('\n').map_or("", |end| &rest[end..]);
        } else if let Some(inner) = rest.strip_prefix("r#\"") {
            let end = inner.find("\"#").unwrap_or(inner.len());
            found.push((line(rest), inner[..end].to_owned()));
            rest = inner.get(end + 2..).unwrap_or_default();
        } else if let Some(inner) = rest.strip_prefix('"') {
            let end = end_of_literal(inner);
            found.push((line(rest), joined(&inner[..end])));
            rest = inner.get(end + 1..).unwrap_or_default();
        } else if let Some(after) = character(rest) {
            rest = after;
        } else {
            rest = &rest[c.len_utf8()..];
        }
    }
    found
}

/// The place of the quote at the end.
fn end_of_literal(inner: &str) -> usize {
    let mut escaped = false;
    let is_end = |c: char| {
        let end = c == '"' && !escaped;
        escaped = c == '\\' && !escaped;
        end
    };
    inner.find(is_end).unwrap_or(inner.len())
}

/// The text behind a character literal, which may be a quote; `None` for a lifetime and all else.
fn character(rest: &str) -> Option<&str> {
    let inner = rest.strip_prefix('\'')?;
    let value = inner.strip_prefix('\\').unwrap_or(inner);
    value[value.chars().next()?.len_utf8()..].strip_prefix('\'')
}

/// A line that ends with a backslash goes on in the next one, without the blanks that this begins with.
fn joined(literal: &str) -> String {
    let mut parts = literal.split("\\\n");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |text, part| text + part.trim_start())
}

/// Two words, several blanks and one more word: text in columns does not look like it.
fn gap(line: &str) -> Option<&str> {
    let is_word = |word: &str| {
        let letters = word.trim_matches(|c: char| ",;:.()`".contains(c));
        !letters.is_empty() && letters.chars().all(|c| c.is_ascii_lowercase() || c == '-' || c == '\'')
    };
    let mut at = 0;
    while let Some(found) = line[at..].find("  ") {
        let (before, after) = (&line[..at + found], line[at + found..].trim_start());
        let blanks = line.len() - before.len() - after.len();
        let words = before.rsplit(' ').take(3);
        let next = after.split(' ').next().unwrap_or_default();
        if before.split(' ').count() > 2 && words.into_iter().all(is_word) && is_word(next) {
            return Some(&line[before.len().saturating_sub(30)..]);
        }
        at += found + blanks;
    }
    None
}

#[test]
fn sentences_have_single_blanks() {
    let Some(sources) = sources() else { return };
    let mut wrong = Vec::new();
    let mut seen = 0;
    for (name, source) in sources.iter().filter(|(name, _)| !name.ends_with("literals.rs")) {
        for (line, text) in literals(source) {
            seen += 1;
            let gaps = text.split('\n').flat_map(|line| line.split("\\n")).filter_map(gap);
            wrong.extend(gaps.map(|at| format!("{name}:{line}: {at}")));
        }
    }
    assert!(seen > 10000, "only {seen} literals found");
    assert!(wrong.is_empty(), "several blanks inside a sentence:\n{}", wrong.join("\n"));
}

#[test]
fn gaps_and_literals_are_found() {
    let source = "let a = \"one after the \\\n         other\"; // \"no\"\nlet b = ('\"', \"x\\\"y\", r#\"z \"q\" \"#, 'a');";
    let texts: Vec<(usize, String)> = literals(source);
    let expected = [(1, "one after the other"), (3, "x\\\"y"), (3, "z \"q\" ")];
    assert_eq!(texts, expected.map(|(line, text)| (line, text.to_owned())));
    assert_eq!(
        gap("than one after the          other: build"),
        Some("than one after the          other: build")
    );
    for columns in
        ["/help         this list", "{mark}  {name}", "  indented text of a page", "a  b", "VmRSS:  1 kB"]
    {
        assert_eq!(gap(columns), None, "{columns}");
    }
}

/// Prefixes of variables that are not the system's.
const PREFIXES: [&str; 6] = ["MLCC_", "HF_", "OTEL_", "OMPI_", "PMI_", "XDG_"];

/// Variables that only tests and the build of the project know.
const OF_TESTS: [&str; 3] = ["MLCC_BLESS", "MLCC_SHARED", "MLCC_TEST_OBJECTS"];

#[test]
fn the_manual_has_all_variables() {
    let Some(sources) = sources() else { return };
    let manual = std::fs::read_to_string(root().join("docs/cli.md")).unwrap();
    let (mut missing, mut seen) = (Vec::new(), 0);
    for (name, source) in
        sources.iter().filter(|(name, _)| name.contains("/src/") && !name.contains("/tests"))
    {
        for (line, text) in literals(source) {
            let is_name = text.chars().all(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_');
            let known =
                PREFIXES.iter().any(|prefix| text.strip_prefix(prefix).is_some_and(|rest| !rest.is_empty()));
            if !is_name || !known || text.ends_with('_') || OF_TESTS.contains(&text.as_str()) {
                continue;
            }
            seen += 1;
            if !manual.contains(&format!("`{text}`")) {
                missing.push(format!("{text} ({name}:{line})"));
            }
        }
    }
    assert!(seen > 20, "only {seen} names found");
    assert!(missing.is_empty(), "docs/cli.md lacks {}", missing.join(", "));
}
