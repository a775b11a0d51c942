//! Where messages come from: a terminal with line editing, or lines of standard input.

use std::io::{BufRead, IsTerminal};

use rustyline::error::ReadlineError;
use rustyline::{Config, DefaultEditor};

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
    Terminal(Box<DefaultEditor>),
    Lines,
}

/// One line, without its end.
enum Line {
    Text(String),
    Interrupted,
    End,
}

impl Input {
    pub fn open() -> Result<Self, CliError> {
        if !(std::io::stdin().is_terminal() && std::io::stdout().is_terminal()) {
            return Ok(Input::Lines);
        }
        let config = Config::builder().auto_add_history(true).build();
        Ok(Input::Terminal(Box::new(DefaultEditor::with_config(config).map_err(terminal)?)))
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
                Line::Interrupted if begun => {
                    (text, fenced) = (String::new(), false);
                    continue;
                }
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
                Err(ReadlineError::Interrupted) => Ok(Line::Interrupted),
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
