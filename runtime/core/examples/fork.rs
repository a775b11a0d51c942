//! The time that forks of a long sequence take, and the memory that they share.
//!
//!     cargo run --release -p mlcc-runtime --example fork model.so [tokens]

use std::time::{Duration, Instant};

use mlcc_runtime::{LoadOptions, Model};

const RUNS: usize = 31;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let path = args.next().ok_or("usage: fork model.so [tokens]")?;
    let tokens: usize = args.next().map_or(Ok(2000), |a| a.parse())?;
    let model = Model::load(path, &LoadOptions::default())?;
    let mut session = model.session()?;
    session.prefill(&vec![1; tokens])?;
    println!("{:?}, {:?}", session.memory(), model.cache_pages());
    let (mut forks, mut first) = (Vec::new(), Vec::new());
    for _ in 0..RUNS {
        let begin = Instant::now();
        let mut twin = session.fork()?;
        forks.push(begin.elapsed());
        let begin = Instant::now();
        twin.decode(2)?;
        first.push(begin.elapsed());
    }
    let mut next = Vec::new();
    for _ in 0..RUNS {
        let begin = Instant::now();
        session.decode(2)?;
        next.push(begin.elapsed());
    }
    let [forks, first, next] = [forks, first, next].map(median);
    println!("a fork takes {forks:.2?}, its first token {first:.2?}, a next token {next:.2?}");
    Ok(())
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}
