//! Text of steps.
//!
//! ```text
//! step @decode arena 4096 {
//!   launch @add(arena+0:1024, weights+64:1024; n, 256) grid [n, 1, 1] threads [32, 1, 1]
//!   barrier
//!   launch @mix(arena+64+256*row:256, state+0:256) each by n
//!   launch @norm(arena+0:1024, arena+2048+512*worker:256) each worker
//!   launch @product(arena+0:1024, arena+2048:4096) pieces 32
//!   exchange arena+2048:4096 to arena+8192:8192 rows n bytes 256 ranks 2
//! }
//! ```
//! A buffer is `base+offset:bytes`, with `+stride*past` for new rows of a cache, `+stride*row` for the first
//! row of a sequence, `+stride*sequence` for its number, and `+stride*worker` for a worker's copy; the sizes
//! after `;` are the dimension arguments. `each by` launches run for each sequence, with the work that is
//! given (`each single by` for those of one row, `each several by` for the others), `each worker` ones by
//! every worker for itself, `wanted` ones for the rows whose logits are wanted. `pieces` launches have
//! dynamic shares. An `exchange` joins the rows of a buffer that all ranks have.

use super::dim::parse_dim;
use super::lexer::{Lexer, ParseError, print_name};
use crate::dim::Dim;
use crate::step::{
    AllGather, BufferRef, GatherShape, LaunchGrid, LaunchItem, MemoryBase, RepeatMode, SequenceFilter,
    StepItem, StepProgram, WorkSchedule,
};
use std::fmt::Write;

/// The text of a step; ends with a newline.
pub fn print_step(step: &StepProgram) -> String {
    let mut out = format!("step {} arena {} {{\n", print_name('@', &step.name), step.arena_bytes);
    for item in &step.items {
        match item {
            StepItem::Launch(launch) => {
                let _ = writeln!(out, "  {}", print_launch(launch));
            }
            StepItem::AllGather(AllGather { part, all, shape: parts, output_rows: wanted }) => {
                let (part, all) = (print_buffer(part), print_buffer(all));
                let _ = writeln!(out, "  exchange {part} to {all} {}", print_parts(parts, *wanted));
            }
            StepItem::Barrier => out.push_str("  barrier\n"),
        }
    }
    out.push_str("}\n");
    out
}

fn print_launch(launch: &LaunchItem) -> String {
    let buffers: Vec<String> = launch.buffers.iter().map(print_buffer).collect();
    let mut out = format!("launch {}({}", print_name('@', &launch.kernel), buffers.join(", "));
    if !launch.dims.is_empty() {
        let dims: Vec<String> = launch.dims.iter().map(Dim::to_string).collect();
        let _ = write!(out, "; {}", dims.join(", "));
    }
    out.push(')');
    out + &print_schedule(launch.grid.as_ref(), &launch.repeat, &launch.schedule)
}

/// The text after the arguments of a launch, with a space before each part.
pub fn print_schedule(grid: Option<&LaunchGrid>, repeat: &RepeatMode, shares: &WorkSchedule) -> String {
    let mut out = String::new();
    if let Some(LaunchGrid { blocks: [x, y, z], threads: [i, j, k] }) = grid {
        let _ = write!(out, " grid [{x}, {y}, {z}] threads [{i}, {j}, {k}]");
    }
    match repeat {
        RepeatMode::Once => {}
        RepeatMode::Outputs => out.push_str(" wanted"),
        RepeatMode::EachSequence { work, of } => {
            let _ = write!(out, " each{} by {work}", sequences(*of));
        }
        RepeatMode::EachWorker => out.push_str(" each worker"),
    }
    match shares {
        WorkSchedule::Static => {}
        WorkSchedule::Dynamic { chunks: pieces } => {
            let _ = write!(out, " pieces {pieces}");
        }
    }
    out
}

fn sequences(of: SequenceFilter) -> &'static str {
    match of {
        SequenceFilter::All => "",
        SequenceFilter::OneRow => " single",
        SequenceFilter::SeveralRows => " several",
    }
}

/// The text after the buffers of an all-gather: `rows n bytes 256 ranks 2`.
pub fn print_parts(parts: &GatherShape, wanted: bool) -> String {
    let GatherShape { ranks, rows, row_bytes } = parts;
    format!("rows {rows} bytes {row_bytes} ranks {ranks}{}", if wanted { " wanted" } else { "" })
}

/// `arena+64+256*row:1024`.
pub fn print_buffer(b: &BufferRef) -> String {
    let stride = |bytes: u64, of: &str| if bytes > 0 { format!("+{bytes}*{of}") } else { String::new() };
    let (past, page) = (stride(b.per_past, "past"), stride(b.per_page, "page"));
    let row = stride(b.per_row, "row");
    let (sequence, worker) = (stride(b.per_sequence, "sequence"), stride(b.per_worker, "worker"));
    format!("{}+{}{past}{page}{row}{sequence}{worker}:{}", b.base.name(), b.offset, b.bytes)
}

/// Parses one step; the lexer is at `step`.
pub fn parse_step(lexer: &mut Lexer) -> Result<StepProgram, ParseError> {
    lexer.expect_keyword("step")?;
    let name = lexer.at_name("the name of the step")?;
    lexer.expect_keyword("arena")?;
    let arena_bytes = lexer.uint("the size of the arena")?;
    lexer.expect("{")?;
    let mut items = Vec::new();
    while !lexer.accept("}") {
        if lexer.accept_keyword("barrier") {
            items.push(StepItem::Barrier);
        } else if lexer.accept_keyword("launch") {
            items.push(StepItem::Launch(parse_launch(lexer)?));
        } else if lexer.accept_keyword("exchange") {
            items.push(StepItem::AllGather(parse_all_gather(lexer)?));
        } else {
            let message = format!("expected `launch`, `exchange`, `barrier` or `}}`, found {}", lexer.peek());
            return Err(lexer.error(message));
        }
    }
    Ok(StepProgram { name, items, arena_bytes })
}

fn parse_launch(lexer: &mut Lexer) -> Result<LaunchItem, ParseError> {
    let kernel = lexer.at_name("the kernel to launch")?;
    lexer.expect("(")?;
    let (mut buffers, mut dims) = (Vec::new(), Vec::new());
    while !lexer.accept(")") {
        if lexer.accept(";") {
            dims = lexer.list(")", parse_dim)?;
            break;
        }
        buffers.push(parse_buffer(lexer)?);
        if !lexer.accept(",") && !matches!(lexer.peek(), super::LexToken::Punct(";" | ")")) {
            return Err(lexer.error("expected `,`, `;` or `)` after a buffer"));
        }
    }
    let (grid, repeat, shares) = parse_schedule(lexer)?;
    Ok(LaunchItem { kernel, buffers, dims, grid, repeat, schedule: shares })
}

fn parse_all_gather(lexer: &mut Lexer) -> Result<AllGather, ParseError> {
    let part = parse_buffer(lexer)?;
    lexer.expect_keyword("to")?;
    let all = parse_buffer(lexer)?;
    let (parts, wanted) = parse_parts(lexer)?;
    Ok(AllGather { part, all, shape: parts, output_rows: wanted })
}

/// Reads what [`print_parts`] writes.
pub fn parse_parts(lexer: &mut Lexer) -> Result<(GatherShape, bool), ParseError> {
    lexer.expect_keyword("rows")?;
    let rows = parse_dim(lexer)?;
    lexer.expect_keyword("bytes")?;
    let row_bytes = lexer.uint("the bytes of a row")?;
    lexer.expect_keyword("ranks")?;
    let ranks = lexer.u32("a number of ranks")? as usize;
    Ok((GatherShape { ranks, rows, row_bytes }, lexer.accept_keyword("wanted")))
}

/// Reads what [`print_schedule`] writes.
pub fn parse_schedule(
    lexer: &mut Lexer,
) -> Result<(Option<LaunchGrid>, RepeatMode, WorkSchedule), ParseError> {
    let grid = if lexer.accept_keyword("grid") { Some(parse_grid(lexer)?) } else { None };
    let repeat = match lexer.accept_keyword("each") {
        false if lexer.accept_keyword("wanted") => RepeatMode::Outputs,
        false => RepeatMode::Once,
        true if lexer.accept_keyword("worker") => RepeatMode::EachWorker,
        true => {
            let of = match (lexer.accept_keyword("single"), lexer.accept_keyword("several")) {
                (true, _) => SequenceFilter::OneRow,
                (false, true) => SequenceFilter::SeveralRows,
                (false, false) => SequenceFilter::All,
            };
            lexer.expect_keyword("by")?;
            RepeatMode::EachSequence { work: parse_dim(lexer)?, of }
        }
    };
    let shares = match lexer.accept_keyword("pieces") {
        false => WorkSchedule::Static,
        true => WorkSchedule::Dynamic { chunks: parse_dim(lexer)? },
    };
    Ok((grid, repeat, shares))
}

/// Reads what [`print_buffer`] writes.
pub fn parse_buffer(lexer: &mut Lexer) -> Result<BufferRef, ParseError> {
    let pos = lexer.position();
    let word = lexer.ident("a memory base")?;
    let Some(base) = MemoryBase::ALL.into_iter().find(|b| b.name() == word) else {
        let known: Vec<&str> = MemoryBase::ALL.iter().map(|b| b.name()).collect();
        return Err(Lexer::error_at(pos, format!("unknown memory `{word}`; known: {}", known.join(", "))));
    };
    lexer.expect("+")?;
    let offset = lexer.uint("an offset in bytes")?;
    // In this order, each once.
    const OF: [&str; 5] = ["past", "page", "row", "sequence", "worker"];
    let (mut strides, mut next) = ([0; OF.len()], 0);
    while lexer.accept("+") {
        let bytes = lexer.uint("bytes per past token, page, row, sequence or worker")?;
        lexer.expect("*")?;
        let Some(at) = (next..OF.len()).find(|&at| lexer.accept_keyword(OF[at])) else {
            return Err(lexer.error(format!("expected one of {}", OF[next..].join(", "))));
        };
        (strides[at], next) = (bytes, at + 1);
    }
    lexer.expect(":")?;
    let bytes = lexer.uint("a length in bytes")?;
    let [per_past, per_page, per_row, per_sequence, per_worker] = strides;
    Ok(BufferRef { base, offset, bytes, per_past, per_page, per_row, per_sequence, per_worker })
}

fn parse_grid(lexer: &mut Lexer) -> Result<LaunchGrid, ParseError> {
    let pos = lexer.position();
    lexer.expect("[")?;
    let blocks = lexer.list("]", parse_dim)?;
    lexer.expect_keyword("threads")?;
    lexer.expect("[")?;
    let threads = lexer.list("]", |lexer| lexer.u32("a number of threads"))?;
    match (blocks.try_into(), threads.try_into()) {
        (Ok(blocks), Ok(threads)) => Ok(LaunchGrid { blocks, threads }),
        _ => Err(Lexer::error_at(pos, "expected three block extents and three thread extents")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dim::SizeSymbol;

    const TEXT: &str = "step @decode arena 4096 {
  launch @add(arena+0:1024, weights+64:1024, state+128+32*past:64; n, 2*n + 1) grid [n, 1, 1] threads [32, 1, 1]
  barrier
  launch @\"odd name\"()
  launch @sizes(; floordiv(n + 15, 16))
  launch @mix(arena+64+256*row:256, state+128+32*past+64*row:64) each by mul(n, n + past)
  launch @norm(arena+64+256*row+64*sequence:256) each by 1
  launch @attend(arena+64+256*row:256) each single by past + 65
  launch @attend(arena+64+256*row:256; n) each several by mul(n, n + past)
  launch @head(arena+64:256; n) wanted pieces 32
  launch @norm(arena+64+512*worker:256) each worker
  launch @product(arena+64+512*worker:256, arena+0:64) pieces 32
  launch @attention(arena+0:64) pieces min(floordiv(past + 1, 1024), 32)
  exchange arena+0:256 to arena+256:512 rows n bytes 64 ranks 2
  exchange arena+0:256 to logits+0:512 rows n bytes 64 ranks 2 wanted
}
";

    fn parse(text: &str) -> Result<StepProgram, ParseError> {
        parse_step(&mut Lexer::new(text)?)
    }

    #[test]
    fn prints_as_read() {
        let step = parse(TEXT).unwrap();
        assert_eq!(print_step(&step), TEXT);
        assert_eq!(step.items.len(), 14);
        let shares = |item: &StepItem| item.launch().map(|l| l.schedule.clone()).unwrap_or_default();
        let growing = Dim::sym(SizeSymbol::Past).add(&1.into()).floor_div(1024).minimum(&32.into());
        let [.., product, attention, _, _] = &step.items[..] else { panic!("fourteen items") };
        assert_eq!(shares(product), WorkSchedule::Dynamic { chunks: 32.into() });
        assert_eq!(shares(attention), WorkSchedule::Dynamic { chunks: growing });
    }

    #[test]
    fn bad_steps_are_refused_with_their_place() {
        for (from, to, message) in [
            (
                "weights+64",
                "heap+64",
                "2:29: unknown memory `heap`; known: weights, adapters, state, pages, page_table, arena, tokens, wanted, logits, probs, temperature",
            ),
            ("barrier", "fence", "3:3: expected `launch`, `exchange`, `barrier` or `}`, found `fence`"),
            ("[32, 1, 1]", "[32, 1]", "2:85: expected three block extents and three thread extents"),
            ("arena+0:1024", "arena+0", "2:22: expected `:`, found `,`"),
            ("arena 4096", "4096", "1:14: expected `arena`, found 4096"),
            ("64 ranks 2\n", "64\n", "15:3: expected `ranks`, found `exchange`"),
        ] {
            let text = TEXT.replace(from, to);
            assert_ne!(text, TEXT);
            assert_eq!(parse(&text).unwrap_err().to_string(), message);
        }
        for end in 0..TEXT.len() - 1 {
            assert!(parse(&TEXT[..end]).is_err(), "{}", &TEXT[..end]);
        }
    }
}
