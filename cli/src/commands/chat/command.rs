//! The commands of a chat: lines that begin with a slash.

use std::path::PathBuf;

pub const HELP: &str = "\
/help         this list
/reset        a new conversation (the system's message stays)
/regen        make the last answer again
/stats        tokens, memory and speed
/set K=V      change a setting (several with `;`); /set alone lists them
/save FILE    keep the conversation: FILE, and FILE.state with what the model has read
/load FILE    go on with a kept conversation
/exit         leave (also /quit, or the end of the input)
A line that ends with \\ goes on in the next one; text between lines of \"\"\" is one message.
A message that begins with a slash is written with two.
";

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ChatCommand {
    Help,
    Reset,
    Regenerate,
    Stats,
    /// `None` lists the settings.
    Set(Option<String>),
    Save(PathBuf),
    Load(PathBuf),
    Exit,
}

impl ChatCommand {
    /// `None`: an ordinary message (see [`unescape_message`]).
    pub fn parse(line: &str) -> Option<Result<ChatCommand, String>> {
        let rest = line.trim().strip_prefix('/').filter(|rest| !rest.starts_with('/'))?;
        let (name, argument) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
        let argument = argument.trim();
        let file = |make: fn(PathBuf) -> ChatCommand| match argument {
            "" => Err(format!("/{name} needs the name of a file")),
            path => Ok(make(path.into())),
        };
        let plain = |command| match argument {
            "" => Ok(command),
            _ => Err(format!("/{name} takes no argument, found `{argument}`")),
        };
        Some(match name {
            "help" | "?" => plain(ChatCommand::Help),
            "reset" | "clear" => plain(ChatCommand::Reset),
            "regen" | "regenerate" => plain(ChatCommand::Regenerate),
            "stats" => plain(ChatCommand::Stats),
            "exit" | "quit" => plain(ChatCommand::Exit),
            "save" => file(ChatCommand::Save),
            "load" => file(ChatCommand::Load),
            "set" => Ok(ChatCommand::Set(Some(argument.to_owned()).filter(|a| !a.is_empty()))),
            _ => Err(format!("there is no command /{name}; /help lists them")),
        })
    }
}

/// The text of an ordinary message: a doubled slash at its begin is one.
pub fn unescape_message(line: &str) -> &str {
    if line.starts_with("//") { &line[1..] } else { line }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_commands_or_messages() {
        assert_eq!(ChatCommand::parse("hello"), None);
        assert_eq!(ChatCommand::parse("//usr/bin is a folder"), None);
        assert_eq!(unescape_message("//usr/bin is a folder"), "/usr/bin is a folder");
        assert_eq!(unescape_message("a // b"), "a // b");
        assert_eq!(ChatCommand::parse(" /stats "), Some(Ok(ChatCommand::Stats)));
        assert_eq!(ChatCommand::parse("/set"), Some(Ok(ChatCommand::Set(None))));
        assert_eq!(ChatCommand::parse("/set a=1; b=2"), Some(Ok(ChatCommand::Set(Some("a=1; b=2".into())))));
        assert_eq!(
            ChatCommand::parse("/save my talk.json"),
            Some(Ok(ChatCommand::Save("my talk.json".into())))
        );
        for wrong in ["/save", "/load ", "/exit now", "/nonsense"] {
            assert!(ChatCommand::parse(wrong).is_some_and(|c| c.is_err()), "{wrong}");
        }
    }
}
