//! The options of a text, from a dict: every one is checked, and one that is not known is refused.

use std::time::{Duration, Instant};

use mlcc_engine::serving::EngineRequest;
use mlcc_engine::SamplingOverrides;
use mlcc_text::{GrammarSpec, SpecialTokens, TokenId};
use mlcc_serve::ServedModel;
use pyo3::conversion::FromPyObjectOwned;
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyString};

use crate::errors::{grammar, invalid, without_gil};

/// A text, or token ids.
pub enum PythonPrompt {
    Text(String),
    Ids(Vec<TokenId>),
}

impl PythonPrompt {
    pub fn take(prompt: &Bound<'_, PyAny>) -> PyResult<PythonPrompt> {
        if let Ok(text) = prompt.cast::<PyString>() {
            return Ok(PythonPrompt::Text(text.to_cow()?.into_owned()));
        }
        if prompt.is_instance_of::<PyBytes>() {
            return Err(PyTypeError::new_err(
                "prompt is bytes, expected a string, or a sequence of token ids",
            ));
        }
        Ok(PythonPrompt::Ids(value(prompt, "prompt", "a string, or a sequence of token ids")?))
    }

    pub fn ids(self, hosted: &ServedModel) -> PyResult<Vec<TokenId>> {
        match self {
            PythonPrompt::Ids(ids) => Ok(hosted.tokenizer.as_prompt(ids)),
            PythonPrompt::Text(text) => {
                hosted.tokenizer.encode_prompt(&text).map_err(|error| invalid(error.to_string()))
            }
        }
    }
}

/// Extracts a value; the error names the argument and what was expected.
pub fn value<'py, T: FromPyObjectOwned<'py>>(
    from: &Bound<'py, PyAny>,
    name: &str,
    expected: &str,
) -> PyResult<T> {
    let wrong = |error: PyErr| {
        let shown = from.repr().map_or_else(|_| "?".to_owned(), |text| text.to_string());
        let shown: String = shown.chars().take(80).collect();
        match error.is_instance_of::<PyOverflowError>(from.py()) {
            true => invalid(format!("{name} is {shown}, expected {expected}")),
            false => PyTypeError::new_err(format!("{name} is {shown}, expected {expected}")),
        }
    };
    from.extract::<T>().map_err(|error| wrong(error.into()))
}

/// A dict of options whose values are taken one by one.
struct OptionReader<'a, 'py> {
    dict: &'a Bound<'py, PyDict>,
    known: Vec<&'static str>,
}

impl<'py> OptionReader<'_, 'py> {
    /// `None` and what is not there are the same.
    fn take<T: FromPyObjectOwned<'py>>(&mut self, name: &'static str, expected: &str) -> PyResult<Option<T>> {
        self.known.push(name);
        match self.dict.get_item(name)?.filter(|found| !found.is_none()) {
            None => Ok(None),
            Some(found) => value(&found, name, expected).map(Some),
        }
    }

    fn finish(self) -> PyResult<()> {
        for key in self.dict.keys() {
            let key = key.extract::<String>()?;
            if !self.known.contains(&key.as_str()) {
                let known = self.known.join(", ");
                return Err(PyTypeError::new_err(format!("there is no option {key}; options are {known}")));
            }
        }
        Ok(())
    }
}

const COUNT: &str = "a whole number, 0 or more";
const NUMBER: &str = "a number";
const YES: &str = "True or False";

/// One string, or several.
fn stop_strings(found: Option<Bound<'_, PyAny>>) -> PyResult<Vec<String>> {
    let Some(found) = found else { return Ok(Vec::new()) };
    match found.cast::<PyString>() {
        Ok(text) => Ok(vec![text.to_cow()?.into_owned()]),
        Err(_) => value(&found, "stop", "a string, or a list of strings"),
    }
}

fn sampling(options: &mut OptionReader<'_, '_>) -> PyResult<SamplingOverrides> {
    Ok(SamplingOverrides {
        temperature: options.take("temperature", NUMBER)?,
        top_k: options.take("top_k", COUNT)?,
        top_p: options.take("top_p", NUMBER)?,
        min_p: options.take("min_p", NUMBER)?,
        repeat_penalty: options.take("repeat_penalty", NUMBER)?,
        repeat_last_n: options.take("repeat_last_n", "a whole number, -1 or more")?,
        presence_penalty: options.take("presence_penalty", NUMBER)?,
        frequency_penalty: options.take("frequency_penalty", NUMBER)?,
        seed: options.take("seed", COUNT)?,
        ..SamplingOverrides::default()
    })
}

fn constraint(options: &mut OptionReader<'_, '_>) -> PyResult<Option<GrammarSpec>> {
    let text = "a string";
    let schema: Option<String> = options.take("json_schema", "a JSON schema")?;
    let schema =
        schema.map(|schema| serde_json::from_str(&schema).map_err(|error| invalid(error.to_string())));
    let object = options.take::<bool>("json_object", YES)?.unwrap_or(false);
    let all = [
        schema.transpose()?.map(GrammarSpec::JsonSchema),
        object.then_some(GrammarSpec::JsonObject),
        options.take("regex", text)?.map(GrammarSpec::Regex),
        options.take("choice", "a list of strings")?.map(GrammarSpec::Choice),
        options.take("grammar", text)?.map(GrammarSpec::Lark),
    ];
    let mut all = all.into_iter().flatten();
    match (all.next(), all.next()) {
        (_, Some(_)) => Err(invalid("choose one of json_schema, json_object, regex, choice and grammar")),
        (first, None) => Ok(first),
    }
}

fn seconds(found: Option<f64>) -> PyResult<Option<Instant>> {
    let Some(seconds) = found else { return Ok(None) };
    let time = Duration::try_from_secs_f64(seconds);
    let time = time.map_err(|_| invalid(format!("timeout is {seconds}, expected seconds, 0 or more")))?;
    Ok(Instant::now().checked_add(time))
}

const ADAPTER: &str = "adapter";

/// The name of the adapter that a text is written with.
pub fn adapter(options: &Bound<'_, PyDict>) -> PyResult<Option<String>> {
    OptionReader { dict: options, known: Vec::new() }.take(ADAPTER, "the name of an adapter")
}

/// The request of a text. Tokenizing and compiling a grammar are done without the GIL.
pub fn request(
    py: Python<'_>,
    hosted: &ServedModel,
    prompt: &Bound<'_, PyAny>,
    options: &Bound<'_, PyDict>,
) -> PyResult<EngineRequest> {
    let prompt = PythonPrompt::take(prompt)?;
    let mut options = OptionReader { dict: options, known: Vec::new() };
    let sampling = hosted.sampling.clone().with(&sampling(&mut options)?);
    let spec = constraint(&mut options)?;
    let bias: Option<std::collections::BTreeMap<TokenId, f32>> =
        options.take("logit_bias", "a dict of token ids to numbers")?;
    let special = options.take("special", YES)?.unwrap_or(false);
    let ends = !options.take("ignore_eos", YES)?.unwrap_or(false);
    let request = EngineRequest {
        bias: bias.into_iter().flatten().collect(),
        min_tokens: options.take("min_tokens", COUNT)?.unwrap_or(0),
        max_tokens: options.take("max_tokens", COUNT)?,
        eos: if ends { hosted.eos.clone() } else { Vec::new() },
        special: if special { SpecialTokens::Keep } else { SpecialTokens::Skip },
        stop: stop_strings(options.take("stop", "a string, or a list of strings")?)?,
        logprobs: options.take("logprobs", COUNT)?,
        priority: options.take("priority", "a whole number")?.unwrap_or(0),
        deadline: seconds(options.take("timeout", "seconds")?)?,
        use_prefix_cache: options.take("reuse", YES)?.unwrap_or(true),
        ..EngineRequest::new(Vec::new(), sampling)
    };
    options.known.push(ADAPTER);
    options.finish()?;
    without_gil(py, move || {
        let prompt = prompt.ids(hosted)?;
        let spec =
            spec.map(|spec| hosted.compile_grammar(&spec).map_err(|error| grammar(&error))).transpose()?;
        Ok(EngineRequest { prompt, grammar: spec, ..request })
    })
}
