//! Greedy generation: token ids in, token ids out.
//!
//! cargo run -p mlcc-runtime --example generate -- model.so 16 510 2776 369

use std::error::Error;

// docs: begin
use mlcc_runtime::{LoadOptions, Model};

/// Feeds `prompt` and returns `n` more ids, each the most probable one.
pub fn generate(path: &str, n: usize, prompt: &[i32]) -> Result<Vec<i32>, mlcc_runtime::Error> {
    let model = Model::load(path, &LoadOptions::default())?;
    let mut session = model.session()?;
    let mut next = argmax(session.prefill(prompt)?);
    let mut ids = Vec::with_capacity(n);
    while ids.len() < n {
        ids.push(next);
        next = argmax(session.decode(next)?);
    }
    Ok(ids)
}

fn argmax(logits: &[f32]) -> i32 {
    let best = |best: usize, i: usize| if logits[i] > logits[best] { i } else { best };
    (1..logits.len()).fold(0, best) as i32
}
// docs: end

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [path, n, prompt @ ..] = args.as_slice() else {
        return Err("usage: generate MODEL.so COUNT TOKEN_ID...".into());
    };
    let prompt = prompt.iter().map(|id| id.parse()).collect::<Result<Vec<i32>, _>>()?;
    let ids = generate(path, n.parse()?, &prompt)?;
    let text: Vec<String> = ids.iter().map(ToString::to_string).collect();
    println!("{}", text.join(" "));
    Ok(())
}
