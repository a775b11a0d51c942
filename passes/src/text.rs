//! The text of a whole program: the module, and behind it what the passes know of it. See
//! `docs/module-text.md`.
//!
//! ```text
//! module @m { ... }
//!
//! program after plan_memory {
//!   pack @w search mse
//!   level @"x86-64-v3" arch x86_64 bits 256 features ["avx", "avx2"] {
//!     kernel @k(...) { ... }
//!     cost ops 2*n bytes [256, 256] arithmetic f32 matrices 1
//!     entry @decode { ... }
//!     step @decode arena 4096 { ... }
//!   }
//!   memory chunk 128 batch 16 weights 4096 state 64 { ... }
//! }
//! ```

mod entry;
mod memory;

use crate::pipeline::{self, PIPELINE};
use crate::{LevelCode, LoweredProgram};
use mlcc_ir::kernel::Kernel;
use mlcc_ir::module::Module;
use mlcc_ir::text::{
    LexToken, Lexer, ParseError, one_of, parse_kernel, parse_module_part, parse_step, print_kernel,
    print_module, print_name, print_step, print_string,
};
use mlcc_kernels::lower::LoweredModule;
use mlcc_kernels::lower::cost::{ComputeType, LaunchCost};
use mlcc_kernels::params::KernelTarget;
use mlcc_quant::{PackOptions, ScaleSearch};
use mlcc_target::{Arch, TuneTables};
use std::fmt::Display;

const ARCHES: [Arch; 3] = [Arch::X86_64, Arch::Aarch64, Arch::Nvptx];
const SEARCHES: [ScaleSearch; 2] = [ScaleSearch::None, ScaleSearch::Mse];

fn search_name(search: ScaleSearch) -> &'static str {
    match search {
        ScaleSearch::None => "none",
        ScaleSearch::Mse => "mse",
    }
}

/// Items with commas between them.
fn list(items: impl IntoIterator<Item = impl Display>) -> String {
    items.into_iter().map(|i| i.to_string()).collect::<Vec<_>>().join(", ")
}

/// `text` with its lines moved to the right.
fn indent(out: &mut String, text: &str) {
    for line in text.lines() {
        if !line.is_empty() {
            out.push_str("  ");
        }
        out.push_str(line);
        out.push('\n');
    }
}

/// The text of a program. One that no pass has changed is its module.
pub fn print_program(program: &LoweredProgram) -> String {
    let mut out = match program.levels.is_empty() {
        true => print_module(&program.module),
        // Its kernels and steps are those of the first level.
        false => print_module(&Module { kernels: Vec::new(), steps: Vec::new(), ..program.module.clone() }),
    };
    let bare = program.levels.is_empty() && program.memory.is_none() && program.pack_options.is_empty();
    if program.after.is_none() && bare {
        return out;
    }
    let after = program.after.map_or(String::new(), |pass| format!(" after {pass}"));
    out.push_str(&format!("\nprogram{after} {{\n"));
    // Parameters that were merged or dropped are packed no more.
    let packed = program.pack_options.iter().filter(|(name, _)| program.module.param(name).is_some());
    for (name, PackOptions { scale_search }) in packed {
        out.push_str(&format!("  pack {} search {}\n", print_name('@', name), search_name(*scale_search)));
    }
    for level in &program.levels {
        indent(&mut out, &print_level(&program.module, level));
    }
    if let Some(plan) = &program.memory {
        indent(&mut out, &memory::print(&program.module, plan));
    }
    out.push_str("}\n");
    out
}

fn print_level(module: &Module, level: &LevelCode) -> String {
    let KernelTarget {
        arch,
        features,
        vector_bits,
        batch_invariant,
        tune: _,
        matrix: _,
        code_matrix: _,
        attention: _,
    } = &level.target;
    let features = list(features.iter().map(|f| print_string(f)));
    let name = print_name('@', &level.name);
    let invariant = if *batch_invariant { " batch_invariant" } else { "" };
    let mut out =
        format!("level {name} arch {} bits {vector_bits} features [{features}]{invariant} {{\n", arch.name());
    for (kernel, cost) in level.lowered.kernels.iter().zip(&level.lowered.costs) {
        indent(&mut out, &print_kernel(kernel));
        indent(&mut out, &print_cost(cost));
    }
    for entry in &level.lowered.entries {
        indent(&mut out, &entry::print(module, &level.lowered.kernels, entry));
    }
    for step in &level.steps {
        indent(&mut out, &print_step(step));
    }
    out.push_str("}\n");
    out
}

fn print_cost(cost: &LaunchCost) -> String {
    let parts = cost.parts.map_or(String::new(), |parts| format!(" parts {parts}"));
    let (ops, bytes, matrices) = (&cost.ops, list(&cost.bytes), &cost.matrices);
    format!(
        "cost ops {ops} bytes [{bytes}] arithmetic {} matrices {matrices}{parts}\n",
        cost.arithmetic.name()
    )
}

/// Reads a whole text: a module, or one with the results of passes.
pub fn parse_program(text: &str) -> Result<LoweredProgram, ParseError> {
    let mut lexer = Lexer::new(text)?;
    let mut program = LoweredProgram::new(parse_module_part(&mut lexer)?);
    if lexer.accept_keyword("program") {
        parse_rest(&mut lexer, &mut program)?;
    }
    match lexer.at_end() {
        true => Ok(program),
        false => {
            Err(lexer.error(format!("expected `program` or the end of the text, found {}", lexer.peek())))
        }
    }
}

fn parse_rest(lexer: &mut Lexer, program: &mut LoweredProgram) -> Result<(), ParseError> {
    if lexer.accept_keyword("after") {
        let pos = lexer.position();
        let name = lexer.ident("the name of a pass")?;
        let pass = pipeline::find_in(PIPELINE, &name);
        program.after = Some(pass.map_err(|e| Lexer::error_at(pos, e.to_string()))?.name);
    }
    lexer.expect("{")?;
    while !lexer.accept("}") {
        let pos = lexer.position();
        if lexer.accept_keyword("pack") {
            let name = lexer.at_name("the name of a parameter")?;
            if program.module.param(&name).is_none() {
                return Err(Lexer::error_at(pos, format!("parameter @{name} is not declared")));
            }
            lexer.expect_keyword("search")?;
            let scale_search = one_of(lexer, &SEARCHES, search_name)?;
            if program.pack_options.insert(name.clone(), PackOptions { scale_search }).is_some() {
                return Err(Lexer::error_at(pos, format!("the packing of @{name} is given twice")));
            }
        } else if lexer.at_keyword("level") {
            let level = parse_level(lexer, &program.module)?;
            if program.levels.iter().any(|l| l.name == level.name) {
                return Err(Lexer::error_at(pos, format!("level @{} is given twice", level.name)));
            }
            program.levels.push(level);
        } else if lexer.at_keyword("memory") {
            if program.memory.is_some() {
                return Err(Lexer::error_at(pos, "memory is planned twice"));
            }
            program.memory = Some(memory::parse(lexer, &program.module)?);
        } else {
            let message = format!("expected pack, level, memory or `}}`, found {}", lexer.peek());
            return Err(lexer.error(message));
        }
    }
    // The form after `plan_barriers`.
    if let Some(first) = program.levels.first().filter(|l| !l.steps.is_empty()) {
        program.module.kernels = first.lowered.kernels.clone();
        program.module.steps = first.steps.clone();
    }
    Ok(())
}

/// The tuning of a level of this name; nothing after `lower` asks for it.
fn tune(name: &str, features: &[String], vector_bits: u32) -> TuneTables {
    let known = mlcc_target::level(name).ok().flatten();
    let level = known.and_then(|level| match level.vector_bits == vector_bits {
        true => Some(level),
        false => level.reduced(features.to_vec(), vector_bits).ok(),
    });
    level.and_then(|level| level.tune).unwrap_or_default()
}

fn parse_level(lexer: &mut Lexer, module: &Module) -> Result<LevelCode, ParseError> {
    lexer.expect_keyword("level")?;
    let name = lexer.at_name("the name of a level")?;
    lexer.expect_keyword("arch")?;
    let arch = one_of(lexer, &ARCHES, Arch::name)?;
    lexer.expect_keyword("bits")?;
    let vector_bits = lexer.u32("the bits of a vector")?;
    lexer.expect_keyword("features")?;
    lexer.expect("[")?;
    let features: Vec<String> = lexer.list("]", |lexer| lexer.string("a feature"))?;
    let tune = tune(&name, &features, vector_bits);
    let batch_invariant = lexer.accept_keyword("batch_invariant");
    let features = features.into_iter().collect();
    let known = mlcc_target::level(&name).ok().flatten();
    let (matrix, code_matrix, attention) = known
        .and_then(|level| level.gpu)
        .map_or((None, None, None), |gpu| (gpu.product, gpu.code_product, gpu.attention));
    let target =
        KernelTarget { arch, features, vector_bits, tune, batch_invariant, matrix, code_matrix, attention };
    let lowered = LoweredModule { kernels: vec![], costs: vec![], explanations: vec![], entries: vec![] };
    let mut level = LevelCode { name, target, lowered, steps: Vec::new() };
    lexer.expect("{")?;
    while !lexer.accept("}") {
        match lexer.peek() {
            LexToken::Ident(word) if word == "kernel" => {
                let kernel = parse_level_kernel(lexer, &level.lowered.kernels)?;
                level.lowered.kernels.push(kernel);
                level.lowered.costs.push(parse_cost(lexer)?);
            }
            LexToken::Ident(word) if word == "entry" => {
                let entry = entry::parse(lexer, module, &level.lowered.kernels)?;
                level.lowered.entries.push(entry);
            }
            LexToken::Ident(word) if word == "step" => level.steps.push(parse_step(lexer)?),
            other => {
                let message = format!("expected kernel, entry, step or `}}`, found {other}");
                return Err(lexer.error(message));
            }
        }
    }
    Ok(level)
}

fn parse_level_kernel(lexer: &mut Lexer, known: &[Kernel]) -> Result<Kernel, ParseError> {
    let pos = lexer.position();
    let kernel = parse_kernel(lexer)?;
    match known.iter().any(|k| k.name == kernel.name) {
        true => Err(Lexer::error_at(pos, format!("kernel @{} is defined twice", kernel.name))),
        false => Ok(kernel),
    }
}

fn parse_cost(lexer: &mut Lexer) -> Result<LaunchCost, ParseError> {
    use mlcc_ir::text::parse_dim;
    lexer.expect_keyword("cost")?;
    lexer.expect_keyword("ops")?;
    let ops = parse_dim(lexer)?;
    lexer.expect_keyword("bytes")?;
    lexer.expect("[")?;
    let bytes = lexer.list("]", parse_dim)?;
    lexer.expect_keyword("arithmetic")?;
    let arithmetic = one_of(lexer, &ComputeType::ALL, ComputeType::name)?;
    lexer.expect_keyword("matrices")?;
    let matrices = parse_dim(lexer)?;
    let parts = if lexer.accept_keyword("parts") { Some(lexer.int("a number of parts")?) } else { None };
    Ok(LaunchCost { bytes, ops, arithmetic, matrices, parts })
}
