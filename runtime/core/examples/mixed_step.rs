//! One step for sequences that decode and one that reads its prompt, against a step of the prompt alone.
//!
//!     cargo run --release -p mlcc-runtime --example mixed_step model.so [texts] [depth]
//!
//! Every text has `depth` tokens (default 64) before; the prompt gets what is left of a chunk. Times are
//! medians of runs in turns.

use std::time::{Duration, Instant};

use mlcc_runtime::{LoadOptions, Model, OutputRows, Session, SessionInput};

const RUNS: usize = 9;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let path = args.next().ok_or("usage: mixed_step model.so [texts] [depth]")?;
    let mut number = |usual: usize| args.next().map_or(Ok(usual), |a| a.parse());
    let (texts, depth) = (number(8)?, number(64)?);
    let model = Model::load(path, &LoadOptions::default())?;
    let rows = model.max_step_tokens();
    if texts + 1 > model.max_batch() as usize || texts >= rows {
        return Err(format!("the model takes {} sequences and {rows} tokens", model.max_batch()).into());
    }
    let prompt: Vec<i32> = (1..=rows as i32).collect();
    let mut running = Vec::new();
    for _ in 0..texts {
        let mut session = model.session()?;
        session.prefill(&vec![1; depth.max(1)])?;
        running.push(session);
    }
    let mut reader = model.session()?;
    let mut batch = model.batch(texts + 1)?;
    let (mut mixed, mut alone) = (Vec::new(), Vec::new());
    for _ in 0..RUNS {
        reader.reset()?;
        let begin = Instant::now();
        let mut step: Vec<SessionInput> =
            running.iter_mut().map(|s: &mut Session| SessionInput::new(s, &[2])).collect();
        step.push(SessionInput {
            session: &mut reader,
            tokens: &prompt[..rows - texts],
            outputs: OutputRows::Last,
        });
        let logits = batch.step(&mut step)?;
        assert_eq!(logits.len(), (texts + 1) * model.vocab());
        mixed.push(begin.elapsed());
        reader.reset()?;
        let begin = Instant::now();
        reader.prefill(&prompt)?;
        alone.push(begin.elapsed());
    }
    let [mixed, alone] = [mixed, alone].map(median);
    println!("{texts} next tokens and {} of a prompt: {mixed:.2?}", rows - texts);
    println!("{rows} tokens of a prompt: {alone:.2?}, the mixed step takes {:.3} of it", ratio(mixed, alone));
    Ok(())
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

fn ratio(a: Duration, b: Duration) -> f64 {
    a.as_secs_f64() / b.as_secs_f64()
}
