//! Text of the memory plan.
//!
//! ```text
//! memory chunk 128 batch 16 context 4096 weights 4096 state 128 {
//!   param @w at 0 bytes 4096
//!   state @s at 0 bytes 128 row 0
//!   level @"x86-64-v3" {
//!     entry @decode arena 4096 copies [0] {
//!       %0 = tokens+0:512
//!     }
//!   }
//! }
//! ```

use super::entry::numbered;
use super::list;
use crate::plan_memory::{EntryPlan, LevelPlan, MemoryPlan};
use mlcc_ir::entity::EntityId;
use mlcc_ir::module::Module;
use mlcc_ir::text::{Lexer, ParseError, parse_buffer, print_buffer, print_name};

pub(super) fn print(module: &Module, plan: &MemoryPlan) -> String {
    let context = plan.context.map_or(String::new(), |c| format!(" context {c}"));
    let (weights, state) = (plan.weights_bytes, plan.state_bytes);
    let mut out = format!("memory chunk {} batch {}{context}", plan.chunk, plan.batch);
    let pages = if plan.page_bytes > 0 { format!(" page {}", plan.page_bytes) } else { String::new() };
    let adapters =
        if plan.adapter_bytes > 0 { format!(" adapters {}", plan.adapter_bytes) } else { String::new() };
    out.push_str(&format!(" weights {weights}{adapters} state {state}{pages} {{\n"));
    for (param, (at, bytes)) in module.params.values().zip(&plan.params) {
        out.push_str(&format!("  param {} at {at} bytes {bytes}\n", print_name('@', &param.name)));
    }
    for ((state, (at, bytes)), row) in module.states.values().zip(&plan.states).zip(&plan.row_bytes) {
        out.push_str(&format!("  state {} at {at} bytes {bytes} row {row}\n", print_name('@', &state.name)));
    }
    for level in &plan.levels {
        out.push_str(&format!("  level {} {{\n", print_name('@', &level.name)));
        for entry in &level.entries {
            let (name, arena) = (print_name('@', &entry.name), entry.arena_bytes);
            out.push_str(&format!("    entry {name} arena {arena} copies [{}] {{\n", list(&entry.copies)));
            for (i, buffer) in entry.buffers.iter().enumerate() {
                out.push_str(&format!("      %{i} = {}\n", print_buffer(buffer)));
            }
            out.push_str("    }\n");
        }
        out.push_str("  }\n");
    }
    out.push_str("}\n");
    out
}

pub(super) fn parse(lexer: &mut Lexer, module: &Module) -> Result<MemoryPlan, ParseError> {
    lexer.expect_keyword("memory")?;
    lexer.expect_keyword("chunk")?;
    let chunk = i64::from(lexer.u32("a number of tokens")?);
    lexer.expect_keyword("batch")?;
    let batch = i64::from(lexer.u32("a number of sequences")?);
    let context = match lexer.accept_keyword("context") {
        true => Some(u64::from(lexer.u32("a number of tokens")?)),
        false => None,
    };
    lexer.expect_keyword("weights")?;
    let weights_bytes = lexer.uint("the bytes of all weights")?;
    let adapter_bytes = if lexer.accept_keyword("adapters") {
        lexer.uint("the bytes of the slots for adapters")?
    } else {
        0
    };
    lexer.expect_keyword("state")?;
    let state_bytes = lexer.uint("the bytes of the state")?;
    let page_bytes = if lexer.accept_keyword("page") { lexer.uint("the bytes of a page")? } else { 0 };
    let mut plan = MemoryPlan {
        params: Vec::new(),
        weights_bytes,
        adapter_bytes,
        states: Vec::new(),
        state_bytes,
        page_bytes,
        row_bytes: Vec::new(),
        context,
        chunk,
        batch,
        levels: Vec::new(),
    };
    lexer.expect("{")?;
    let declared: Vec<&str> = module.params.values().map(|p| p.name.as_str()).collect();
    for name in declared {
        named(lexer, "param", name)?;
        plan.params.push(place(lexer)?);
    }
    for id in module.states.ids() {
        named(lexer, "state", &module.states[id].name)?;
        plan.states.push(place(lexer)?);
        lexer.expect_keyword("row")?;
        plan.row_bytes.push(lexer.uint("the bytes of a row")?);
        debug_assert_eq!(plan.states.len(), id.index() + 1);
    }
    while !lexer.accept("}") {
        plan.levels.push(parse_level(lexer)?);
    }
    Ok(plan)
}

fn parse_level(lexer: &mut Lexer) -> Result<LevelPlan, ParseError> {
    lexer.expect_keyword("level")?;
    let name = lexer.at_name("the name of a level")?;
    lexer.expect("{")?;
    let mut entries = Vec::new();
    while !lexer.accept("}") {
        entries.push(parse_entry(lexer)?);
    }
    Ok(LevelPlan { name, entries })
}

/// Parameters and states are in the order of their declarations.
fn named(lexer: &mut Lexer, what: &str, name: &str) -> Result<(), ParseError> {
    let wanted = format!("the place of {what} @{name}");
    if !lexer.at_keyword(what) {
        return Err(lexer.error(format!("expected {wanted}, found {}", lexer.peek())));
    }
    lexer.advance();
    let pos = lexer.position();
    match lexer.at_name(&wanted)? {
        found if found == name => Ok(()),
        found => Err(Lexer::error_at(pos, format!("expected {wanted}, found @{found}"))),
    }
}

fn place(lexer: &mut Lexer) -> Result<(u64, u64), ParseError> {
    lexer.expect_keyword("at")?;
    let offset = lexer.uint("an offset in bytes")?;
    lexer.expect_keyword("bytes")?;
    Ok((offset, lexer.uint("a length in bytes")?))
}

fn parse_entry(lexer: &mut Lexer) -> Result<EntryPlan, ParseError> {
    lexer.expect_keyword("entry")?;
    let name = lexer.at_name("the name of an entry function")?;
    lexer.expect_keyword("arena")?;
    let arena_bytes = lexer.uint("the size of the arena")?;
    lexer.expect_keyword("copies")?;
    lexer.expect("[")?;
    let copies = lexer.list("]", |lexer| Ok(lexer.u32("the number of an update")? as usize))?;
    lexer.expect("{")?;
    let mut buffers = Vec::new();
    while !lexer.accept("}") {
        numbered(lexer, buffers.len())?;
        lexer.expect("=")?;
        buffers.push(parse_buffer(lexer)?);
    }
    Ok(EntryPlan { name, buffers, arena_bytes, copies })
}
