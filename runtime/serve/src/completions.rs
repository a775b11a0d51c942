//! `/v1/completions`.

use mlcc_engine::sampler::{Logprobs, TokenLogprob};
use mlcc_engine::serving::{EngineRequest, RequestSummary, SampledToken};
use mlcc_text::{SpecialTokens, TokenId, Tokenizer, Utf8Stream};
use serde_json::{Map, Value, json};

use crate::chat::with_seeds;
use crate::error::ApiError;
use crate::fields::RequestFields;
use crate::generation::{PreparedRequest, ResponseChoice};
use crate::known_fields;
use crate::response_shape::{ResponseShape, finish_reason, finite};
use crate::sampling::{CommonFields, MOST_LOGPROBS, probabilities};
use crate::served_model::ServedModel;

/// The default of the API.
const USUAL_LENGTH: usize = 16;

/// All forms of `prompt`.
#[derive(serde::Deserialize)]
#[serde(untagged)]
enum PromptInput {
    Text(String),
    Tokens(Vec<TokenId>),
    Texts(Vec<String>),
    TokenLists(Vec<Vec<TokenId>>),
}

pub struct CompletionPrompt {
    pub text: String,
    pub tokens: Vec<TokenId>,
}

/// Completions that were read: everything but the form of their answer.
pub struct CompletionRequest {
    /// `choices` of each prompt, those of one prompt after the other.
    pub requests: Vec<EngineRequest>,
    pub prompts: Vec<CompletionPrompt>,
    pub choices: usize,
    pub stream: bool,
    pub include_usage: bool,
}

/// The probabilities that an answer has.
#[derive(Debug, Clone, Copy, Default)]
pub struct ScoredTokens {
    /// The number of alternatives of each token of the text.
    pub text: Option<usize>,
    /// The same for tokens of the prompt.
    pub prompt: Option<usize>,
}

/// Reads a request and makes its prompts.
pub fn prepare(hosted: &ServedModel, mut fields: RequestFields) -> Result<PreparedRequest, ApiError> {
    let echo = fields.take_field("echo", "true or false")?.unwrap_or(false);
    let logprobs: Option<usize> = fields.take_field("logprobs", "a whole number")?;
    let logprobs = logprobs.or(probabilities(&mut fields)?);
    if logprobs.is_some_and(|top| top > MOST_LOGPROBS) {
        let message = format!("`logprobs` is more than {MOST_LOGPROBS}");
        return Err(ApiError::field("logprobs", "invalid_value", message));
    }
    if logprobs.is_some() && echo && hosted.engine.limits().decoder_start.is_some() {
        let message =
            "this model reads an encoder input, whose tokens have no probabilities: leave out `echo`";
        return Err(ApiError::field("echo", "unsupported", message));
    }
    let scored = ScoredTokens { text: logprobs, prompt: logprobs.filter(|_| echo) };
    let CompletionRequest { requests, prompts, choices, stream, include_usage } =
        read(hosted, fields, Some(USUAL_LENGTH), scored)?;
    let places = vec![TextPlace::default(); requests.len()];
    let special = requests.first().map_or(SpecialTokens::Skip, |request| request.special);
    let shape = CompletionResponse { echo, logprobs: logprobs.is_some(), choices, prompts, special, places };
    Ok(PreparedRequest {
        requests,
        choices,
        stream,
        include_usage,
        shape: Box::new(shape),
        warnings: Vec::new(),
    })
}

/// Reads all other fields of completions; `usual_length` is the most tokens of a text by default.
pub fn read(
    hosted: &ServedModel,
    mut fields: RequestFields,
    usual_length: Option<usize>,
    scored: ScoredTokens,
) -> Result<CompletionRequest, ApiError> {
    let common = CommonFields::take(&mut fields, hosted, usual_length)?;
    let choices = common.choices;
    let prompts = prompts(hosted, &mut fields, choices)?;
    // If all are returned, none is the best.
    fields.drop_neutral("best_of", |value| value.as_u64() == Some(choices as u64));
    fields.finish(&[known_fields::TEXTS, known_fields::COMPLETIONS])?;
    let text = EngineRequest {
        eos: common.ends(&hosted.eos),
        logprobs: scored.text,
        prompt_logprobs: scored.prompt,
        grammar: common.constraint.map(|constraint| constraint.compile(hosted)).transpose()?,
        ..common.text
    };
    let of = |prompt: &CompletionPrompt| {
        with_seeds(&EngineRequest { prompt: prompt.tokens.clone(), ..text.clone() }, choices)
    };
    let requests = prompts.iter().flat_map(of).collect();
    let CommonFields { stream, include_usage, .. } = common;
    Ok(CompletionRequest { requests, prompts, choices, stream, include_usage })
}

fn prompts(
    hosted: &ServedModel,
    fields: &mut RequestFields,
    choices: usize,
) -> Result<Vec<CompletionPrompt>, ApiError> {
    let expected = "a string, a list of token ids, or a list of such";
    let special = fields.take_field("add_special_tokens", "true or false")?.unwrap_or(true);
    let of_text = |text: String| {
        hosted.check_text("prompt", &text)?;
        let tokenizer = &hosted.tokenizer;
        let tokens = if special { tokenizer.encode_prompt(&text) } else { tokenizer.encode(&text) };
        let tokens = tokens.map_err(|e| ApiError::field("prompt", "invalid_value", e.to_string()))?;
        Ok(CompletionPrompt { text, tokens })
    };
    let of_tokens = |tokens: Vec<TokenId>| {
        hosted.check_tokens(tokens.len())?;
        let text = hosted.tokenizer.decode(&tokens, SpecialTokens::Keep);
        Ok(CompletionPrompt { text, tokens: hosted.tokenizer.as_prompt(tokens) })
    };
    let given = fields.take_required("prompt", expected)?;
    let count = match &given {
        PromptInput::Text(_) | PromptInput::Tokens(_) => 1,
        PromptInput::Texts(texts) => texts.len(),
        PromptInput::TokenLists(lists) => lists.len(),
    };
    // Before any of them is made.
    hosted.check_count(count, choices)?;
    let prompts: Vec<CompletionPrompt> = match given {
        PromptInput::Text(text) => vec![of_text(text)?],
        // An empty list of whatever.
        PromptInput::Tokens(tokens) if tokens.is_empty() => Vec::new(),
        PromptInput::Tokens(tokens) => vec![of_tokens(tokens)?],
        PromptInput::Texts(texts) => texts.into_iter().map(of_text).collect::<Result<_, ApiError>>()?,
        PromptInput::TokenLists(lists) => {
            lists.into_iter().map(of_tokens).collect::<Result<_, ApiError>>()?
        }
    };
    match prompts.is_empty() {
        true => Err(ApiError::field("prompt", "invalid_value", "`prompt` is an empty list")),
        false => Ok(prompts),
    }
}

struct CompletionResponse {
    echo: bool,
    logprobs: bool,
    choices: usize,
    prompts: Vec<CompletionPrompt>,
    /// The treatment of control tokens in the text.
    special: SpecialTokens,
    /// The place of the streamed tokens in the text of each choice.
    places: Vec<TextPlace>,
}

/// A place in a text.
#[derive(Debug, Clone, Default)]
struct TextPlace {
    utf8: Utf8Stream,
    /// Characters that are complete.
    chars: usize,
}

impl TextPlace {
    /// The begin of a token with these bytes, in characters: a part of a character begins where the character
    /// does.
    fn push(&mut self, bytes: &[u8]) -> usize {
        let (begin, open) = (self.chars, self.utf8.is_open());
        let Some((&first, rest)) = bytes.split_first() else { return begin };
        let of_first = self.utf8.push(&[first]).chars().count();
        self.chars += of_first + self.utf8.push(rest).chars().count();
        // Open bytes are a character by themselves, if this does not go on with them.
        let goes_on = (0x80..0xc0).contains(&first) && of_first < 2;
        begin + usize::from(open && !goes_on)
    }

    /// Ends the text; the next bytes are another one.
    fn finish(&mut self) {
        self.chars += self.utf8.finish().chars().count();
    }
}

/// Tokens in the form of `logprobs`.
struct LogprobEntries<'t> {
    tokenizer: &'t Tokenizer,
    special: SpecialTokens,
    tokens: Vec<Value>,
    logprobs: Vec<Value>,
    top: Vec<Value>,
    offsets: Vec<Value>,
    place: TextPlace,
}

/// A token by its text, as OpenAI names it: by its bytes where they are no text by themselves.
fn token_name(tokenizer: &Tokenizer, id: TokenId) -> String {
    let bytes = tokenizer.bytes_of(id).unwrap_or_default();
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.iter().fold("bytes:".to_owned(), |name, byte| format!("{name}\\x{byte:02x}")),
    }
}

/// Alternatives by their names. If names are equal, the chosen token has it, or the most probable one; the
/// others are named by their ids.
fn alternatives(tokenizer: &Tokenizer, logprobs: &Logprobs) -> Map<String, Value> {
    let chosen = logprobs.token.id;
    let has_chosen = logprobs.top.iter().any(|token| token.id == chosen);
    let chosen_name = has_chosen.then(|| token_name(tokenizer, chosen));
    let mut entries = Map::new();
    for &TokenLogprob { id, logprob } in &logprobs.top {
        let name = token_name(tokenizer, id);
        let taken = entries.contains_key(&name) || id != chosen && Some(&name) == chosen_name.as_ref();
        entries.insert(if taken { format!("token_id:{id}") } else { name }, finite(logprob).into());
    }
    entries
}

impl<'t> LogprobEntries<'t> {
    fn new(tokenizer: &'t Tokenizer, special: SpecialTokens, place: TextPlace) -> Self {
        let none = Vec::new;
        LogprobEntries {
            tokenizer,
            special,
            tokens: none(),
            logprobs: none(),
            top: none(),
            offsets: none(),
            place,
        }
    }

    /// A token that was written.
    fn push(&mut self, id: TokenId, logprobs: Option<&Logprobs>) {
        let shown = self.special == SpecialTokens::Keep || !self.tokenizer.is_special(id);
        let bytes = self.tokenizer.bytes_of(id).filter(|_| shown).unwrap_or_default();
        self.add(id, bytes, logprobs);
    }

    /// `bytes` are those that the text has of it.
    fn add(&mut self, id: TokenId, bytes: &[u8], logprobs: Option<&Logprobs>) {
        self.offsets.push(self.place.push(bytes).into());
        self.tokens.push(token_name(self.tokenizer, id).into());
        self.logprobs.push(logprobs.map_or(Value::Null, |l| finite(l.token.logprob).into()));
        let top = logprobs.map(|logprobs| alternatives(self.tokenizer, logprobs));
        self.top.push(top.map_or(Value::Null, Value::Object));
    }

    fn prompt(&mut self, prompt: &CompletionPrompt, scored: &[Option<Logprobs>]) {
        let mut rest = prompt.text.as_bytes();
        for (&id, logprobs) in prompt.tokens.iter().zip(scored) {
            let mut bytes = self.tokenizer.bytes_of(id).unwrap_or_default();
            // Begin tokens, and the space that some tokenizers put before a text, are not in it.
            if self.tokenizer.is_special(id) && !rest.starts_with(bytes) {
                bytes = &[];
            } else if self.place.chars == 0 && bytes.first() == Some(&b' ') && rest.first() != Some(&b' ') {
                bytes = &bytes[1..];
            }
            rest = rest.get(bytes.len()..).unwrap_or_default();
            self.add(id, bytes, logprobs.as_ref());
        }
        self.place.finish();
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

impl CompletionResponse {
    fn prompt_of(&self, index: usize) -> Option<&CompletionPrompt> {
        self.prompts.get(index / self.choices.max(1))
    }

    fn streamed(&mut self, index: usize, text: &str, entries: Option<LogprobEntries<'_>>) -> Value {
        if let (Some(entries), Some(place)) = (&entries, self.places.get_mut(index)) {
            *place = entries.place.clone();
        }
        json!({
            "text": text,
            "index": index,
            "logprobs": entries.map(LogprobEntries::value),
            "finish_reason": null,
        })
    }

    fn entries<'t>(&self, tokenizer: &'t Tokenizer, index: usize) -> LogprobEntries<'t> {
        LogprobEntries::new(tokenizer, self.special, self.places.get(index).cloned().unwrap_or_default())
    }
}

impl ResponseShape for CompletionResponse {
    fn id_prefix(&self) -> &'static str {
        "cmpl"
    }

    fn object(&self) -> &'static str {
        "text_completion"
    }

    fn chunk_object(&self) -> &'static str {
        "text_completion"
    }

    fn choice_value(&self, tokenizer: &Tokenizer, index: usize, choice: &ResponseChoice) -> Value {
        let mut entries = LogprobEntries::new(tokenizer, self.special, TextPlace::default());
        let mut text = String::new();
        if let Some(prompt) = self.prompt_of(index).filter(|_| self.echo) {
            text += &prompt.text;
            entries.prompt(prompt, choice.prompt.as_deref().unwrap_or_default());
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

    fn first_chunk(&mut self, index: usize) -> Option<Value> {
        // With logprobs the prompt comes when it has been read.
        let text = self.prompt_of(index).filter(|_| self.echo && !self.logprobs)?.text.clone();
        Some(self.streamed(index, &text, None))
    }

    fn prompt_chunk(
        &mut self,
        tokenizer: &Tokenizer,
        index: usize,
        scored: &[Option<Logprobs>],
    ) -> Option<Value> {
        let mut entries = self.entries(tokenizer, index);
        let prompt = self.prompt_of(index)?;
        entries.prompt(prompt, scored);
        let text = prompt.text.clone();
        Some(self.streamed(index, &text, Some(entries)))
    }

    fn delta_chunk(
        &mut self,
        tokenizer: &Tokenizer,
        index: usize,
        text: &str,
        token: Option<&SampledToken>,
    ) -> Option<Value> {
        let token = token.filter(|_| self.logprobs);
        if text.is_empty() && token.is_none() {
            return None;
        }
        let entries = token.map(|token| {
            let mut entries = self.entries(tokenizer, index);
            entries.push(token.id, token.logprobs.as_ref());
            entries
        });
        Some(self.streamed(index, text, entries))
    }

    fn last_chunks(&mut self, index: usize, finished: &RequestSummary) -> Vec<Value> {
        vec![json!({"text": "", "index": index, "logprobs": null, "finish_reason": finish_reason(finished)})]
    }
}
