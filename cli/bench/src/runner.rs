//! Computes the tokens of tests: of sequences, or as texts by a model that makes vectors.

use std::time::Instant;

use mlcc_runtime::{Model, Session, SessionBatch, SessionInput, StepTimes, TextEmbedder};

use crate::error::BenchError;
use crate::host::{BenchHost, stop_if_interrupted};
use crate::test::{BenchTest, test_prompt, test_tokens};

/// The sequences of the tests.
pub(crate) struct BenchRunner<'a> {
    host: &'a dyn BenchHost,
    sessions: Vec<Session>,
    /// The number of first tokens of each sequence that tests have before theirs.
    context_tokens: Vec<usize>,
    /// None of a model of texts.
    batch: Option<SessionBatch>,
    /// The embedder of a model of texts.
    texts: Option<TextEmbedder>,
    vocab: u64,
    model: Model,
    /// Seconds of the steps of the last test, of one that generates.
    pub steps: Vec<f64>,
}

impl<'a> BenchRunner<'a> {
    /// A runner with as many sequences as the tests need.
    pub fn new(
        model: &Model,
        tests: &[BenchTest],
        host: &'a dyn BenchHost,
    ) -> Result<BenchRunner<'a>, BenchError> {
        let makes_vectors = model.text_width() > 0;
        let most = if makes_vectors { 0 } else { tests.iter().map(|t| t.sequences()).max().unwrap_or(1) };
        Ok(BenchRunner {
            host,
            sessions: (0..most).map(|_| model.session()).collect::<Result<_, _>>()?,
            context_tokens: vec![0; most],
            batch: (most > 0).then(|| model.batch(most)).transpose()?,
            texts: makes_vectors.then(|| model.text_embedder()).transpose()?,
            vocab: model.vocab() as u64,
            model: model.clone(),
            steps: Vec::new(),
        })
    }

    /// Begins sequences with the tokens before those of the test. Sequences that have them go back to them.
    pub fn prepare(&mut self, test: BenchTest) -> Result<(), BenchError> {
        let (depth, sequences) = match test {
            BenchTest::Generate { depth, sequences, .. } => (depth, sequences),
            BenchTest::Mixed { depth, mix } => (depth, mix.decode_tokens),
            BenchTest::Prompt(_) | BenchTest::Texts { .. } => (0, 0),
        };
        // Generation needs a source text.
        let depth = self.model.plan().decoder_start().map_or(depth, |_| depth.max(2));
        let has =
            |session: &Session, read| depth > 0 && read >= depth && session.can_truncate_to(depth as u64);
        let there = self.sessions.iter_mut().zip(&mut self.context_tokens).take(test.sequences());
        // All are reset before any takes memory for rows, as new sequences would.
        for (i, (session, read)) in there.enumerate() {
            if i >= sequences || !has(session, *read) {
                session.reset()?;
                *read = 0;
            }
        }
        for (session, read) in self.sessions.iter_mut().zip(&mut self.context_tokens).take(sequences) {
            match *read {
                0 if depth > 0 => session.prefill(&test_prompt(depth, &self.model)).map(drop)?,
                0 => {}
                _ => session.truncate(depth as u64)?,
            }
            *read = depth;
        }
        Ok(())
    }

    /// Tokens per second of one run, those of all sequences together, which are prepared.
    pub fn run_timed(&mut self, test: BenchTest) -> Result<f64, BenchError> {
        let begin = Instant::now();
        self.run_test(test)?;
        Ok(test.tokens() as f64 / begin.elapsed().as_secs_f64())
    }

    /// Computes the tokens of a test.
    pub fn run_test(&mut self, test: BenchTest) -> Result<(), BenchError> {
        let vocab = self.vocab;
        self.steps.clear();
        match test {
            BenchTest::Prompt(n) => {
                self.sessions[0].prefill(&test_prompt(n, &self.model))?;
            }
            BenchTest::Generate { tokens: n, sequences, .. } => {
                self.generate(&test_tokens(n, vocab), sequences)?
            }
            BenchTest::Mixed { mix, .. } => {
                let (piece, next) =
                    (test_prompt(mix.prefill_tokens, &self.model), test_tokens(mix.decode_tokens, vocab));
                let fed = next.chunks(1).chain([&piece[..]]);
                let mut rows: Vec<SessionInput> = self
                    .sessions
                    .iter_mut()
                    .zip(fed)
                    .map(|(s, tokens)| SessionInput::new(s, tokens))
                    .collect();
                self.batch.iter_mut().try_for_each(|batch| batch.step(&mut rows).map(drop))?;
            }
            BenchTest::Texts { counts: of, .. } => {
                let tokens = test_tokens(of.texts * of.tokens, vocab);
                let texts: Vec<&[i32]> = tokens.chunks(of.tokens).collect();
                self.texts.iter_mut().try_for_each(|model| model.embed(&texts).map(drop))?;
            }
        }
        stop_if_interrupted(self.host)
    }

    /// Computes single tokens of `sequences` sequences, and takes the time of each step.
    fn generate(&mut self, tokens: &[i32], sequences: usize) -> Result<(), BenchError> {
        let sessions = &mut self.sessions[..sequences];
        let mut next = vec![0; sequences];
        for (i, &token) in tokens.iter().enumerate() {
            // Sequences of different tokens: they may pick different experts.
            next.iter_mut().enumerate().for_each(|(k, t)| *t = tokens[(i + 7 * k) % tokens.len()]);
            let begin = Instant::now();
            // As in generation: where a GPU finds the top-k candidates, its other logits stay there.
            match (&mut *sessions, &mut self.batch) {
                ([one], _) => one.decode_top_k(token, &mut |_| true).map(drop)?,
                (all, Some(batch)) => {
                    let mut rows: Vec<SessionInput> = all
                        .iter_mut()
                        .zip(next.chunks(1))
                        .map(|(s, token)| SessionInput::new(s, token))
                        .collect();
                    batch.step_top_k(&mut rows, &mut |_, _| true).map(drop)?;
                }
                (_, None) => {}
            }
            self.steps.push(begin.elapsed().as_secs_f64());
            stop_if_interrupted(self.host)?;
        }
        Ok(())
    }

    /// Says what has made the tests slower than they could be. Not of every sequence: they all go through the
    /// same driver.
    pub fn print_warnings(&self) {
        if let Some(notice) = self.sessions.iter().find_map(Session::performance_warning) {
            self.host.warn(&notice);
        }
        // Single sessions would give the same warning again.
        let of_sessions =
            |notice: &String| self.sessions.iter().any(|s| s.performance_warning() == Some(notice.as_str()));
        let of_batch = self.batch.as_ref().and_then(SessionBatch::performance_warning);
        if let Some(notice) = of_batch.filter(|notice| !of_sessions(notice)) {
            self.host.warn(&notice);
        }
    }

    /// Takes times of the steps' items from now on, or no longer; gives what was taken so far.
    pub fn trace(&mut self, on: bool) -> Vec<StepTimes> {
        let mut times: Vec<StepTimes> = self.sessions.first_mut().map(|s| s.trace(on)).unwrap_or_default();
        times.extend(self.batch.iter_mut().flat_map(|batch| batch.trace(on)));
        times.extend(self.texts.iter_mut().flat_map(|texts| texts.trace(on)));
        times
    }
}
