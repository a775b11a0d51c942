//! Form of comments: their lines have at most 110 columns, and doc comments begin with their subject.

use crate::literals::sources;

/// Columns of a line with a comment, indentation and code before it included.
const MOST_COLUMNS: usize = 110;

/// Folders and files with longer lines. The list only shrinks.
const LONG: [&str; 1] = ["models/"];

/// Words at the begin of a doc comment whose subject comes late or never.
const FRAGMENTS: [&str; 10] = ["As", "How", "In", "Of", "So", "That", "What", "Where", "Whether", "Who"];

/// Doc comments that may begin so, per cent of all.
const MOST_FRAGMENTS: usize = 5;

/// A line comment, from its slashes to the end of the line.
struct LineComment<'a> {
    /// The line of the comment, from 1.
    number: usize,
    line: &'a str,
    text: &'a str,
}

impl<'a> LineComment<'a> {
    /// The slashes of a doc comment, with its text; `None` for other comments, and behind code.
    fn doc(&self) -> Option<(&'static str, &'a str)> {
        let alone = self.line.trim_start().len() == self.text.len();
        let doc = alone && !self.text.starts_with("////");
        let mut marks = ["///", "//!"].into_iter().filter(|_| doc);
        marks.find_map(|mark| Some((mark, self.text.strip_prefix(mark)?)))
    }
}

/// Bytes of the string or character literal at the begin of `rest`; 0 if there is none.
fn literal_len(rest: &str) -> usize {
    if let Some(raw) = rest.strip_prefix('r') {
        let quote = raw.trim_start_matches('#');
        let end = format!("\"{}", &raw[..raw.len() - quote.len()]);
        let Some(inner) = quote.strip_prefix('"') else { return 0 };
        let begin = rest.len() - inner.len();
        return inner.find(&end).map_or(rest.len(), |at| begin + at + end.len());
    }
    if let Some(inner) = rest.strip_prefix('"') {
        let mut escaped = false;
        let end = inner.find(|c: char| {
            let end = c == '"' && !escaped;
            escaped = c == '\\' && !escaped;
            end
        });
        return end.map_or(rest.len(), |at| at + 2);
    }
    let Some(inner) = rest.strip_prefix('\'') else { return 0 };
    match inner.strip_prefix('\\') {
        // The escaped character may be a quote itself.
        Some(escape) => escape.char_indices().skip(1).find(|&(_, c)| c == '\'').map_or(0, |(at, _)| at + 3),
        None => {
            let c = inner.chars().next().filter(|c| inner[c.len_utf8()..].starts_with('\''));
            c.map_or(0, |c| c.len_utf8() + 2)
        }
    }
}

/// The line comments of a source, in order.
fn comments(source: &str) -> Vec<LineComment<'_>> {
    let (mut found, mut at) = (Vec::new(), 0);
    let (mut counted, mut number) = (0, 1);
    while let Some(c) = source[at..].chars().next() {
        let rest = &source[at..];
        if !rest.starts_with("//") {
            at += literal_len(rest).max(c.len_utf8());
            continue;
        }
        let end = at + rest.find('\n').unwrap_or(rest.len());
        let begin = source[..at].rfind('\n').map_or(0, |before| before + 1);
        number += source[counted..at].matches('\n').count();
        found.push(LineComment { number, line: &source[begin..end], text: &source[at..end] });
        (counted, at) = (at, end);
    }
    found
}

/// The first word of each doc comment, with the number of its line.
fn first_words(source: &str) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    let mut last = None;
    for comment in comments(source) {
        let Some((mark, text)) = comment.doc() else { continue };
        if last.replace((mark, comment.number)) != Some((mark, comment.number - 1)) {
            let text = text.trim_start();
            let end = text.find(|c: char| !c.is_alphabetic()).unwrap_or(text.len());
            found.push((comment.number, &text[..end]));
        }
    }
    found
}

#[test]
fn comments_are_at_most_110_columns() {
    let Some(sources) = sources() else { return };
    let (mut long, mut seen, mut unused) = (Vec::new(), 0, LONG.to_vec());
    for (path, source) in &sources {
        for comment in comments(source) {
            seen += 1;
            let columns = comment.line.chars().count();
            match LONG.into_iter().find(|listed| path.starts_with(listed)) {
                _ if columns <= MOST_COLUMNS => {}
                Some(listed) => unused.retain(|&other| other != listed),
                None => long.push(format!("{path}:{}: {columns} columns", comment.number)),
            }
        }
    }
    assert!(seen > 15_000, "only {seen} lines with comments found");
    assert!(long.is_empty(), "comments beyond column {MOST_COLUMNS}:\n{}", long.join("\n"));
    assert!(unused.is_empty(), "no long comments in {unused:?} any more: shorten the list");
}

#[test]
fn doc_comments_begin_with_their_subject() {
    let Some(sources) = sources() else { return };
    let (mut all, mut fragments) = (0, Vec::new());
    for (path, source) in &sources {
        for (number, word) in first_words(source) {
            all += 1;
            if FRAGMENTS.contains(&word) {
                fragments.push(format!("{path}:{number}: {word}"));
            }
        }
    }
    assert!(all > 10_000, "only {all} doc comments found");
    let share = 100.0 * fragments.len() as f64 / all as f64;
    assert!(
        fragments.len() * 100 <= all * MOST_FRAGMENTS,
        "{} of {all} doc comments ({share:.1} %, at most {MOST_FRAGMENTS} % may) begin with one of {FRAGMENTS:?}:\n{}",
        fragments.len(),
        fragments.join("\n")
    );
}

#[test]
fn comments_are_found() {
    let source = "//! Of a file.\n//!\n//! More.\n/// What it is.\nfn f() {\n    let a = \"// none\"; // Whether.\n    \
                  let b = ('\"', '\\'', r#\"\"//\"#); // plain\n    //// As rulers\n    /// Bytes.\n    /// Who.\n}\n";
    let found: Vec<(usize, &str)> = comments(source).iter().map(|c| (c.number, c.text)).collect();
    assert_eq!(found[3..6], [(4, "/// What it is."), (6, "// Whether."), (7, "// plain")]);
    assert_eq!(found.len(), 9);
    assert_eq!(first_words(source), [(1, "Of"), (4, "What"), (9, "Bytes")]);
}
