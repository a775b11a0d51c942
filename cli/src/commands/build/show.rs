//! The report of a build for people.

use std::fmt::Write;

use crate::ui;
use mlcc_driver::compile::BuildReport;
use mlcc_driver::compile::keep::{KeptWeights, SMALLER};

/// One line about a build: the model, the format and what a smaller one would take, the file, how good it is.
pub fn summary_line(report: &BuildReport) -> String {
    let levels: Vec<&str> = report.levels.iter().map(|level| level.name.as_str()).collect();
    let mut out =
        format!("{}, {} parameters, {}", report.model, ui::format_count(report.parameters), report.quant);
    if !levels.is_empty() {
        let _ = write!(out, ", for {}", levels.join(", "));
    }
    if report.artifact.is_some() {
        let _ = write!(out, ": {}", ui::bytes(report.file_bytes));
    }
    let seconds: f64 = report.phases.iter().map(|phase| phase.seconds).sum();
    let _ = write!(out, " in {seconds:.1} s");
    for more in notes(report) {
        let _ = write!(out, "; {more}");
    }
    out
}

/// Notes that the user may want to see at once.
fn notes(report: &BuildReport) -> Vec<String> {
    let mut more = Vec::new();
    if let Some(chunk) = report.whole_prompts {
        more.push(format!("prompts are read at once, so they have at most {chunk} tokens (--chunk)"));
    }
    if report.tokenizer.is_none() {
        more.push("no tokenizer next to the model: `mlcc run` will need --tokenizer".into());
    }
    more.extend(report.kept.as_ref().and_then(smaller_text));
    more.extend(report.quality.as_ref().map(|quality| quality.text()));
    more.extend(report.quality_skipped.as_ref().map(|why| format!("quality not measured, {why}")));
    more
}

/// All that the report has.
pub fn report_tables(report: &BuildReport) -> String {
    let mut out = String::new();
    let levels: Vec<String> =
        report.levels.iter().map(|l| format!("{} ({} kernels)", l.name, l.kernels)).collect();
    // Before the pass `lower` there is no code for any level.
    let levels = if levels.is_empty() { String::new() } else { format!(", for {}", levels.join(", ")) };
    let _ = writeln!(
        out,
        "model {}: {} parameters, {}{levels}",
        report.model,
        ui::format_count(report.parameters),
        report.quant
    );
    if let Some(tokenizer) = &report.tokenizer {
        let _ = writeln!(out, "tokenizer {tokenizer}");
    }
    if let Some(tuning) = &report.tuning {
        let _ = writeln!(out, "tuning {tuning}");
    }
    out.push('\n');
    out.push_str(&passes(report));
    out.push_str(&conversions(report));
    out.push_str(&formats(report));
    out.push_str(&memory(report));
    if let Some(kept) = &report.kept {
        let _ = writeln!(out, "{}", kept_text(kept));
    }
    let phases: Vec<String> =
        report.phases.iter().map(|p| format!("{} {:.2} s", p.name, p.seconds)).collect();
    let total: f64 = report.phases.iter().map(|p| p.seconds).sum();
    let _ = writeln!(out, "time: {}, total {total:.2} s", phases.join(", "));
    if let Some(made) = report.objects.filter(|made| made.from_cache > 0) {
        let _ = writeln!(out, "code: {} of {} objects from the cache", made.from_cache, made.objects);
    }
    match (&report.quality, &report.quality_skipped) {
        (Some(quality), _) => writeln!(out, "quality: {}", quality.text()),
        (None, Some(why)) => writeln!(out, "quality: not measured, {why}"),
        (None, None) => Ok(()),
    }
    .unwrap_or_default();
    if let Some(seed) = report.weights_on_load {
        let _ = writeln!(out, "weights: made from seed {seed} when the model is loaded, not in the file");
    }
    if report.artifact.is_some() {
        let _ = writeln!(
            out,
            "wrote {}, {} of it code",
            ui::bytes(report.file_bytes),
            ui::bytes(report.code_bytes)
        );
    }
    out
}

fn passes(report: &BuildReport) -> String {
    let mut rows = vec![vec!["pass".into(), "changes".into(), "ms".into()]];
    let row = |p: &mlcc_driver::compile::PassRow| {
        vec![p.name.clone(), p.changes.to_string(), format!("{:.1}", p.seconds * 1e3)]
    };
    rows.extend(report.passes.iter().map(row));
    ui::format_table(&rows) + "\n"
}

fn conversions(report: &BuildReport) -> String {
    if report.conversions.is_empty() {
        return String::new();
    }
    let head = ["in the file", "stored as", "tensors", ""];
    let mut rows: Vec<Vec<String>> = vec![head.iter().map(|s| s.to_string()).collect()];
    let row = |c: &mlcc_driver::compile::keep::ConversionRow| {
        vec![c.stored.to_string(), c.format.clone(), c.tensors.to_string(), c.how.to_string()]
    };
    rows.extend(report.conversions.iter().map(row));
    ui::format_table(&rows) + "\n"
}

fn kept_text(kept: &KeptWeights) -> String {
    let what = match (kept.random, kept.dequantized) {
        (true, _) => "random weights as the model was published",
        (false, true) => "weights dequantized",
        (false, false) => "weights kept as stored",
    };
    let (types, size) = (kept.types.join(", "), ui::bytes(kept.bytes));
    let smaller = smaller_text(kept).map_or_else(String::new, |text| format!("; {text}"));
    format!("{what} ({types}), {size}{smaller}")
}

/// The size in 4 bits; not worth a word where little is to be saved.
fn smaller_text(kept: &KeptWeights) -> Option<String> {
    let saves = kept.smaller_bytes < kept.bytes / 10 * 9;
    saves.then(|| format!("--quant {SMALLER} would take {}", ui::bytes(kept.smaller_bytes)))
}

fn formats(report: &BuildReport) -> String {
    let head = ["format", "tensors", "parameters", "bytes"];
    let mut rows: Vec<Vec<String>> = vec![head.iter().map(|s| s.to_string()).collect()];
    for f in &report.formats {
        rows.push(vec![
            f.format.clone(),
            f.tensors.to_string(),
            ui::format_count(f.parameters),
            ui::bytes(f.bytes),
        ]);
    }
    ui::format_table(&rows) + "\n"
}

fn memory(report: &BuildReport) -> String {
    let Some(memory) = &report.memory else { return String::new() };
    let head = ["function", "launches", "barriers", "scratch"];
    let mut rows: Vec<Vec<String>> = vec![head.iter().map(|s| s.to_string()).collect()];
    for e in &memory.entries {
        rows.push(vec![
            e.name.clone(),
            e.launches.to_string(),
            e.barriers.to_string(),
            ui::bytes(e.arena_bytes),
        ]);
    }
    let (weights, state, arena) = (memory.weights_bytes, memory.state_bytes, memory.arena_bytes);
    let total = ui::bytes(weights + state + arena);
    let cache = memory.cache.as_ref().map_or(String::new(), |c| {
        format!(" ({} tokens of {} in {})", c.rows, ui::bytes(c.bytes_per_token), c.formats.join(" and "))
    });
    let exchanges = memory.entries.iter().map(|e| e.exchanges).max().unwrap_or(0);
    let ranks = match memory.ranks {
        1 => String::new(),
        ranks => format!(", of {ranks} ranks with up to {exchanges} exchanges in a step"),
    };
    format!(
        "{}memory: weights {}, state {}{cache}, scratch {}, together {total}{ranks}\n\n",
        ui::format_table(&rows),
        ui::bytes(weights),
        ui::bytes(state),
        ui::bytes(arena)
    )
}
