//! `tokenizer.json` of the Hugging Face `tokenizers` library.
//!
//! Encoding is the library's. Decoding is ours, from a table of the bytes of each token, because a stream
//! needs the bytes and the library gives whole strings. The table follows the file's `decoder`; a kind of
//! decoder that does not map single tokens to bytes (CTC) belongs to no language model that is compiled here,
//! and is refused.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

use super::growth_bound::{GrowthBound, MOST_TIMES};
use super::table::{EntryKind, TokenTable};
use super::{MAX_ID, TokenId, TokenizerError, brief};

pub struct HfTokenizer {
    inner: tokenizers::Tokenizer,
    table: TokenTable,
    specials: Vec<TokenId>,
    /// Spaces that the decoder drops from the start of a text.
    pub(super) leading_strip: usize,
    byte_level: bool,
    growth: GrowthBound,
}

impl HfTokenizer {
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, TokenizerError> {
        let stated = StatedTokenizer::read(bytes)?;
        stated.check_lengths()?;
        let growth = stated.growth()?;
        let mut inner = contained(|| tokenizers::Tokenizer::from_bytes(bytes)).map_err(json_error)?;
        // Some published files carry the truncation and padding of their training set-up.
        inner.with_truncation(None).map_err(|e| json_error(e.to_string()))?;
        inner.with_padding(None);
        stated.check_added_ids(&inner)?;

        let plan = DecoderSteps::from_tokenizer(&inner)?;
        let (table, specials) = token_table(&inner, &plan)?;
        stated.check_templates(&table)?;
        let DecoderSteps { byte_level, leading_strip, .. } = plan;
        Ok(HfTokenizer { inner, table, specials, leading_strip, byte_level, growth })
    }

    /// Token ids of `text`. `template` adds what the file's post-processor adds (a begin token, usually).
    pub fn encode(&self, text: &str, template: bool) -> Result<Vec<TokenId>, TokenizerError> {
        self.growth.check(text)?;
        let encoding = contained(|| self.inner.encode_fast(text, template))
            .map_err(|reason| TokenizerError::Encode { bytes: text.len(), reason })?;
        // Ids are below MAX_ID, as the table's construction has checked.
        Ok(encoding.get_ids().iter().map(|&id| id as TokenId).collect())
    }

    /// Token ids of two texts as one input, with what the post-processor adds before, between and behind
    /// them; and the type that it gives each token.
    pub fn encode_pair(&self, first: &str, second: &str) -> Result<(Vec<TokenId>, Vec<u32>), TokenizerError> {
        self.growth.check(first)?;
        self.growth.check(second)?;
        let encoding = contained(|| self.inner.encode_fast((first, second), true))
            .map_err(|reason| TokenizerError::Encode { bytes: first.len() + second.len(), reason })?;
        let ids = encoding.get_ids().iter().map(|&id| id as TokenId).collect();
        Ok((ids, encoding.get_type_ids().to_vec()))
    }

    pub(super) fn table(&self) -> &TokenTable {
        &self.table
    }

    /// Tells if tokens are written in the alphabet of bytes.
    pub(super) fn has_byte_level(&self) -> bool {
        self.byte_level
    }

    /// The parts of the file that say how texts become tokens; the model without its vocabulary.
    pub(super) fn parts(&self) -> Option<Value> {
        let value = |part: Result<Value, serde_json::Error>| part.ok();
        let normalizer = value(serde_json::to_value(self.inner.get_normalizer()))?;
        let pre_tokenizer = value(serde_json::to_value(self.inner.get_pre_tokenizer()))?;
        let added: Vec<_> = self.inner.get_added_tokens_decoder().into_values().collect();
        let added_tokens =
            added.iter().map(|token| serde_json::json!({"lstrip": token.lstrip, "rstrip": token.rstrip}));
        let model = match self.inner.get_model() {
            tokenizers::ModelWrapper::BPE(bpe) => serde_json::json!({
                "type": "BPE",
                "byte_fallback": bpe.byte_fallback,
                "continuing_subword_prefix": bpe.continuing_subword_prefix,
                "end_of_word_suffix": bpe.end_of_word_suffix,
            }),
            _ => serde_json::json!({"type": "another"}),
        };
        Some(serde_json::json!({
            "added_tokens": added_tokens.collect::<Vec<_>>(),
            "normalizer": normalizer,
            "pre_tokenizer": pre_tokenizer,
            "model": model,
        }))
    }

    pub fn specials(&self) -> &[TokenId] {
        &self.specials
    }

    pub fn token_to_id(&self, token: &str) -> Option<TokenId> {
        self.inner.token_to_id(token).map(|id| id as TokenId)
    }
}

fn json_error(reason: String) -> TokenizerError {
    TokenizerError::Json { reason: brief(&reason) }
}

/// Runs the library, and makes an error of a panic: it has some `expect`s on what a file says.
fn contained<T>(call: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)) {
        Ok(result) => result.map_err(|e| e.to_string()),
        Err(_) => Err("the tokenizers library stopped at it".to_owned()),
    }
}

/// Parts of the file that the library does not check.
#[derive(Deserialize)]
struct StatedTokenizer {
    #[serde(default)]
    added_tokens: Vec<StatedToken>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    #[serde(default)]
    model: StatedModel,
}

/// The affixes that a model puts around every piece that it looks up.
#[derive(Default, Deserialize)]
#[serde(default)]
struct StatedModel {
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
}

/// Bytes of an added token, and of what a model puts around pieces; published ones have less than a hundred.
const LONGEST_ADDED: usize = 1 << 16;
const LONGEST_AFFIX: usize = 256;
/// Ids that a template may put around a text.
const MOST_TEMPLATE_IDS: usize = 1024;
/// Steps of a decoder.
const MOST_DECODERS: usize = 100;

#[derive(Deserialize)]
struct StatedToken {
    id: u32,
    content: String,
}

impl StatedTokenizer {
    fn read(bytes: &[u8]) -> Result<Self, TokenizerError> {
        // As text, not as bytes: in fields that it skips, serde_json checks the encoding of text only, and
        // the library panics on invalid text.
        let text = std::str::from_utf8(bytes).map_err(|e| json_error(e.to_string()))?;
        serde_json::from_str(text).map_err(|e| json_error(e.to_string()))
    }

    /// Checks lengths before the library reads the texts, which copies them several times.
    fn check_lengths(&self) -> Result<(), TokenizerError> {
        let grows = |step: &str, length: usize, most: usize| {
            let detail = format!("has {length} bytes, {most} are permitted");
            Err(TokenizerError::Grows { step: step.to_owned(), detail })
        };
        if let Some(token) = self.added_tokens.iter().find(|token| token.content.len() > LONGEST_ADDED) {
            let step = format!("added token {} ({:?})", token.id, brief(&token.content));
            return grows(&step, token.content.len(), LONGEST_ADDED);
        }
        let StatedModel { continuing_subword_prefix: prefix, end_of_word_suffix: suffix } = &self.model;
        for (name, text) in [("continuing_subword_prefix", prefix), ("end_of_word_suffix", suffix)] {
            let length = text.as_ref().map_or(0, String::len);
            if length > LONGEST_AFFIX {
                return grows(name, length, LONGEST_AFFIX);
            }
        }
        Ok(())
    }

    fn growth(&self) -> Result<GrowthBound, TokenizerError> {
        let added: Vec<usize> = self.added_tokens.iter().map(|token| token.content.len()).collect();
        GrowthBound::from_steps(&self.normalizer, &self.pre_tokenizer, &added)
    }

    /// The library gives an added token whose id leaves a gap the next free id and only logs it; the model
    /// would then get a token that it never saw.
    fn check_added_ids(&self, inner: &tokenizers::Tokenizer) -> Result<(), TokenizerError> {
        for token in &self.added_tokens {
            let found = inner.token_to_id(&token.content);
            if found != Some(token.id) {
                return Err(TokenizerError::AddedToken {
                    token: brief(&token.content),
                    stated: token.id,
                    found: found.map_or_else(|| "none".to_owned(), |id| id.to_string()),
                });
            }
        }
        Ok(())
    }

    fn check_templates(&self, table: &TokenTable) -> Result<(), TokenizerError> {
        check_template(&self.post_processor, table)?;
        let added = template_ids(&self.post_processor);
        match added <= MOST_TEMPLATE_IDS {
            true => Ok(()),
            false => Err(TokenizerError::Grows {
                step: "post_processor".to_owned(),
                detail: format!("adds {added} ids to a text, {MOST_TEMPLATE_IDS} are permitted"),
            }),
        }
    }
}

/// The most ids that the templates of a post-processor add; a text that is in one more than once counts as
/// too many.
fn template_ids(processor: &Value) -> usize {
    let inner = processor.get("processors").and_then(Value::as_array).into_iter().flatten();
    let inner = inner.map(template_ids).fold(0usize, usize::saturating_add);
    let ids_of = |piece: &Value| {
        let name = piece.pointer("/SpecialToken/id")?.as_str()?;
        Some(processor.get("special_tokens")?.get(name)?.get("ids")?.as_array()?.len())
    };
    let template = |key: &str| {
        let pieces = processor.get(key).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        let is_text =
            |name: &str| pieces.iter().filter(|p| p.pointer("/Sequence/id") == Some(&name.into())).count();
        match is_text("A") > 1 || is_text("B") > 1 {
            true => usize::MAX,
            false => pieces.iter().filter_map(ids_of).fold(0usize, usize::saturating_add),
        }
    };
    inner.saturating_add(template("single").max(template("pair")))
}

/// A template may add any ids to a text; they have to be tokens, and each name that it uses has to have some.
fn check_template(processor: &Value, table: &TokenTable) -> Result<(), TokenizerError> {
    for part in processor.get("processors").and_then(Value::as_array).into_iter().flatten() {
        check_template(part, table)?;
    }
    let Some(names) = processor.get("special_tokens").and_then(Value::as_object) else { return Ok(()) };
    for (name, token) in names {
        for id in token.get("ids").and_then(Value::as_array).into_iter().flatten() {
            let known = id.as_i64().and_then(|id| TokenId::try_from(id).ok()).and_then(|id| table.get(id));
            if known.is_none() {
                return Err(TokenizerError::Template {
                    name: brief(name),
                    problem: format!("adds id {}, which is not a token", brief(&id.to_string())),
                });
            }
        }
    }
    for piece in ["single", "pair"].into_iter().filter_map(|key| processor.get(key)?.as_array()).flatten() {
        if let Some(name) = piece.pointer("/SpecialToken/id").and_then(Value::as_str)
            && !names.contains_key(name)
        {
            return Err(TokenizerError::Template { name: brief(name), problem: "has no ids".to_owned() });
        }
    }
    Ok(())
}

/// The steps of the decoder for each token, and for the start of the text.
#[derive(Debug, Default, PartialEq, Eq)]
struct DecoderSteps {
    byte_level: bool,
    replace: Vec<(String, String)>,
    byte_fallback: bool,
    leading_strip: usize,
    /// Word pieces: what marks a token that goes on with a word. Others begin one, with a space before.
    word_part: Option<String>,
}

impl DecoderSteps {
    fn from_tokenizer(inner: &tokenizers::Tokenizer) -> Result<Self, TokenizerError> {
        let mut plan = DecoderSteps::default();
        let Some(decoder) = inner.get_decoder() else {
            return Err(TokenizerError::Decoder { found: "no decoder".to_owned() });
        };
        let decoder = serde_json::to_value(decoder).map_err(|e| json_error(e.to_string()))?;
        plan.add(&decoder)?;
        Ok(plan)
    }

    fn add(&mut self, decoder: &Value) -> Result<(), TokenizerError> {
        let refuse = || TokenizerError::Decoder { found: brief(&decoder.to_string()) };
        let text = |key: &str| decoder.get(key).and_then(Value::as_str);
        let number = |key: &str| decoder.get(key).and_then(Value::as_u64);
        match text("type").ok_or_else(refuse)? {
            "Sequence" => {
                for part in decoder.get("decoders").and_then(Value::as_array).ok_or_else(refuse)? {
                    self.add(part)?;
                }
            }
            "ByteLevel" => self.byte_level = true,
            "ByteFallback" => self.byte_fallback = true,
            "Fuse" => {}
            "Replace" => {
                let from = decoder.pointer("/pattern/String").and_then(Value::as_str).ok_or_else(refuse)?;
                let to = text("content").ok_or_else(refuse)?;
                self.replace.push((from.to_owned(), to.to_owned()));
                if self.replace.len() > MOST_DECODERS {
                    let detail = format!("has more than {MOST_DECODERS} replacements");
                    return Err(TokenizerError::Grows { step: "decoder".to_owned(), detail });
                }
            }
            "Strip" if text("content") == Some(" ") && number("stop") == Some(0) => {
                self.leading_strip += number("start").ok_or_else(refuse)? as usize;
            }
            "Metaspace" => {
                self.replace.push((text("replacement").ok_or_else(refuse)?.to_owned(), " ".to_owned()));
                if text("prepend_scheme") != Some("never") {
                    self.leading_strip += 1;
                }
            }
            "WordPiece" => {
                self.word_part = Some(text("prefix").ok_or_else(refuse)?.to_owned());
                self.leading_strip += 1;
            }
            _ => return Err(refuse()),
        }
        Ok(())
    }

    /// The bytes of one token. `added` tokens mean their own text, outside the byte alphabet.
    fn bytes(&self, token: &str, added: bool) -> Result<Vec<u8>, TokenizerError> {
        if self.byte_level {
            if !added && let Some(bytes) = token.chars().map(byte_of_char).collect::<Option<Vec<u8>>>() {
                return Ok(bytes);
            }
            return Ok(token.as_bytes().to_vec());
        }
        if let Some(mark) = self.word_part.as_ref().filter(|_| !added) {
            let word = || format!(" {token}");
            return Ok(token.strip_prefix(mark.as_str()).map_or_else(word, str::to_owned).into_bytes());
        }
        let mut text = token.to_owned();
        for (from, to) in &self.replace {
            let grown = text.matches(from.as_str()).count().saturating_mul(to.len());
            if grown.saturating_add(text.len()) > token.len().saturating_mul(MOST_TIMES) + LONGEST_AFFIX {
                let detail =
                    format!("makes more than {MOST_TIMES} times its length of the token {:?}", brief(token));
                return Err(TokenizerError::Grows { step: "decoder".to_owned(), detail });
            }
            text = text.replace(from.as_str(), to);
        }
        Ok(match fallback_byte(&text) {
            Some(byte) if self.byte_fallback && !added => vec![byte],
            _ => text.into_bytes(),
        })
    }
}

/// `<0x0A>` is the byte 10.
pub(super) fn fallback_byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() == 2 && digits.bytes().all(|b| b.is_ascii_hexdigit()) {
        u8::from_str_radix(digits, 16).ok()
    } else {
        None
    }
}

/// GPT-2's printable alphabet for bytes: printable Latin-1 characters are their own bytes, the other 68 bytes
/// are U+0100 and up, in order.
pub(super) fn byte_of_char(c: char) -> Option<u8> {
    let code = u32::from(c);
    match code {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => Some(code as u8),
        0x100..=0x120 => Some((code - 0x100) as u8),
        0x121..=0x142 => Some((code - 0x121 + 0x7f) as u8),
        0x143 => Some(0xad),
        _ => None,
    }
}

fn token_table(
    inner: &tokenizers::Tokenizer,
    plan: &DecoderSteps,
) -> Result<(TokenTable, Vec<TokenId>), TokenizerError> {
    // The library's maps are hash maps: sort, so that a file with two tokens under one id always reads the
    // same.
    let mut tokens: BTreeMap<u32, String> = BTreeMap::new();
    for (token, id) in inner.get_vocab(true) {
        let slot = tokens.entry(id).or_insert_with(|| token.clone());
        if token < *slot {
            *slot = token;
        }
    }
    let added: BTreeMap<u32, (String, bool)> = inner
        .get_added_tokens_decoder()
        .into_iter()
        .map(|(id, token)| (id, (token.content, token.special)))
        .collect();

    let Some((&last, token)) = tokens.last_key_value() else {
        return Err(TokenizerError::Empty);
    };
    if last > MAX_ID {
        return Err(TokenizerError::HugeId { token: brief(token), id: last, limit: MAX_ID });
    }
    let mut table = TokenTable::new(last as usize + 1);
    let mut specials = Vec::new();
    for (&id, token) in &tokens {
        match added.get(&id) {
            Some((content, true)) => {
                table.set(id as usize, &plan.bytes(content, true)?, EntryKind::Special);
                specials.push(id as TokenId);
            }
            Some((content, false)) => table.set(id as usize, &plan.bytes(content, true)?, EntryKind::Text),
            None => table.set(id as usize, &plan.bytes(token, false)?, EntryKind::Text),
        }
    }
    Ok((table, specials))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_alphabet_is_a_bijection() {
        let mut seen = [false; 256];
        for code in 0..0x200u32 {
            if let Some(byte) = char::from_u32(code).and_then(byte_of_char) {
                assert!(!seen[byte as usize], "byte {byte:#x} twice");
                seen[byte as usize] = true;
            }
        }
        assert!(seen.iter().all(|&s| s));
        assert_eq!(byte_of_char('Ġ'), Some(b' '));
        assert_eq!(byte_of_char('Ċ'), Some(b'\n'));
    }

    #[test]
    fn fallback_tokens() {
        assert_eq!(fallback_byte("<0x0A>"), Some(10));
        assert_eq!(fallback_byte("<0xff>"), Some(255));
        for other in ["<0x+1>", "<0xA>", "<0x0A", "0x0A", "<0x0A0>"] {
            assert_eq!(fallback_byte(other), None, "{other}");
        }
    }

    #[test]
    fn word_pieces_begin_words_or_go_on() {
        let mut plan = DecoderSteps::default();
        plan.add(&serde_json::json!({"type": "WordPiece", "prefix": "##", "cleanup": true})).unwrap();
        assert_eq!(plan.leading_strip, 1);
        let text = |token, added| String::from_utf8(plan.bytes(token, added).unwrap()).unwrap();
        assert_eq!([text("em", false), text("##bed", false), text("[CLS]", true)], [" em", "bed", "[CLS]"]);
    }

    #[test]
    fn decoders_that_work_on_texts_are_refused() {
        let mut plan = DecoderSteps::default();
        let ctc = serde_json::json!({"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": true});
        assert!(plan.add(&ctc).unwrap_err().to_string().contains("CTC"));
        let strip_end = serde_json::json!({"type": "Strip", "content": " ", "start": 0, "stop": 1});
        assert!(plan.add(&strip_end).is_err());
        assert_eq!(plan, DecoderSteps::default());
    }
}
