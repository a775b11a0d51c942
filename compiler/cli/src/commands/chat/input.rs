//! Where messages come from: a terminal with line editing, or lines of standard input.

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
/// Before the further lines of a message.
const MORE: &str = ". ";
/// Encloses a message of several lines.
const FENCE: &str = "\"\"\"";

/// What came.
pub enum Event {
    /// A message or command, its lines joined.
    Message(String),
    /// Ctrl-C at an empty prompt.
    Interrupted,
    /// Ctrl-D, or the end of a pipe.
    End,
}

pub enum Input {
    Terminal(Box<Editor<Typed, DefaultHistory>>),
    Lines,
}

/// One line, without its end.
#[derive(Debug, PartialEq, Eq)]
enum Line {
    Text(String),
    /// Ctrl-C at text, which is dropped.
    Cleared,
    /// Ctrl-C at an empty line.
    Interrupted,
    End,
}

/// Knows whether the line in work has text: the editor asks for a hint after every change of it, and says nothing of it
/// when Ctrl-C ends it.
#[derive(Default)]
pub struct Typed {
    any: Cell<bool>,
}

impl Typed {
    /// What a press of Ctrl-C means.
    fn interrupted(&self) -> Line {
        if self.any.replace(false) { Line::Cleared } else { Line::Interrupted }
    }
}

impl Hinter for Typed {
    type Hint = String;
    fn hint(&self, line: &str, _: usize, _: &Context<'_>) -> Option<String> {
        self.any.set(!line.is_empty());
        None
    }
}

impl Completer for Typed {
    type Candidate = String;
}
impl Highlighter for Typed {}
impl Validator for Typed {}
impl Helper for Typed {}

impl Input {
    pub fn open() -> Result<Self, CliError> {
        if !(std::io::stdin().is_terminal() && std::io::stdout().is_terminal()) {
            return Ok(Input::Lines);
        }
        let config = Config::builder().auto_add_history(true).build();
        let mut editor = Editor::with_config(config).map_err(terminal)?;
        editor.set_helper(Some(Typed::default()));
        Ok(Input::Terminal(Box::new(editor)))
    }

    pub fn is_terminal(&self) -> bool {
        matches!(self, Input::Terminal(_))
    }

    /// The next message, of one or more lines.
    pub fn read(&mut self) -> Result<Event, CliError> {
        let mut text = String::new();
        let mut fenced = false;
        loop {
            let begun = fenced || !text.is_empty();
            let line = match self.line(if begun { MORE } else { SIGN })? {
                Line::Text(line) => line,
                // A begun message is dropped, an empty prompt is left.
                Line::Cleared | Line::Interrupted if begun => {
                    (text, fenced) = (String::new(), false);
                    continue;
                }
                Line::Cleared => continue,
                Line::Interrupted => return Ok(Event::Interrupted),
                Line::End if begun => return Ok(Event::Message(text)),
                Line::End => return Ok(Event::End),
            };
            if line.trim() == FENCE {
                if fenced {
                    return Ok(Event::Message(text));
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
                return Ok(Event::Message(text));
            }
        }
    }

    fn line(&mut self, sign: &str) -> Result<Line, CliError> {
        match self {
            Input::Terminal(editor) => match editor.readline(sign) {
                Ok(line) => Ok(Line::Text(line)),
                Err(ReadlineError::Interrupted) => {
                    Ok(editor.helper().map_or(Line::Interrupted, Typed::interrupted))
                }
                Err(ReadlineError::Eof) => Ok(Line::End),
                Err(e) => Err(terminal(e)),
            },
            Input::Lines => {
                let mut line = Vec::new();
                let read = std::io::stdin().lock().read_until(b'\n', &mut line);
                if read.map_err(CliError::io("read", "standard input"))? == 0 {
                    return Ok(Line::End);
                }
                let line = mlcc_engine::text::utf8("standard input", line)?;
                Ok(Line::Text(line.trim_end_matches(['\n', '\r']).to_owned()))
            }
        }
    }
}

fn terminal(error: ReadlineError) -> CliError {
    CliError::Failed(format!("cannot read from the terminal: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_press_clears_text_and_the_next_one_leaves() {
        let (typed, history) = (Typed::default(), DefaultHistory::new());
        let edit = |line: &str| assert_eq!(typed.hint(line, line.len(), &Context::new(&history)), None);
        assert_eq!(typed.interrupted(), Line::Interrupted);
        edit("It");
        assert_eq!((typed.interrupted(), typed.interrupted()), (Line::Cleared, Line::Interrupted));
        edit("It");
        edit("");
        assert_eq!(typed.interrupted(), Line::Interrupted, "the text was taken back");
    }
}
