//! Blocks of code in pages of Markdown, and the commands among them.

use std::path::Path;

/// Programs that commands of the pages begin with, beside files of the repository.
const PROGRAMS: [&str; 20] = [
    "cargo",
    "cat",
    "cc",
    "cd",
    "curl",
    "export",
    "hf",
    "install",
    "kubectl",
    "maturin",
    "mlcc",
    "mpirun",
    "pip",
    "podman",
    "printf",
    "python",
    "python3",
    "rm",
    "rustup",
    "ssh-keygen",
];

/// A comment in front of a block that is not run begins like this, and goes on with the reason.
const MARK: &str = "<!-- not run: ";

/// A fenced or indented block of code.
pub struct DocCodeBlock {
    /// The number of its first line.
    pub line: usize,
    /// The word behind the fence.
    pub info: String,
    pub text: String,
    /// The reason for which it is not run.
    pub not_run: Option<String>,
}

impl DocCodeBlock {
    /// The lines are typed into a shell.
    pub fn is_command(&self, workspace: &Path) -> bool {
        let shell = matches!(self.info.as_str(), "" | "sh" | "bash" | "console");
        shell && self.text.lines().next().is_some_and(|line| begins_with_program(line, workspace))
    }
}

fn begins_with_program(line: &str, workspace: &Path) -> bool {
    let is_variable = |word: &&str| word.split_once('=').is_some_and(|(name, _)| is_name(name));
    let Some(word) = line.split_whitespace().find(|word| !is_variable(word)) else { return false };
    let is_file = word.contains('/') && workspace.join(word).is_file();
    PROGRAMS.contains(&word) || is_file || word.starts_with("./")
}

fn is_name(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_')
}

/// All blocks of a page, in its order.
pub fn blocks(page: &str) -> Vec<DocCodeBlock> {
    let mut found: Vec<DocCodeBlock> = Vec::new();
    let mut mark = None;
    let (mut fence, mut blank, mut indented) = (false, true, false);
    for (at, line) in page.lines().enumerate() {
        if let Some(info) = line.trim_start().strip_prefix("```") {
            fence = !fence;
            if fence {
                let (line, info) = (at + 1, info.trim().to_owned());
                found.push(DocCodeBlock { line, info, text: String::new(), not_run: mark.take() });
            }
            (blank, indented) = (false, false);
            continue;
        }
        let code = line.strip_prefix("    ").filter(|_| blank || indented);
        match (fence, code, found.last_mut()) {
            (true, _, Some(block)) => push(block, line),
            (_, Some(code), Some(block)) if indented => push(block, code),
            (_, Some(code), _) => {
                let block = DocCodeBlock {
                    line: at + 1,
                    info: String::new(),
                    text: format!("{code}\n"),
                    not_run: mark.take(),
                };
                found.push(block);
                indented = true;
            }
            _ if line.trim().is_empty() => indented = false,
            _ => {
                indented = false;
                let reason = line.strip_prefix(MARK).and_then(|rest| rest.strip_suffix(" -->"));
                mark = reason.map(str::to_owned);
            }
        }
        blank = line.trim().is_empty();
    }
    found
}

fn push(block: &mut DocCodeBlock, line: &str) {
    block.text += line;
    block.text.push('\n');
}

#[test]
fn blocks_of_a_page_and_their_marks() {
    let page = "Words.\n\n    mlcc models\n    mlcc quants\n\n<!-- not run: GPU -->\n\n    mlcc doctor\n\nA list:\n\
                ```toml\nlevel = 1\n\nx = 2\n```\n\n    X=1 mlcc targets\n    error: no command\n\n    error: nor this\n";
    let found = blocks(page);
    let texts: Vec<&str> = found.iter().map(|block| block.text.as_str()).collect();
    let expected = [
        "mlcc models\nmlcc quants\n",
        "mlcc doctor\n",
        "level = 1\n\nx = 2\n",
        "X=1 mlcc targets\nerror: no command\n",
        "error: nor this\n",
    ];
    assert_eq!(texts, expected);
    assert_eq!(found.iter().map(|block| block.line).collect::<Vec<_>>(), [3, 8, 11, 17, 20]);
    let marks: Vec<Option<&str>> = found.iter().map(|block| block.not_run.as_deref()).collect();
    assert_eq!(marks, [None, Some("GPU"), None, None, None]);
    let commands: Vec<bool> = found.iter().map(|block| block.is_command(Path::new("."))).collect();
    assert_eq!(commands, [true, true, false, true, false]);
}
