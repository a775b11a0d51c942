//! Sources of messages: a terminal with line editing, or lines of standard input.

use std::cell::Cell;
use std::io::{BufRead, IsTerminal};

use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::DefaultHistory;
use rustyline::validate::Validator;
use rustyline::{Config, Context, Editor, Helper};

use crate::error::CliError;

const SIGN: &str = "> ";
/// The prompt of the further lines of a message.
const MORE: &str = ". ";
/// Encloses a message of several lines.
const FENCE: &str = "\"\"\"";

/// An event of the input.
pub enum InputEvent {
    /// A message or command, its lines joined.
    Message(String),
    /// Ctrl-C at an empty prompt.
    Interrupted,
    /// Ctrl-D, or the end of a pipe.
    End,
}

pub enum ChatInput {
    Terminal(Box<Editor<LineTracker, DefaultHistory>>),
    Lines,
}

/// One line, without its end.
#[derive(Debug, PartialEq, Eq)]
enum InputLine {
    Text(String),
    /// Ctrl-C at text, which is dropped.
    Cleared,
    /// Ctrl-C at an empty line.
    Interrupted,
    End,
}

/// Knows whether the line in work has text: the editor asks for a hint after every change of it, and does not
/// mention it when Ctrl-C ends it.
#[derive(Default)]
pub struct LineTracker {
    has_text: Cell<bool>,
}

impl LineTracker {
    /// The meaning of a press of Ctrl-C.
    fn interrupt_event(&self) -> InputLine {
        if self.has_text.replace(false) { InputLine::Cleared } else { InputLine::Interrupted }
    }
}

impl Hinter for LineTracker {
    type Hint = String;
    fn hint(&self, line: &str, _: usize, _: &Context<'_>) -> Option<String> {
        self.has_text.set(!line.is_empty());
        None
    }
}

impl Completer for LineTracker {
    type Candidate = String;
}
impl Highlighter for LineTracker {}
impl Validator for LineTracker {}
impl Helper for LineTracker {}

impl ChatInput {
    pub fn open() -> Result<Self, CliError> {
        if !(std::io::stdin().is_terminal() && std::io::stdout().is_terminal()) {
            return Ok(ChatInput::Lines);
        }
        let config = Config::builder().auto_add_history(true).build();
        let mut editor = Editor::with_config(config).map_err(terminal_error)?;
        editor.set_helper(Some(LineTracker::default()));
        Ok(ChatInput::Terminal(Box::new(editor)))
    }

    pub fn is_terminal(&self) -> bool {
        matches!(self, ChatInput::Terminal(_))
    }

    /// The next message, of one or more lines.
    pub fn read(&mut self) -> Result<InputEvent, CliError> {
        let mut text = String::new();
        let mut fenced = false;
        loop {
            let begun = fenced || !text.is_empty();
            let line = match self.read_line(if begun { MORE } else { SIGN })? {
                InputLine::Text(line) => line,
                // A started message is dropped, an empty prompt is left.
                InputLine::Cleared | InputLine::Interrupted if begun => {
                    (text, fenced) = (String::new(), false);
                    continue;
                }
                InputLine::Cleared => continue,
                InputLine::Interrupted => return Ok(InputEvent::Interrupted),
                InputLine::End if begun => return Ok(InputEvent::Message(text)),
                InputLine::End => return Ok(InputEvent::End),
            };
            if line.trim() == FENCE {
                if fenced {
                    return Ok(InputEvent::Message(text));
                }
                fenced = true;
            } else if fenced {
                if !text.is_empty() {
                    text.push('\n');
                }
                text.push_str(&line);
            } else if let Some(begin) = line.strip_suffix('\\') {
                text.push_str(begin);
                text.push('\n');
            } else {
                text.push_str(&line);
                return Ok(InputEvent::Message(text));
            }
        }
    }

    fn read_line(&mut self, sign: &str) -> Result<InputLine, CliError> {
        match self {
            ChatInput::Terminal(editor) => match editor.readline(sign) {
                Ok(line) => Ok(InputLine::Text(line)),
                Err(ReadlineError::Interrupted) => {
                    Ok(editor.helper().map_or(InputLine::Interrupted, LineTracker::interrupt_event))
                }
                Err(ReadlineError::Eof) => Ok(InputLine::End),
                Err(e) => Err(terminal_error(e)),
            },
            ChatInput::Lines => {
                let mut line = Vec::new();
                let read = std::io::stdin().lock().read_until(b'\n', &mut line);
                if read.map_err(CliError::io("read", "standard input"))? == 0 {
                    return Ok(InputLine::End);
                }
                let line = mlcc_text::utf8("standard input", line)?;
                Ok(InputLine::Text(line.trim_end_matches(['\n', '\r']).to_owned()))
            }
        }
    }
}

fn terminal_error(error: ReadlineError) -> CliError {
    CliError::Failed(format!("cannot read from the terminal: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_press_clears_text_and_the_next_one_leaves() {
        let (typed, history) = (LineTracker::default(), DefaultHistory::new());
        let edit = |line: &str| assert_eq!(typed.hint(line, line.len(), &Context::new(&history)), None);
        assert_eq!(typed.interrupt_event(), InputLine::Interrupted);
        edit("It");
        assert_eq!(
            (typed.interrupt_event(), typed.interrupt_event()),
            (InputLine::Cleared, InputLine::Interrupted)
        );
        edit("It");
        edit("");
        assert_eq!(typed.interrupt_event(), InputLine::Interrupted, "the text was taken back");
    }
}
