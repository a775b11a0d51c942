//! Names of the sources: a type name means one thing, everyday words do not name things of their own, and a
//! parameter is a value with a name. Counts that are not zero yet may only shrink.

use crate::literals::sources;
use std::collections::{BTreeMap, BTreeSet};

/// Type names that several files define, with how many. The list only shrinks. `Session` is also the name of
/// the Python class.
const SHARED: [(&str, usize); 6] = [
    ("BoxedError", 2),
    ("EmitResult", 4),
    ("RequestSpan", 2),
    ("Session", 2),
    ("TextSpan", 2),
    ("TraceExporter", 2),
];

/// Type names of one word, per cent of all.
const MOST_ONE_WORD: usize = 6;

/// Parameters of functions that are tuples taken apart. The number only shrinks: a struct has names for the
/// parts.
const MOST_TUPLES: usize = 172;

/// Words of this project alone that once named things, with the field's term. No function or type outside of
/// tests may have them.
const PRIVATE_WORDS: [(&str, &str); 14] = [
    ("fed", "computed"),
    ("unfed", "pending"),
    ("twin", "fork"),
    ("twins", "forks"),
    ("crew", "worker count tuner"),
    ("shelf", "disk cache"),
    ("parcel", "write job"),
    ("mover", "migrator"),
    ("turned", "rotated"),
    ("stretched", "mscale"),
    ("likely", "candidate"),
    ("begun", "started"),
    ("gone", "dropped"),
    ("want", "outputs"),
];

/// The definitions of a source outside of its tests.
#[derive(Default)]
struct Definitions {
    types: Vec<String>,
    functions: Vec<String>,
    tuple_parameters: usize,
}

/// The text without comments, literals and what follows `#[cfg(test)]` before a module.
fn code_of(source: &str) -> String {
    let end = source.find("#[cfg(test)]\nmod ").unwrap_or(source.len());
    let lines = source[..end].lines().map(|line| {
        let code = line.find("//").map_or(line, |comment| &line[..comment]);
        code.split('"').step_by(2).collect::<Vec<_>>().join("\"\"")
    });
    lines.collect::<Vec<_>>().join("\n")
}

fn identifier(text: &str) -> String {
    text.chars().take_while(|&c| c.is_alphanumeric() || c == '_').collect()
}

fn definitions(source: &str) -> Definitions {
    let mut found = Definitions::default();
    let code = code_of(source);
    for (at, line) in code.lines().map(|line| (line.len() - line.trim_start().len(), line.trim_start())) {
        let bare = match line.strip_prefix("pub") {
            Some(rest) if rest.starts_with('(') => rest.split_once(") ").map_or("", |(_, rest)| rest),
            Some(rest) => rest.trim_start(),
            None => line,
        };
        let bare = ["unsafe ", "const ", "extern \"\" "]
            .iter()
            .fold(bare, |bare, word| bare.strip_prefix(word).unwrap_or(bare));
        for keyword in ["struct ", "enum ", "union ", "trait ", "type "] {
            let Some(name) = bare.strip_prefix(keyword).map(identifier) else { continue };
            // A type inside of something is that of a trait.
            if !name.is_empty() && (keyword != "type " || at == 0) {
                found.types.push(name);
            }
        }
        if let Some(name) = bare.strip_prefix("fn ").map(identifier) {
            found.functions.push(name);
        }
    }
    found.tuple_parameters = code.match_indices("fn ").map(|(at, _)| tuple_parameters(&code[at..])).sum();
    found
}

/// The number of parameters of a function, whose definition begins here, that are tuples.
fn tuple_parameters(text: &str) -> usize {
    let Some(open) = text.find('(').filter(|&open| !text[..open].contains(['{', ';', '\n'])) else {
        return 0;
    };
    let (mut depth, mut count, mut starts) = (0, 0, false);
    for c in text[open..].chars() {
        match c {
            '(' | '[' | '{' | '<' => {
                count += usize::from(c == '(' && depth == 1 && starts);
                depth += 1;
            }
            ')' | ']' | '}' | '>' => depth -= 1,
            _ => {}
        }
        // The arrow of a closure's type closes nothing.
        if depth == 0 {
            break;
        }
        starts = match c {
            '(' if depth == 1 => true,
            ',' if depth == 1 => true,
            c if c.is_whitespace() => starts,
            _ => false,
        };
    }
    count
}

/// The words of a name, in small letters.
fn words(name: &str) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    let mut last = '_';
    for c in name.chars() {
        match c {
            '_' => {}
            _ if found.is_empty() || last == '_' || (c.is_uppercase() && last.is_lowercase()) => {
                found.push(c.to_string())
            }
            _ => found.last_mut().expect("a word has begun").push(c),
        }
        last = c;
    }
    found.iter().map(|word| word.to_lowercase()).collect()
}

fn is_test(path: &str) -> bool {
    path.split('/').any(|part| part == "tests" || part == "tests.rs")
}

#[test]
fn names_say_what_they_are() {
    let Some(sources) = sources() else { return };
    let (mut types, mut private) = (BTreeMap::<String, BTreeSet<&str>>::new(), Vec::new());
    let (mut tuples, mut functions) = (0, 0);
    for (path, source) in sources.iter().filter(|(path, _)| !is_test(path)) {
        let found = definitions(source);
        tuples += found.tuple_parameters;
        functions += found.functions.len();
        for name in found.types.iter().chain(&found.functions) {
            let forbidden = |word: &String| PRIVATE_WORDS.iter().find(|(private, _)| private == word);
            for (word, term) in words(name).iter().filter_map(forbidden) {
                private.push(format!("{path}: `{name}` has `{word}`: the term is {term}"));
            }
        }
        for name in found.types {
            types.entry(name).or_default().insert(path);
        }
    }
    assert!(
        types.len() > 1000 && functions > 5000,
        "only {} types and {functions} functions found",
        types.len()
    );
    assert!(private.is_empty(), "{}", private.join("\n"));
    let shared = types.iter().filter(|(_, files)| files.len() > 1);
    let listed: BTreeMap<&str, usize> = SHARED.into_iter().collect();
    let more = shared.filter(|(name, files)| files.len() > listed.get(name.as_str()).copied().unwrap_or(1));
    let more: Vec<String> = more.map(|(name, files)| format!("`{name}`: {files:?}")).collect();
    assert!(
        more.is_empty(),
        "several files define these types, give each a name of its own:\n{}",
        more.join("\n")
    );
    for (name, count) in SHARED {
        assert_eq!(
            types.get(name).map_or(0, BTreeSet::len),
            count,
            "`{name}` in fewer files: shorten the list"
        );
    }
    let single = types.keys().filter(|name| words(name).len() == 1).count();
    let permitted = types.len() * MOST_ONE_WORD / 100;
    assert!(single <= permitted, "{single} type names have one word, {permitted} may");
    assert!(
        tuples <= MOST_TUPLES,
        "{tuples} parameters are tuples that are taken apart: a struct has names for their parts"
    );
}

#[test]
fn definitions_are_found() {
    let source = "/// struct Comment\npub(crate) struct OneThing<T>(T);\nenum Other { A }\nimpl X for Y {\n    type Output = u8;\n    \
                  pub const fn take_both(&self, (a, b): (u8, u8), f: impl Fn((u8, u8))) {}\n}\ntype Alias = u8;\n#[cfg(test)]\nmod tests {\n \
                  struct Hidden;\n}";
    let found = definitions(source);
    assert_eq!(found.types, ["OneThing", "Other", "Alias"]);
    assert_eq!(found.functions, ["take_both"]);
    assert_eq!(found.tuple_parameters, 1);
    assert_eq!(words("PtxWarp_ofX"), ["ptx", "warp", "of", "x"]);
}
