//! The tests that a run of `mlcc bench` makes: those that are requested, else the usual ones as far as the
//! model has room.

use mlcc_runtime::Model;

use crate::error::BenchError;
use crate::limits::SequenceLimits;
use crate::options::BenchOptions;
use crate::test::{BenchTest, TextCounts};

/// Tokens of the usual tests.
const PROMPT: usize = 512;
const GENERATED: usize = 128;

/// Texts of the usual test, of a model that makes vectors of them.
const TEXTS: TextCounts = TextCounts { texts: 64, tokens: 256 };

/// The room of an artifact.
#[derive(Clone, Copy)]
pub enum ArtifactCapacity {
    /// It was not read yet.
    Unknown,
    Sequences(SequenceLimits),
    /// It makes vectors of texts.
    Texts(EmbeddingCapacity),
}

/// The room of a model that makes vectors.
#[derive(Clone, Copy)]
pub struct EmbeddingCapacity {
    /// Tokens of a text.
    tokens: usize,
    /// Texts and tokens of a call.
    call: TextCounts,
}

impl EmbeddingCapacity {
    fn test(self, of: TextCounts) -> BenchTest {
        BenchTest::Texts {
            counts: of,
            texts_per_call: (self.call.tokens / of.tokens).clamp(1, self.call.texts.max(1)),
        }
    }
}

impl ArtifactCapacity {
    pub fn from_model(model: &Model) -> ArtifactCapacity {
        match model.text_width() {
            0 => ArtifactCapacity::Sequences(SequenceLimits::from_model(model)),
            _ => ArtifactCapacity::Texts(EmbeddingCapacity {
                tokens: model.max_text_tokens(),
                call: TextCounts { texts: model.plan().batch as usize, tokens: model.max_step_tokens() },
            }),
        }
    }
}

pub fn plan_tests(options: &BenchOptions, room: ArtifactCapacity) -> Result<Vec<BenchTest>, BenchError> {
    match room {
        ArtifactCapacity::Texts(room) => text_tests(options, room),
        ArtifactCapacity::Sequences(_) if !options.texts.is_empty() => Err(BenchError::usage(
            "--texts is for embedding models; this one generates text: give -p, -n or --mixed",
        )),
        ArtifactCapacity::Sequences(limits) => sequence_tests(options, limits),
        ArtifactCapacity::Unknown if !options.texts.is_empty() => Ok(Vec::new()),
        ArtifactCapacity::Unknown => sequence_tests(options, SequenceLimits::default()),
    }
}

fn text_tests(options: &BenchOptions, room: EmbeddingCapacity) -> Result<Vec<BenchTest>, BenchError> {
    let generates = [options.n_prompt.is_some(), options.n_gen.is_some(), !options.mixed.is_empty()];
    if generates.contains(&true) {
        return Err(BenchError::usage(
            "this is an embedding model, which generates no text: give --texts 64x256 instead of -p, -n and --mixed",
        ));
    }
    if options.texts.is_empty() {
        return Ok(vec![room.test(TextCounts { tokens: TEXTS.tokens.min(room.tokens), ..TEXTS })]);
    }
    for of in &options.texts {
        check_fits(format_args!("--texts {}x{}", of.texts, of.tokens), of.tokens, Some(room.tokens))?;
    }
    Ok(options.texts.iter().map(|&of| room.test(of)).collect())
}

fn sequence_tests(options: &BenchOptions, limits: SequenceLimits) -> Result<Vec<BenchTest>, BenchError> {
    let mut tests = Vec::new();
    match &options.n_prompt {
        None => tests.push(BenchTest::Prompt(limits.prompt.map_or(PROMPT, |most| PROMPT.min(most)))),
        Some(lengths) => {
            for &n in lengths.iter().filter(|&&n| n > 0) {
                check_fits(format_args!("-p/--n-prompt {n}"), n, limits.prompt)?;
                tests.push(BenchTest::Prompt(n));
            }
        }
    }
    for tokens in generated_tokens(options, limits)? {
        for &depth in &options.depth {
            let what = match depth {
                0 => format!("-n/--n-gen {tokens}"),
                _ => format!("-n/--n-gen {tokens} after -d/--depth {depth}"),
            };
            check_fits(what, depth.saturating_add(tokens), limits.context)?;
            let sequences = options.batch.iter().map(|&b| usize::from(b));
            tests.extend(sequences.map(|sequences| BenchTest::Generate { tokens, depth, sequences }));
        }
    }
    for &mix in &options.mixed {
        check_depths(options, limits)?;
        check_fits(
            format_args!("--mixed {}+{}", mix.decode_tokens, mix.prefill_tokens),
            mix.prefill_tokens,
            limits.prompt,
        )?;
        tests.extend(options.depth.iter().map(|&depth| BenchTest::Mixed { mix, depth }));
    }
    match tests.is_empty() {
        true => Err(BenchError::usage("nothing to measure: give -p N or -n N above 0, or --mixed")),
        false => Ok(tests),
    }
}

/// The numbers of tokens to generate.
fn generated_tokens(options: &BenchOptions, limits: SequenceLimits) -> Result<Vec<usize>, BenchError> {
    if let Some(asked) = &options.n_gen {
        let lengths: Vec<usize> = asked.iter().copied().filter(|&n| n > 0).collect();
        if !lengths.is_empty() {
            check_depths(options, limits)?;
        }
        return Ok(lengths);
    }
    check_depths(options, limits)?;
    // The same number after every depth, so that the rows can be compared.
    let deepest = options.depth.iter().copied().max().unwrap_or(0);
    Ok(vec![limits.context.map_or(GENERATED, |most| GENERATED.min(most - deepest))])
}

/// There must be room after every depth, and what lies before is a prompt.
fn check_depths(options: &BenchOptions, limits: SequenceLimits) -> Result<(), BenchError> {
    for &depth in options.depth.iter().filter(|&&depth| depth > 0) {
        check_fits(format_args!("-d/--depth {depth}"), depth, limits.prompt)?;
        check_fits(
            format_args!("one token after -d/--depth {depth}"),
            depth.saturating_add(1),
            limits.context,
        )?;
    }
    Ok(())
}

fn check_fits(what: impl std::fmt::Display, tokens: usize, most: Option<usize>) -> Result<(), BenchError> {
    match most {
        Some(most) if tokens > most => Err(BenchError::usage(format!(
            "{what} needs room for {tokens} tokens, but the model has room for {most}: choose fewer, or build with a \
             larger -c/--ctx-size (--chunk for prompts of a model that must read them at once)"
        ))),
        _ => Ok(()),
    }
}
