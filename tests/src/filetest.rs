//! Filetests: `tests/filetests/**/*.mlc`, one test per file.
//!
//! ```text
//! // test: interp                      what is done with the module
//! // run @f n=2: [1, 0], random 7      directives of that kind of test
//! module @m { ... }
//! // expect:
//! // @f f32[2] [1.0, 2.0]              what comes out, each line after `// `
//! ```
//!
//! Kinds: `parse` (the text printed again; `canonical` if it is the same), `verify`, `pass NAME[, NAME]` (the
//! module after these passes, which must verify and mean the same as before), `lower TARGET` (the kernels),
//! `codegen TARGET` (whether lines of the assembly hold the words of `find` lines), `interp` and
//! `interp-kernel` (results of `run` lines). `option` lines are explained at `kinds::Options`. An error
//! stands as `error: ...`. With `MLCC_BLESS=1` the expectation is written instead of compared.

#[cfg(feature = "llvm")]
mod codegen;
mod kinds;
mod outline;
mod run;

use std::path::Path;

/// The request of a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum FileTestKind {
    Parse,
    Verify,
    Pass(Vec<String>),
    Lower(String),
    Codegen(String),
    Interp,
    InterpKernel,
}

impl FileTestKind {
    fn parse(text: &str) -> Result<FileTestKind, String> {
        let (word, rest) = text.split_once(' ').unwrap_or((text, ""));
        let rest = rest.trim();
        match (word, rest) {
            ("parse", "") => Ok(FileTestKind::Parse),
            ("verify", "") => Ok(FileTestKind::Verify),
            ("interp", "") => Ok(FileTestKind::Interp),
            ("interp-kernel", "") => Ok(FileTestKind::InterpKernel),
            ("pass", names) if !names.is_empty() => {
                Ok(FileTestKind::Pass(names.split(',').map(|n| n.trim().to_string()).collect()))
            }
            ("lower", target) if !target.is_empty() => Ok(FileTestKind::Lower(target.into())),
            ("codegen", target) if !target.is_empty() => Ok(FileTestKind::Codegen(target.into())),
            _ => Err(format!(
                "unknown kind `{text}`: expected parse, verify, pass NAME, lower TARGET, codegen TARGET, interp or \
                 interp-kernel"
            )),
        }
    }
}

/// A file taken apart.
#[derive(Debug)]
pub struct FileTest {
    pub kind: FileTestKind,
    /// The text from the first line to the expectation: comments included, so that positions in errors are
    /// those of the file.
    pub source: String,
    /// Lines without their `// `.
    pub expected: String,
}

const EXPECT: &str = "// expect:";

impl FileTest {
    pub fn parse(text: &str) -> Result<FileTest, String> {
        let first = text.lines().next().unwrap_or_default();
        let kind = first
            .strip_prefix("// test:")
            .ok_or("the first line must be `// test: KIND`")?
            .trim()
            .to_string();
        let kind = FileTestKind::parse(&kind)?;
        let (source, expectation) = match text.find(&format!("\n{EXPECT}\n")) {
            Some(at) => (&text[..at + 1], &text[at + EXPECT.len() + 2..]),
            None => (text, ""),
        };
        let mut expected = String::new();
        for line in expectation.lines() {
            let line = line.strip_prefix("//").ok_or("every line after `// expect:` starts with `//`")?;
            expected.push_str(line.strip_prefix(' ').unwrap_or(line));
            expected.push('\n');
        }
        Ok(FileTest { kind, source: source.into(), expected })
    }

    /// Lines of the source that start with `// word `, without that.
    fn directive_values(&self, word: &str) -> Vec<String> {
        let prefix = format!("// {word} ");
        self.source.lines().filter_map(|l| l.strip_prefix(&prefix)).map(String::from).collect()
    }

    /// The output of the test.
    pub fn run_test(&self) -> Result<String, String> {
        kinds::run(self)
    }
}

/// Runs one file, or rewrites its expectation.
pub fn run_file(path: &Path, bless: bool) -> Result<(), String> {
    let text = std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
    let test = FileTest::parse(&text)?;
    let actual = test.run_test()?;
    if actual == test.expected {
        return Ok(());
    }
    if bless {
        let mut blessed = test.source.clone();
        if !blessed.ends_with('\n') {
            blessed.push('\n');
        }
        blessed.push_str(EXPECT);
        blessed.push('\n');
        for line in actual.lines() {
            blessed.push_str(format!("// {line}").trim_end());
            blessed.push('\n');
        }
        return std::fs::write(path, blessed).map_err(|e| format!("{}: {e}", path.display()));
    }
    Err(first_difference(&test.expected, &actual))
}

/// The first line that differs with its surroundings, and the whole result.
fn first_difference(expected: &str, actual: &str) -> String {
    let (want, got): (Vec<&str>, Vec<&str>) = (expected.lines().collect(), actual.lines().collect());
    let same = want.iter().zip(&got).take_while(|(a, b)| a == b).count();
    let show = |lines: &[&str], mark: char| {
        let around = lines.iter().enumerate().skip(same.saturating_sub(2)).take(8);
        around.map(|(i, l)| format!("{} {l}\n", if i < same { ' ' } else { mark })).collect::<String>()
    };
    format!(
        "the result differs from the expectation at its line {} (MLCC_BLESS=1 accepts it)\nexpected:\n{}found:\n{}\nthe \
         whole result:\n{actual}",
        same + 1,
        show(&want, '-'),
        show(&got, '+')
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_taken_apart() {
        let text = "// test: pass fuse, outline\nmodule @m {\n}\n// expect:\n// a\n//\n//  b\n";
        let test = FileTest::parse(text).unwrap();
        assert_eq!(test.kind, FileTestKind::Pass(vec!["fuse".into(), "outline".into()]));
        assert_eq!(test.source, "// test: pass fuse, outline\nmodule @m {\n}\n");
        assert_eq!(test.expected, "a\n\n b\n");
    }

    #[test]
    fn bad_headers_are_refused() {
        assert!(FileTest::parse("module @m {}").unwrap_err().contains("first line"));
        assert!(FileTest::parse("// test: dance").unwrap_err().starts_with("unknown kind `dance`"));
        assert!(FileTest::parse("// test: pass").unwrap_err().starts_with("unknown kind `pass`"));
        let text = "// test: parse\n// expect:\nplain\n";
        assert!(FileTest::parse(text).unwrap_err().contains("starts with"));
    }

    #[test]
    fn a_wrong_expectation_fails_and_blessing_mends_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.mlc");
        std::fs::write(&path, "// test: verify\nmodule @m {\n}\n// expect:\n// wrong\n").unwrap();
        let failure = run_file(&path, false).unwrap_err();
        assert!(failure.contains("- wrong\n") && failure.contains("+ ok\n"), "{failure}");
        run_file(&path, true).unwrap();
        run_file(&path, false).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(text, "// test: verify\nmodule @m {\n}\n// expect:\n// ok\n");
    }
}
