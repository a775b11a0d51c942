//! `/embeddings` and `/rerank`: models of texts, which have no engine. A request waits for the one before it.

use std::sync::{Mutex, PoisonError};

use mlcc_engine::embedding::PoolingTask;
use mlcc_engine::embedding::{EmbedOptions, EmbeddingError, EmbeddingModel, EmbeddingVectors};
use mlcc_text::TokenId;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Value, json};

use crate::app_state::AppState;
use crate::error::ApiError;
use crate::fields::{OneOrMany, RequestFields};
use crate::known_fields;
use crate::model_facts::ModelFacts;
use crate::model_registry::without_tag;
use crate::request_memory::MemoryLease;
use crate::served_model::ENCODING;

/// The models of texts of a server, by their names.
#[derive(Default)]
pub struct EmbeddingModels(Vec<HostedEmbedder>);

/// A model of texts. What does not change is known while it works.
pub struct HostedEmbedder {
    pub name: String,
    pub purpose: PoolingTask,
    /// Numbers of a vector.
    pub width: usize,
    pub facts: ModelFacts,
    model: Mutex<EmbeddingModel>,
}

impl EmbeddingModels {
    pub fn new(models: Vec<(String, EmbeddingModel)>) -> EmbeddingModels {
        let hosted = |(name, model): (String, EmbeddingModel)| HostedEmbedder {
            name,
            purpose: model.purpose(),
            width: model.model().text_width(),
            facts: ModelFacts::from_metadata(model.model().metadata()),
            model: Mutex::new(model),
        };
        EmbeddingModels(models.into_iter().map(hosted).collect())
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.all().map(|hosted| hosted.name.as_str())
    }

    pub fn all(&self) -> impl Iterator<Item = &HostedEmbedder> {
        self.0.iter()
    }

    /// The model of a name, which may have a tag.
    pub fn named(&self, name: &str) -> Option<&HostedEmbedder> {
        let named = |name: &str| self.all().find(|hosted| hosted.name == name);
        named(name).or_else(|| named(without_tag(name)))
    }

    /// The route of a model.
    pub fn route(&self, name: &str) -> Option<&'static str> {
        Some(match self.named(name)?.purpose {
            PoolingTask::Embedding => "/v1/embeddings",
            PoolingTask::Scores => "/v1/rerank",
        })
    }

    /// The first model, with its route.
    pub fn first(&self) -> Option<(&str, &'static str)> {
        let name = self.names().next()?;
        Some((name, self.route(name)?))
    }

    /// Runs `work` with the first model, if there is one.
    pub fn with_first<T>(&self, work: impl FnOnce(&mut EmbeddingModel) -> T) -> Option<T> {
        let model = &self.0.first()?.model;
        Some(work(&mut model.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    /// The model that a request names, or the first for this purpose.
    fn find(
        &self,
        app: &AppState,
        name: Option<&str>,
        purpose: PoolingTask,
    ) -> Result<(&str, &Mutex<EmbeddingModel>), ApiError> {
        let found = match name {
            None => self.all().find(|hosted| hosted.purpose == purpose),
            Some(name) => self.named(name),
        };
        if let Some(hosted) = found {
            return Ok((&hosted.name, &hosted.model));
        }
        if let Some(name) = name {
            // One that is not there at all is another error.
            app.models.find_model(Some(name))?;
        }
        let what = match purpose {
            PoolingTask::Embedding => "this is not an embedding model: start the server with one",
            PoolingTask::Scores => "this is not a reranker: start the server with one",
        };
        Err(ApiError::field("model", "no_text_model", what))
    }
}

/// The texts to embed: strings, or texts as token ids.
#[derive(Deserialize)]
#[serde(untagged)]
pub enum EmbeddingInput {
    Texts(OneOrMany<String>),
    Ids(OneOrManyIds),
}

#[derive(Deserialize)]
#[serde(untagged)]
pub enum OneOrManyIds {
    One(Vec<TokenId>),
    Many(Vec<Vec<TokenId>>),
}

impl EmbeddingInput {
    /// The number of texts, and of their bytes or ids.
    fn size(&self) -> (usize, usize) {
        match self {
            EmbeddingInput::Texts(OneOrMany::One(text)) => (1, text.len()),
            EmbeddingInput::Texts(OneOrMany::Many(texts)) => {
                (texts.len(), texts.iter().map(String::len).sum())
            }
            EmbeddingInput::Ids(OneOrManyIds::One(ids)) => (1, ids.len()),
            EmbeddingInput::Ids(OneOrManyIds::Many(lists)) => (lists.len(), lists.iter().map(Vec::len).sum()),
        }
    }
}

/// An answer of a model of texts, as JSON, with what is counted of it.
pub struct MeteredAnswer {
    pub text: String,
    pub model: String,
    /// Tokens that were read, where the answer tells them.
    pub tokens: Option<u64>,
}

/// Bytes of a text besides its tokens and its vector: its entries in lists, and the frame of its entry in the
/// answer.
const EACH: usize = 160;
/// Bytes of a number of a vector: as it is, and as text that grows.
const NUMBER: usize = 4 + 2 * 14;

/// Texts that are to become vectors.
pub struct EmbeddingRequest {
    /// The name of the model.
    pub model: Option<String>,
    pub input: EmbeddingInput,
    pub dim: Option<usize>,
    /// The name of a prompt of the model.
    pub prompt: Option<String>,
}

/// Vectors, and the model that made them.
pub struct EmbeddedTexts {
    pub model: String,
    pub vectors: EmbeddingVectors,
}

impl EmbeddingRequest {
    /// Makes the vectors, for which `lease` grows: as they are, and as text.
    pub fn run(self, app: &AppState, lease: &mut MemoryLease) -> Result<EmbeddedTexts, ApiError> {
        app.check_ready()?;
        let (name, model) = app.embedding_models.find(app, self.model.as_deref(), PoolingTask::Embedding)?;
        let (count, bytes) = self.input.size();
        let mut model = model.lock().unwrap_or_else(PoisonError::into_inner);
        let vector = model.model().text_width().saturating_mul(NUMBER);
        let texts = count.saturating_mul(vector.saturating_add(EACH));
        app.server.memory.extend_lease(lease, texts.saturating_add(bytes.saturating_mul(ENCODING)))?;
        let how = EmbedOptions { prompt: self.prompt.as_deref(), prompt_text: None, dim: self.dim };
        let vectors = match self.input {
            EmbeddingInput::Texts(texts) => {
                let texts = texts.into_vec();
                model.embed(&texts.iter().map(String::as_str).collect::<Vec<_>>(), &how)
            }
            EmbeddingInput::Ids(OneOrManyIds::One(ids)) => model.embed_ids(&[ids], &how),
            EmbeddingInput::Ids(OneOrManyIds::Many(ids)) => model.embed_ids(&ids, &how),
        };
        let vectors = vectors.map_err(|error| refused("input", &error))?;
        Ok(EmbeddedTexts { model: name.to_owned(), vectors })
    }
}

/// The form of `/v1/embeddings` of OpenAI.
pub fn embed(
    app: &AppState,
    mut fields: RequestFields,
    lease: &mut MemoryLease,
) -> Result<MeteredAnswer, ApiError> {
    let model: Option<String> = fields.take_field("model", "the name of the model")?;
    let input: EmbeddingInput =
        fields.take_required("input", "a string, a list of strings, or token ids of texts")?;
    let dim: Option<usize> = fields.take_field("dimensions", "a number")?;
    let format: Option<String> = fields.take_field("encoding_format", "float or base64")?;
    let base64 = match format.as_deref() {
        None | Some("float") => false,
        Some("base64") => true,
        Some(other) => {
            let message = format!("`encoding_format` is {other:.40}, expected float or base64");
            return Err(ApiError::field("encoding_format", "invalid_value", message));
        }
    };
    let prompt: Option<String> = fields.take_field("prompt_name", "the name of a prompt of the model")?;
    fields.finish(&[known_fields::VECTORS])?;
    let EmbeddedTexts { model, vectors } = EmbeddingRequest { model, input, dim, prompt }.run(app, lease)?;
    let data = EmbeddingRows { vectors: &vectors, base64 };
    let (object, usage) = ("list", usage(&vectors));
    let text = serde_json::to_string(&EmbeddingsResponse { object, data, model: &model, usage });
    let text = text.map_err(|error| ApiError::internal(error.to_string()))?;
    Ok(MeteredAnswer { text, model, tokens: Some(vectors.tokens as u64) })
}

fn usage(vectors: &EmbeddingVectors) -> Value {
    json!({"prompt_tokens": vectors.tokens, "total_tokens": vectors.tokens})
}

#[derive(Serialize)]
struct EmbeddingsResponse<'a> {
    object: &'a str,
    data: EmbeddingRows<'a>,
    model: &'a str,
    usage: Value,
}

/// Vectors that are written in order.
struct EmbeddingRows<'a> {
    vectors: &'a EmbeddingVectors,
    base64: bool,
}

#[derive(Serialize)]
struct EmbeddingRow<'a> {
    object: &'a str,
    index: usize,
    embedding: EncodedEmbedding<'a>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum EncodedEmbedding<'a> {
    Base64(String),
    Numbers(&'a [f32]),
}

impl Serialize for EmbeddingRows<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let of = |(index, row)| {
            let embedding = if self.base64 {
                EncodedEmbedding::Base64(to_base64(row))
            } else {
                EncodedEmbedding::Numbers(row)
            };
            EmbeddingRow { object: "embedding", index, embedding }
        };
        serializer.collect_seq(self.vectors.rows().enumerate().map(of))
    }
}

/// The form that Jina's and Cohere's clients send.
pub fn rerank(
    app: &AppState,
    mut fields: RequestFields,
    lease: &mut MemoryLease,
) -> Result<MeteredAnswer, ApiError> {
    let name: Option<String> = fields.take_field("model", "the name of the model")?;
    let query: String = fields.take_required("query", "a string")?;
    let documents: Vec<String> = fields.take_required("documents", "a list of strings")?;
    let top: Option<usize> = fields.take_field("top_n", "a number")?;
    let texts: bool = fields.take_field("return_documents", "true or false")?.unwrap_or(false);
    fields.finish(&[known_fields::VECTORS])?;
    app.check_ready()?;
    let (name, model) = app.embedding_models.find(app, name.as_deref(), PoolingTask::Scores)?;
    // The query is read with each document.
    let read = documents.iter().map(|document| query.len().saturating_add(document.len()));
    let longest = read.clone().max().unwrap_or(0).saturating_mul(ENCODING);
    let tokens = read.fold(0, usize::saturating_add).saturating_mul(size_of::<TokenId>());
    let answers = documents.len().saturating_mul(EACH + 4 * size_of::<Value>());
    app.server.memory.extend_lease(lease, longest.saturating_add(tokens).saturating_add(answers))?;
    let mut model = model.lock().unwrap_or_else(PoisonError::into_inner);
    let borrowed: Vec<&str> = documents.iter().map(String::as_str).collect();
    let scores = model.rerank(&query, &borrowed).map_err(|error| refused("documents", &error))?;
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
    order.truncate(top.unwrap_or(usize::MAX));
    let results = order.into_iter().map(|index| {
        let mut row = json!({"index": index, "relevance_score": scores[index]});
        if texts {
            row["document"] = json!({"text": documents[index]});
        }
        row
    });
    let text = json!({"model": name, "results": results.collect::<Vec<_>>()}).to_string();
    Ok(MeteredAnswer { text, model: name.to_owned(), tokens: None })
}

fn refused(field: &str, error: &EmbeddingError) -> ApiError {
    match error {
        EmbeddingError::Dim { .. } => ApiError::field("dimensions", "invalid_value", error.to_string()),
        EmbeddingError::UnknownPrompt { .. } => {
            ApiError::field("prompt_name", "invalid_value", error.to_string())
        }
        EmbeddingError::NoEmbeddings | EmbeddingError::NoReranker { .. } | EmbeddingError::Template(_) => {
            ApiError::field("model", "no_text_model", error.to_string())
        }
        EmbeddingError::Runtime(_)
        | EmbeddingError::Tokenizer { .. }
        | EmbeddingError::TokenType { .. }
        | EmbeddingError::TokenId { .. }
        | EmbeddingError::Chat { .. }
        | EmbeddingError::NoInstruction
        | EmbeddingError::Empty { .. } => ApiError::field(field, "invalid_value", error.to_string()),
    }
}

/// Little-endian f32 in base64 with padding, as OpenAI's clients ask for.
fn to_base64(row: &[f32]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let bytes: Vec<u8> = row.iter().flat_map(|x| x.to_le_bytes()).collect();
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for three in bytes.chunks(3) {
        let bits =
            three.iter().fold(0u32, |bits, &byte| bits << 8 | u32::from(byte)) << (8 * (3 - three.len()));
        for digit in 0..4 {
            let shown = digit <= three.len();
            let at = (bits >> (18 - 6 * digit)) as usize & 63;
            text.push(if shown { char::from(DIGITS[at]) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_of_floats() {
        assert_eq!(to_base64(&[1.0]), "AACAPw==");
        assert_eq!(to_base64(&[1.0, -2.0]), "AACAPwAAAMA=");
        assert_eq!(to_base64(&[0.0, 0.0, 0.0]), "AAAAAAAAAAAAAAAA");
    }
}
