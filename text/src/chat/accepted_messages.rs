//! The messages that a template takes, found by rendering samples and not by the model's name, and the
//! conversion of others to such.
//!
//! * Templates that also take images loop over a content's parts, and most others join it to a text: what is
//!   given in the wrong form is lost without an error, or is one. llama.cpp finds the form by rendering as
//!   well, vLLM from the syntax tree (`chat_template_content_format`).
//! * Few templates know the role `developer`, many need one system message and that first, some have none.
//!   Instructions are accepted in any place and number and reach the model: they are joined at the begin,
//!   `developer` is `system` unless the template names it, and without a role for them they are put in front
//!   of the user's first text, as in llama.cpp.

use std::cell::Cell;
use std::collections::BTreeMap;

use minijinja::value::Serde;
use serde_json::{Value as Json, json};

use super::{ChatError, ChatMessage, ChatTemplate, MessageContent, TemplateInputs, TemplateValue, syntax};

/// The text between two instructions, and between them and the user's text: an empty line, as templates that
/// merge them put there.
const BETWEEN: &str = "\n\n";
const SYSTEM: &str = "system";
const DEVELOPER: &str = "developer";
const USER: &str = "user";
const ASSISTANT: &str = "assistant";
const TOOL: &str = "tool";
/// A text that templates have no reason to change.
const SAMPLE: &str = "A sample text";
const OTHER: &str = "Another one";

/// The form in which a template reads the contents of a role.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RoleContent {
    Text,
    /// A list of parts with a type.
    Parts,
    /// Messages of this role leave nothing in the prompt.
    Dropped,
    /// The samples are refused, so nothing is known.
    Unknown,
}

/// The messages that a template takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct AcceptedMessages {
    system: RoleContent,
    user: RoleContent,
    assistant: RoleContent,
    tool: RoleContent,
    /// The template names the role `developer` and writes its text.
    developer: bool,
    /// A message of that role may follow one of the system.
    both: bool,
}

impl RoleContent {
    /// The form whose text is found in what `render` makes of it.
    fn detect(render: impl Fn(MessageContent) -> Result<String, ChatError>) -> RoleContent {
        let forms = [
            (RoleContent::Text, MessageContent::Text(SAMPLE.into())),
            (RoleContent::Parts, MessageContent::Parts(vec![text_part(SAMPLE)])),
        ];
        let mut rendered = false;
        for (form, content) in forms {
            match render(content) {
                Ok(text) if text.contains(SAMPLE) => return form,
                Ok(_) => rendered = true,
                Err(_) => {}
            }
        }
        if rendered { RoleContent::Dropped } else { RoleContent::Unknown }
    }

    fn is_known(self) -> bool {
        matches!(self, RoleContent::Text | RoleContent::Parts)
    }

    fn or_fallback(self, other: RoleContent) -> RoleContent {
        if self.is_known() { self } else { other }
    }
}

fn text_part(text: &str) -> TemplateValue {
    TemplateValue::from(Serde(json!({"type": "text", "text": text})))
}

fn message(role: &str, content: MessageContent) -> ChatMessage {
    ChatMessage { role: role.to_owned(), content, fields: BTreeMap::new() }
}

fn with_fields(message: ChatMessage, fields: Json) -> ChatMessage {
    let Json::Object(fields) = fields else { return message };
    let fields = fields.into_iter().map(|(name, value)| (name, TemplateValue::from(Serde(value)))).collect();
    ChatMessage { fields, ..message }
}

impl AcceptedMessages {
    /// Finds them by rendering samples, with tools or without. A template that does not end with one message
    /// of a user is an error, so that nothing waits for it a second time.
    pub fn from_template(template: &ChatTemplate, tools: bool) -> Result<AcceptedMessages, ChatError> {
        let extra = if tools { syntax::tools() } else { TemplateInputs::default() };
        let endless = Cell::new(None);
        let ends = Cell::new(true);
        let render = |messages: &[ChatMessage]| {
            let stopped = || ChatError::Raised { message: "it does not end".into() };
            if !ends.get() {
                return Err(stopped());
            }
            match template.render(messages, true, &extra) {
                // One is enough of a template that runs into a limit.
                Err(limit @ (ChatError::TooSlow { .. } | ChatError::TooManySteps { .. })) => {
                    ends.set(false);
                    endless.set(Some(limit));
                    Err(stopped())
                }
                rendered => rendered,
            }
        };
        let user = RoleContent::detect(|content| render(&[message(USER, content)]));
        if let Some(limit) = endless.take() {
            return Err(limit);
        }
        let form = user.or_fallback(RoleContent::Text);
        let other = || message(USER, in_form(form, OTHER.into()));
        let system = RoleContent::detect(|content| render(&[message(SYSTEM, content), other()]));
        let assistant =
            RoleContent::detect(|content| render(&[other(), message(ASSISTANT, content), other()]));
        let tool = RoleContent::detect(|content| {
            let arguments = [json!({}), json!("{}")];
            let talk = arguments.map(|arguments| render(&tool_talk(other(), arguments, content.clone())));
            let [object, text] = talk;
            object.or(text)
        });
        let instruct = |roles: &[&str]| {
            let texts = [SAMPLE, "The second sample"];
            let form = system.or_fallback(form);
            let talk = roles.iter().zip(texts).map(|(role, text)| message(role, in_form(form, text.into())));
            let talk: Vec<ChatMessage> = talk.chain([other()]).collect();
            render(&talk).is_ok_and(|text| texts.iter().take(roles.len()).all(|sample| text.contains(sample)))
        };
        let developer = template.has_word(DEVELOPER, &extra) && instruct(&[DEVELOPER]);
        let both = developer && instruct(&[SYSTEM, DEVELOPER]);
        Ok(AcceptedMessages { system, user, assistant, tool, developer, both })
    }

    /// `messages` in the form that the template takes.
    pub fn adapt_messages(
        &self,
        template: &ChatTemplate,
        messages: &[ChatMessage],
        extra: &TemplateInputs,
    ) -> Result<Vec<ChatMessage>, ChatError> {
        let mut talk = Vec::with_capacity(messages.len());
        for (index, message) in messages.iter().enumerate() {
            let form = self.form_of(template, &message.role, extra);
            if form == RoleContent::Dropped && message.role != USER && !message.text().is_empty() {
                return Err(ChatError::RoleDropped { index, role: message.role.clone() });
            }
            talk.push(self.in_form_of(template, message, form, extra));
        }
        let is_instruction = |message: &ChatMessage| [SYSTEM, DEVELOPER].contains(&message.role.as_str());
        if talk.iter().any(is_instruction) {
            let (instructions, rest) = talk.into_iter().partition(is_instruction);
            talk = self.instructed(instructions, rest);
        }
        Ok(talk)
    }

    fn form_of(&self, template: &ChatTemplate, role: &str, extra: &TemplateInputs) -> RoleContent {
        match role {
            // Where the template has no role for them they go to the user.
            SYSTEM | DEVELOPER => self.system.or_fallback(self.user).or_fallback(RoleContent::Text),
            USER => self.user,
            ASSISTANT => self.assistant.or_fallback(self.user).or_fallback(RoleContent::Unknown),
            TOOL => self.tool,
            // A role of the template's own, or one that it does not have.
            other => RoleContent::detect(|content| {
                let user = message(USER, in_form(self.user, OTHER.into()));
                template.render(&[user, message(other, content)], true, extra)
            }),
        }
    }

    fn in_form_of(
        &self,
        template: &ChatTemplate,
        message: &ChatMessage,
        form: RoleContent,
        extra: &TemplateInputs,
    ) -> ChatMessage {
        let form = form.or_fallback(self.user);
        let has_more = |part: &TemplateValue| {
            let mut names =
                part.try_iter().into_iter().flatten().filter_map(|name| Some(name.as_str()?.to_owned()));
            names.any(|name| !["type", "text"].contains(&name.as_str()) && template.has_word(&name, extra))
        };
        let content = match &message.content {
            MessageContent::Parts(parts) if form == RoleContent::Parts || parts.iter().any(has_more) => {
                message.content.clone()
            }
            MessageContent::None if form == RoleContent::Parts => MessageContent::Parts(Vec::new()),
            MessageContent::None => MessageContent::None,
            MessageContent::Text(_) | MessageContent::Parts(_) => in_form(form, message.text()),
        };
        ChatMessage { content, ..message.clone() }
    }

    /// The instructions as the template takes them, and then `rest`.
    fn instructed(&self, mut instructions: Vec<ChatMessage>, mut rest: Vec<ChatMessage>) -> Vec<ChatMessage> {
        let first = instructions.first().map_or(SYSTEM, |first| first.role.as_str()).to_owned();
        let alone = instructions.iter().any(|message| message.role != first) && !self.both;
        for message in &mut instructions {
            let role = if alone { first.as_str() } else { message.role.as_str() };
            message.role = match (self.system.is_known(), self.developer) {
                (_, false) => SYSTEM,
                (false, true) => DEVELOPER,
                (true, true) => role,
            }
            .to_owned();
        }
        if !self.system.is_known() && !self.developer {
            let text = joined(instructions.iter().map(ChatMessage::text));
            return self.before_the_user(text, rest);
        }
        let of_role = |role: &str| {
            let mut of_role = instructions.iter().filter(|message| message.role == role);
            let first = of_role.next()?.clone();
            let others: Vec<String> = of_role.map(ChatMessage::text).collect();
            if others.is_empty() {
                return Some(first);
            }
            let form = self.system.or_fallback(self.user);
            let text = joined([first.text()].into_iter().chain(others));
            Some(ChatMessage { content: in_form(form, text), ..first })
        };
        let mut talk: Vec<ChatMessage> = [SYSTEM, DEVELOPER].into_iter().filter_map(of_role).collect();
        talk.append(&mut rest);
        talk
    }

    fn before_the_user(&self, text: String, mut talk: Vec<ChatMessage>) -> Vec<ChatMessage> {
        if text.is_empty() {
            return talk;
        }
        let Some(first) = talk.iter_mut().find(|message| message.role == USER) else {
            talk.insert(0, message(USER, in_form(self.user, text)));
            return talk;
        };
        let said = first.text();
        match &mut first.content {
            // The other fields of a part stay.
            MessageContent::Parts(parts) if parts.len() == 1 => {
                let mut part = serde_json::to_value(&parts[0]).unwrap_or_default();
                part["text"] = joined([text, said]).into();
                *parts = vec![TemplateValue::from(Serde(part))];
            }
            MessageContent::Parts(parts) => parts.insert(0, text_part(&(text + BETWEEN))),
            content => *content = in_form(self.user, joined([text, said])),
        }
        talk
    }
}

/// A talk that ends with the result of a tool.
fn tool_talk(question: ChatMessage, arguments: Json, content: MessageContent) -> [ChatMessage; 3] {
    // Nine letters and digits, which some templates demand.
    const ID: &str = "sampleid1";
    let call =
        json!({"id": ID, "type": "function", "function": {"name": "sample_one", "arguments": arguments}});
    let asks =
        with_fields(message(ASSISTANT, MessageContent::Text(String::new())), json!({"tool_calls": [call]}));
    let result = with_fields(message(TOOL, content), json!({"tool_call_id": ID, "name": "sample_one"}));
    [question, asks, result]
}

/// A text as a content of this form.
fn in_form(form: RoleContent, text: String) -> MessageContent {
    match form {
        RoleContent::Parts => MessageContent::Parts(vec![text_part(&text)]),
        RoleContent::Text | RoleContent::Dropped | RoleContent::Unknown => MessageContent::Text(text),
    }
}

fn joined(texts: impl IntoIterator<Item = String>) -> String {
    texts.into_iter().filter(|text| !text.is_empty()).collect::<Vec<_>>().join(BETWEEN)
}

#[cfg(test)]
mod tests;
