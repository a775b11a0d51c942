//! Which tests a run of `mlcc bench` makes: those that are asked for, else the usual ones as far as the model has room.

use super::Args;
use super::test::Test;
use crate::commands::Limits;
use crate::error::CliError;

/// Tokens of the usual tests.
const PROMPT: usize = 512;
const GENERATED: usize = 128;

pub(super) fn tests(args: &Args, limits: Limits) -> Result<Vec<Test>, CliError> {
    let mut tests = Vec::new();
    match &args.n_prompt {
        None => tests.push(Test::Prompt(limits.prompt.map_or(PROMPT, |most| PROMPT.min(most)))),
        Some(lengths) => {
            for &n in lengths.iter().filter(|&&n| n > 0) {
                fits(format_args!("-p/--n-prompt {n}"), n, limits.prompt)?;
                tests.push(Test::Prompt(n));
            }
        }
    }
    for tokens in generated(args, limits)? {
        for &depth in &args.depth {
            let what = match depth {
                0 => format!("-n/--n-gen {tokens}"),
                _ => format!("-n/--n-gen {tokens} after -d/--depth {depth}"),
            };
            fits(what, depth.saturating_add(tokens), limits.context)?;
            let sequences = args.batch.iter().map(|&b| usize::from(b));
            tests.extend(sequences.map(|sequences| Test::Generate { tokens, depth, sequences }));
        }
    }
    for &mix in &args.mixed {
        depths(args, limits)?;
        fits(format_args!("--mixed {}+{}", mix.next, mix.piece), mix.piece, limits.prompt)?;
        tests.extend(args.depth.iter().map(|&depth| Test::Mixed { mix, depth }));
    }
    match tests.is_empty() {
        true => Err(CliError::usage("nothing to measure: give -p N or -n N above 0, or --mixed")),
        false => Ok(tests),
    }
}

/// How many tokens are generated.
fn generated(args: &Args, limits: Limits) -> Result<Vec<usize>, CliError> {
    if let Some(asked) = &args.n_gen {
        let lengths: Vec<usize> = asked.iter().copied().filter(|&n| n > 0).collect();
        if !lengths.is_empty() {
            depths(args, limits)?;
        }
        return Ok(lengths);
    }
    depths(args, limits)?;
    // As many after every depth, so that the rows can be compared.
    let deepest = args.depth.iter().copied().max().unwrap_or(0);
    Ok(vec![limits.context.map_or(GENERATED, |most| GENERATED.min(most - deepest))])
}

/// There must be room after every depth, and what lies before is a prompt.
fn depths(args: &Args, limits: Limits) -> Result<(), CliError> {
    for &depth in args.depth.iter().filter(|&&depth| depth > 0) {
        fits(format_args!("-d/--depth {depth}"), depth, limits.prompt)?;
        fits(format_args!("one token after -d/--depth {depth}"), depth.saturating_add(1), limits.context)?;
    }
    Ok(())
}

fn fits(what: impl std::fmt::Display, tokens: usize, most: Option<usize>) -> Result<(), CliError> {
    match most {
        Some(most) if tokens > most => Err(CliError::usage(format!(
            "{what} needs room for {tokens} tokens, the model has room for {most}: choose less, or build with a larger \
             -c/--ctx-size (--chunk for prompts of a model that reads them only as a whole)"
        ))),
        _ => Ok(()),
    }
}
