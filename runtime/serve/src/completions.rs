//! `/v1/completions`.

use mlcc_engine::sampler::{Logprobs, TokenLogprob};
use mlcc_engine::serving::{Chosen, Finished, TextRequest};
use mlcc_engine::{SpecialTokens, TokenId, Tokenizer};
use serde_json::{Map, Value, json};

use crate::chat::with_seeds;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::hosted::Hosted;
use crate::known_fields;
use crate::sampling::{Common, MOST_LOGPROBS, probabilities};
use crate::shape::{Shape, finish_reason, finite, token_text};
use crate::texts::{Choice, Work};

/// As the API has it.
const USUAL_LENGTH: usize = 16;

/// All forms of `prompt`.
#[derive(serde::Deserialize)]
#[serde(untagged)]
enum Prompts {
    Text(String),
    Tokens(Vec<TokenId>),
    Texts(Vec<String>),
    TokenLists(Vec<Vec<TokenId>>),
}

struct Prompt {
    text: String,
    tokens: Vec<TokenId>,
}

/// Reads a request and makes its prompts.
pub fn prepare(hosted: &Hosted, mut fields: Fields) -> Result<Work, ApiError> {
    let common = Common::take(&mut fields, hosted, Some(USUAL_LENGTH))?;
    let choices = common.choices;
    let prompts = prompts(hosted, &mut fields, choices)?;
    let echo = fields.take("echo", "true or false")?.unwrap_or(false);
    let logprobs: Option<usize> = fields.take("logprobs", "a whole number")?;
    let logprobs = logprobs.or(probabilities(&mut fields)?);
    if logprobs.is_some_and(|top| top > MOST_LOGPROBS) {
        let message = format!("`logprobs` is more than {MOST_LOGPROBS}");
        return Err(ApiError::field("logprobs", "invalid_value", message));
    }
    // Where all are told, none is better.
    fields.forget("best_of", |value| value.as_u64() == Some(choices as u64));
    fields.finish(&[known_fields::TEXTS, known_fields::COMPLETIONS])?;
    if logprobs.is_some() && echo && hosted.engine.limits().decoder_start.is_some() {
        let message =
            "tokens of a source text have no probabilities, of which this model reads one: leave out `echo`";
        return Err(ApiError::field("echo", "unsupported", message));
    }
    let text = TextRequest {
        eos: common.ends(&hosted.eos),
        logprobs,
        prompt_logprobs: logprobs.filter(|_| echo),
        grammar: common.constraint.map(|constraint| constraint.compile(hosted)).transpose()?,
        ..common.text
    };
    let of =
        |prompt: &Prompt| with_seeds(&TextRequest { prompt: prompt.tokens.clone(), ..text.clone() }, choices);
    let requests: Vec<TextRequest> = prompts.iter().flat_map(of).collect();
    let offsets = vec![0; requests.len()];
    let shape = Completion { echo, logprobs: logprobs.is_some(), choices, prompts, offsets };
    Ok(Work {
        requests,
        choices,
        stream: common.stream,
        include_usage: common.include_usage,
        shape: Box::new(shape),
        warnings: Vec::new(),
    })
}

fn prompts(hosted: &Hosted, fields: &mut Fields, choices: usize) -> Result<Vec<Prompt>, ApiError> {
    let expected = "a string, a list of token ids, or a list of such";
    let special = fields.take("add_special_tokens", "true or false")?.unwrap_or(true);
    let of_text = |text: String| {
        hosted.check_text("prompt", &text)?;
        let tokenizer = &hosted.tokenizer;
        let tokens = if special { tokenizer.encode_prompt(&text) } else { tokenizer.encode(&text) };
        let tokens = tokens.map_err(|e| ApiError::field("prompt", "invalid_value", e.to_string()))?;
        Ok(Prompt { text, tokens })
    };
    let of_tokens = |tokens: Vec<TokenId>| {
        hosted.check_tokens(tokens.len())?;
        let text = hosted.tokenizer.decode(&tokens, SpecialTokens::Keep);
        Ok(Prompt { text, tokens: hosted.tokenizer.as_prompt(tokens) })
    };
    let given = fields.need("prompt", expected)?;
    let count = match &given {
        Prompts::Text(_) | Prompts::Tokens(_) => 1,
        Prompts::Texts(texts) => texts.len(),
        Prompts::TokenLists(lists) => lists.len(),
    };
    // Before any of them is made.
    hosted.check_count(count, choices)?;
    let prompts: Vec<Prompt> = match given {
        Prompts::Text(text) => vec![of_text(text)?],
        // An empty list of whatever.
        Prompts::Tokens(tokens) if tokens.is_empty() => Vec::new(),
        Prompts::Tokens(tokens) => vec![of_tokens(tokens)?],
        Prompts::Texts(texts) => texts.into_iter().map(of_text).collect::<Result<_, ApiError>>()?,
        Prompts::TokenLists(lists) => lists.into_iter().map(of_tokens).collect::<Result<_, ApiError>>()?,
    };
    match prompts.is_empty() {
        true => Err(ApiError::field("prompt", "invalid_value", "`prompt` is an empty list")),
        false => Ok(prompts),
    }
}

struct Completion {
    echo: bool,
    logprobs: bool,
    choices: usize,
    prompts: Vec<Prompt>,
    /// Characters of the tokens that were streamed, of each choice.
    offsets: Vec<usize>,
}

/// Tokens in the form of `logprobs`.
struct Entries<'t> {
    tokenizer: &'t Tokenizer,
    tokens: Vec<Value>,
    logprobs: Vec<Value>,
    top: Vec<Value>,
    offsets: Vec<Value>,
    offset: usize,
}

impl<'t> Entries<'t> {
    fn new(tokenizer: &'t Tokenizer, offset: usize) -> Self {
        let none = Vec::new;
        Entries { tokenizer, tokens: none(), logprobs: none(), top: none(), offsets: none(), offset }
    }

    fn push(&mut self, id: TokenId, logprobs: Option<&Logprobs>) {
        let text = token_text(self.tokenizer, id);
        self.offsets.push(self.offset.into());
        self.offset += text.chars().count();
        self.tokens.push(text.into());
        self.logprobs.push(logprobs.map_or(Value::Null, |l| finite(l.token.logprob).into()));
        let entry =
            |token: &TokenLogprob| (token_text(self.tokenizer, token.id), Value::from(finite(token.logprob)));
        let top = logprobs.map(|l| l.top.iter().map(entry).collect::<Map<String, Value>>());
        self.top.push(top.map_or(Value::Null, Value::Object));
    }

    fn prompt(&mut self, tokens: &[TokenId], scored: &[Option<Logprobs>]) {
        for (&id, logprobs) in tokens.iter().zip(scored) {
            self.push(id, logprobs.as_ref());
        }
    }

    fn value(self) -> Value {
        json!({
            "tokens": self.tokens,
            "token_logprobs": self.logprobs,
            "top_logprobs": self.top,
            "text_offset": self.offsets,
        })
    }
}

impl Completion {
    fn prompt_of(&self, index: usize) -> Option<&Prompt> {
        self.prompts.get(index / self.choices.max(1))
    }

    fn streamed(&mut self, index: usize, text: &str, entries: Option<Entries<'_>>) -> Value {
        if let (Some(entries), Some(offset)) = (&entries, self.offsets.get_mut(index)) {
            *offset = entries.offset;
        }
        json!({
            "text": text,
            "index": index,
            "logprobs": entries.map(Entries::value),
            "finish_reason": null,
        })
    }

    fn offset(&self, index: usize) -> usize {
        self.offsets.get(index).copied().unwrap_or(0)
    }
}

impl Shape for Completion {
    fn id_prefix(&self) -> &'static str {
        "cmpl"
    }

    fn object(&self) -> &'static str {
        "text_completion"
    }

    fn chunk_object(&self) -> &'static str {
        "text_completion"
    }

    fn whole(&self, tokenizer: &Tokenizer, index: usize, choice: &Choice) -> Value {
        let mut entries = Entries::new(tokenizer, 0);
        let mut text = String::new();
        if let Some(prompt) = self.prompt_of(index).filter(|_| self.echo) {
            text += &prompt.text;
            entries.prompt(&prompt.tokens, choice.prompt.as_deref().unwrap_or_default());
        }
        text += &choice.text;
        choice.tokens.iter().for_each(|token| entries.push(token.id, token.logprobs.as_ref()));
        json!({
            "text": text,
            "index": index,
            "logprobs": self.logprobs.then(|| entries.value()),
            "finish_reason": choice.finished.as_ref().map(finish_reason),
        })
    }

    fn first(&mut self, index: usize) -> Option<Value> {
        // With logprobs the prompt comes when it has been read.
        let text = self.prompt_of(index).filter(|_| self.echo && !self.logprobs)?.text.clone();
        Some(self.streamed(index, &text, None))
    }

    fn prompt(&mut self, tokenizer: &Tokenizer, index: usize, scored: &[Option<Logprobs>]) -> Option<Value> {
        let mut entries = Entries::new(tokenizer, self.offset(index));
        let prompt = self.prompt_of(index)?;
        entries.prompt(&prompt.tokens, scored);
        let text = prompt.text.clone();
        Some(self.streamed(index, &text, Some(entries)))
    }

    fn piece(
        &mut self,
        tokenizer: &Tokenizer,
        index: usize,
        text: &str,
        token: Option<&Chosen>,
    ) -> Option<Value> {
        let token = token.filter(|_| self.logprobs);
        if text.is_empty() && token.is_none() {
            return None;
        }
        let entries = token.map(|token| {
            let mut entries = Entries::new(tokenizer, self.offset(index));
            entries.push(token.id, token.logprobs.as_ref());
            entries
        });
        Some(self.streamed(index, text, entries))
    }

    fn last(&mut self, index: usize, finished: &Finished) -> Vec<Value> {
        vec![json!({"text": "", "index": index, "logprobs": null, "finish_reason": finish_reason(finished)})]
    }
}
