//! Chat formats of models that were published with code in place of a template.

use super::{ChatError, ChatMessage};

/// A format by the name of its first model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BuiltinFormat {
    /// ChatGLM-6B: `[Round 0]\n问：...\n答：`; the first question has no such frame.
    ChatGlm6b,
    /// ChatGLM2-6B: `[Round 1]\n\n问：...\n\n答：`.
    ChatGlm2,
    /// ChatGLM3-6B: `<|user|>\n ...<|assistant|>`.
    ChatGlm3,
    /// RWKV World: `User: ...\n\nAssistant:`.
    RwkvWorld,
}

impl BuiltinFormat {
    pub const ALL: [BuiltinFormat; 4] = [
        BuiltinFormat::ChatGlm6b,
        BuiltinFormat::ChatGlm2,
        BuiltinFormat::ChatGlm3,
        BuiltinFormat::RwkvWorld,
    ];

    pub fn name(self) -> &'static str {
        match self {
            BuiltinFormat::ChatGlm6b => "chatglm-6b",
            BuiltinFormat::ChatGlm2 => "chatglm2",
            BuiltinFormat::ChatGlm3 => "chatglm3",
            BuiltinFormat::RwkvWorld => "rwkv-world",
        }
    }

    pub fn from_name(name: &str) -> Result<BuiltinFormat, ChatError> {
        Self::ALL.into_iter().find(|format| format.name() == name).ok_or_else(|| ChatError::UnknownFormat {
            found: name.to_owned(),
            known: Self::ALL.map(BuiltinFormat::name).join(", "),
        })
    }

    pub(super) fn wants_prompt_template(self) -> bool {
        match self {
            BuiltinFormat::ChatGlm6b | BuiltinFormat::ChatGlm2 => true,
            BuiltinFormat::ChatGlm3 | BuiltinFormat::RwkvWorld => false,
        }
    }

    pub(super) fn stop_texts(self) -> &'static [&'static str] {
        match self {
            BuiltinFormat::RwkvWorld => &["\n\nUser:"],
            BuiltinFormat::ChatGlm6b | BuiltinFormat::ChatGlm2 | BuiltinFormat::ChatGlm3 => &[],
        }
    }

    pub(super) fn render(
        self,
        messages: &[ChatMessage],
        add_generation_prompt: bool,
    ) -> Result<String, ChatError> {
        match self {
            BuiltinFormat::ChatGlm6b => self.rounds(messages, add_generation_prompt, 0, "\n"),
            BuiltinFormat::ChatGlm2 => self.rounds(messages, add_generation_prompt, 1, "\n\n"),
            BuiltinFormat::ChatGlm3 => self.roles(messages, add_generation_prompt),
            BuiltinFormat::RwkvWorld => self.dialogue(messages, add_generation_prompt),
        }
    }

    /// `build_prompt` of the tokenizers of ChatGLM-6B and ChatGLM2-6B.
    fn rounds(
        self,
        messages: &[ChatMessage],
        add_generation_prompt: bool,
        first: usize,
        gap: &str,
    ) -> Result<String, ChatError> {
        if let (BuiltinFormat::ChatGlm6b, [only], true) = (self, messages, add_generation_prompt)
            && only.role == "user"
        {
            return Ok(only.text());
        }
        let mut text = String::new();
        let mut round = first;
        for (index, message) in messages.iter().enumerate() {
            match message.role.as_str() {
                "user" => {
                    text.push_str(&format!("[Round {round}]{gap}问：{}{gap}答：", message.text()));
                    round += 1;
                }
                "assistant" => {
                    text.push_str(&message.text());
                    text.push_str(gap);
                }
                role => return Err(self.role_error(index, role, "user and assistant")),
            }
        }
        Ok(text)
    }

    /// The special tokens of ChatGLM3: role token, line break, text.
    fn roles(self, messages: &[ChatMessage], add_generation_prompt: bool) -> Result<String, ChatError> {
        let mut text = String::from("[gMASK]sop");
        for (index, message) in messages.iter().enumerate() {
            match message.role.as_str() {
                role @ ("system" | "user" | "assistant" | "observation") => {
                    text.push_str(&format!("<|{role}|>\n {}", message.text()));
                }
                "tool" => text.push_str(&format!("<|observation|>\n {}", message.text())),
                role => return Err(self.role_error(index, role, "system, user, assistant, observation")),
            }
        }
        if add_generation_prompt {
            text.push_str("<|assistant|>");
        }
        Ok(text)
    }

    /// The dialogue that the RWKV World models were trained on: texts without empty lines.
    fn dialogue(self, messages: &[ChatMessage], add_generation_prompt: bool) -> Result<String, ChatError> {
        let mut text = String::new();
        for (index, message) in messages.iter().enumerate() {
            let name = match message.role.as_str() {
                "system" => "System",
                "user" => "User",
                "assistant" => "Assistant",
                role => return Err(self.role_error(index, role, "system, user and assistant")),
            };
            text.push_str(&format!("{name}: {}\n\n", without_empty_lines(&message.text())));
        }
        if add_generation_prompt {
            text.push_str("Assistant:");
        }
        Ok(text)
    }

    fn role_error(self, index: usize, role: &str, known: &'static str) -> ChatError {
        ChatError::Role { index, role: role.to_owned(), format: self.name(), known }
    }
}

/// An empty line ends a turn, so a text must not have one.
fn without_empty_lines(text: &str) -> String {
    let lines = text.trim().lines().map(str::trim_end).filter(|line| !line.is_empty());
    lines.collect::<Vec<_>>().join("\n")
}
