//! Text of lowered entry functions: buffers, launches on them, and the new values of states.
//!
//! ```text
//! entry @decode_batch batched {
//!   %0 = input 0 bytes 4*n
//!   %1 = param @emb.weight bytes 4096
//!   %2 = temp bytes 256*n apart
//!   launch @rows(in %0, in %1, out %2 rows n over [0] stride 256; n) each
//!   exchange %2 to %4 rows n bytes 256 ranks 2
//!   update @s = %2 by @copy(in %2, out %3)
//! }
//! ```
//! After a buffer: how workers share its elements (`rows`, `tiles`; nothing: any worker any element), the
//! arguments whose memory an output may take `over`, and the bytes from row to row (`stride`) and from
//! `sequence` to sequence. A `batched` entry takes one row of each sequence, a `ragged` one any number.

use super::list;
use mlcc_ir::entity::{EntityArena, EntityId};
use mlcc_ir::kernel::{Kernel, ParamAccess};
use mlcc_ir::module::{Module, StateId};
use mlcc_ir::sequences::RowBatching;
use mlcc_ir::step::{GatherShape, RepeatMode};
use mlcc_ir::text::{
    LexToken, Lexer, ParseError, one_of, parse_dim, parse_parts, parse_schedule, print_name, print_parts,
    print_schedule,
};
use mlcc_kernels::lower::plan::{
    BufferArg, BufferId, BufferKind, LaunchWork, LoweredBuffer, LoweredEntry, LoweredLaunch, Partition,
};

const ACCESSES: [ParamAccess; 3] = [ParamAccess::In, ParamAccess::Out, ParamAccess::InOut];

fn access_name(access: ParamAccess) -> &'static str {
    match access {
        ParamAccess::In => "in",
        ParamAccess::Out => "out",
        ParamAccess::InOut => "inout",
    }
}

pub(super) fn print(module: &Module, kernels: &[Kernel], entry: &LoweredEntry) -> String {
    let batching = match entry.batching {
        RowBatching::Single => "",
        RowBatching::OneEach => " batched",
        RowBatching::Ragged => " ragged",
    };
    let mut out = format!("entry {}{batching} {{\n", print_name('@', &entry.name));
    for (id, buffer) in entry.buffers.iter() {
        let apart = if buffer.apart { " apart" } else { "" };
        let memory = print_memory(module, buffer.memory);
        out.push_str(&format!("  %{} = {memory} bytes {}{apart}\n", id.index(), buffer.bytes));
    }
    for launch in &entry.launches {
        match &launch.work {
            LaunchWork::Kernel(_) => out.push_str(&format!("  launch {}\n", print_launch(kernels, launch))),
            LaunchWork::AllGather(parts) => out.push_str(&format!("  {}\n", print_all_gather(launch, parts))),
        }
    }
    for ((state, value), copy) in entry.updates.iter().zip(&entry.copies) {
        let state = print_name('@', &module.states[*state].name);
        out.push_str(&format!("  update {state} = %{} by {}\n", value.index(), print_launch(kernels, copy)));
    }
    out.push_str("}\n");
    out
}

fn print_memory(module: &Module, memory: BufferKind) -> String {
    let state = |s: StateId| print_name('@', &module.states[s].name);
    match memory {
        BufferKind::Param(p) => format!("param {}", print_name('@', &module.params[p].name)),
        BufferKind::State(s) => format!("state {}", state(s)),
        BufferKind::NewRows(s) => format!("new_rows {}", state(s)),
        BufferKind::PageTable => "page_table".into(),
        BufferKind::Input(i) => format!("input {i}"),
        BufferKind::Output(i) => format!("output {i}"),
        BufferKind::Temp => "temp".into(),
    }
}

fn print_all_gather(launch: &LoweredLaunch, parts: &GatherShape) -> String {
    let buffers: Vec<String> = launch.args.iter().map(|a| format!("%{}", a.buffer.index())).collect();
    format!("exchange {} {}", buffers.join(" to "), print_parts(parts, launch.repeat == RepeatMode::Outputs))
}

fn print_launch(kernels: &[Kernel], launch: &LoweredLaunch) -> String {
    let args = list(launch.args.iter().map(print_arg));
    let dims = if launch.dims.is_empty() { String::new() } else { format!("; {}", list(&launch.dims)) };
    let schedule = print_schedule(launch.grid.as_ref(), &launch.repeat, &launch.schedule);
    let name = launch.kernel().map_or("", |kernel| &kernels[kernel].name);
    format!("{}({args}{dims}){schedule}", print_name('@', name))
}

fn print_arg(arg: &BufferArg) -> String {
    let mut out = format!("{} %{}", access_name(arg.access), arg.buffer.index());
    match &arg.partition {
        None => {}
        Some(Partition::Rows(rows)) => out.push_str(&format!(" rows {rows}")),
        Some(Partition::Tiles(tiles)) => out.push_str(&format!(" tiles {tiles}")),
    }
    if !arg.in_place.is_empty() {
        out.push_str(&format!(" over [{}]", list(&arg.in_place)));
    }
    if arg.row_bytes > 0 {
        out.push_str(&format!(" stride {}", arg.row_bytes));
    }
    if arg.sequence_bytes > 0 {
        out.push_str(&format!(" sequence {}", arg.sequence_bytes));
    }
    out
}

/// Reads an entry; the lexer is at `entry`. Kernels are those of the level so far.
pub(super) fn parse(
    lexer: &mut Lexer,
    module: &Module,
    kernels: &[Kernel],
) -> Result<LoweredEntry, ParseError> {
    lexer.expect_keyword("entry")?;
    let name = lexer.at_name("the name of an entry function")?;
    let batching = match lexer.accept_keyword("batched") {
        true => RowBatching::OneEach,
        false if lexer.accept_keyword("ragged") => RowBatching::Ragged,
        false => RowBatching::Single,
    };
    let mut entry = LoweredEntry {
        name,
        batching,
        buffers: EntityArena::new(),
        launches: Vec::new(),
        updates: Vec::new(),
        copies: Vec::new(),
    };
    lexer.expect("{")?;
    while !lexer.accept("}") {
        if matches!(lexer.peek(), LexToken::Percent(_)) {
            let next = entry.buffers.len();
            numbered(lexer, next)?;
            lexer.expect("=")?;
            entry.buffers.push(parse_memory(lexer, module)?);
        } else if lexer.accept_keyword("launch") {
            entry.launches.push(parse_launch(lexer, kernels, &entry.buffers)?);
        } else if lexer.accept_keyword("exchange") {
            let part = buffer(lexer, &entry.buffers)?;
            lexer.expect_keyword("to")?;
            let all = buffer(lexer, &entry.buffers)?;
            let (parts, wanted) = parse_parts(lexer)?;
            entry.launches.push(LoweredLaunch::all_gather(part, all, parts, wanted));
        } else if lexer.accept_keyword("update") {
            let state = parse_state(lexer, module)?;
            lexer.expect("=")?;
            entry.updates.push((state, buffer(lexer, &entry.buffers)?));
            lexer.expect_keyword("by")?;
            entry.copies.push(parse_launch(lexer, kernels, &entry.buffers)?);
        } else {
            let message =
                format!("expected a buffer, launch, exchange, update or `}}`, found {}", lexer.peek());
            return Err(lexer.error(message));
        }
    }
    Ok(entry)
}

/// `%next`: buffers are numbered from 0 on.
pub(super) fn numbered(lexer: &mut Lexer, next: usize) -> Result<(), ParseError> {
    let pos = lexer.position();
    match lexer.percent("a buffer")? {
        name if name == next.to_string() => Ok(()),
        name => Err(Lexer::error_at(pos, format!("expected buffer %{next}, found %{name}"))),
    }
}

fn buffer(lexer: &mut Lexer, known: &EntityArena<BufferId, LoweredBuffer>) -> Result<BufferId, ParseError> {
    let pos = lexer.position();
    let name = lexer.percent("a buffer")?;
    let id = name.parse().ok().filter(|&i: &usize| i < known.len() && i.to_string() == name);
    id.map(BufferId::from_index)
        .ok_or_else(|| Lexer::error_at(pos, format!("buffer %{name} is not declared before this use")))
}

fn parse_state(lexer: &mut Lexer, module: &Module) -> Result<StateId, ParseError> {
    let pos = lexer.position();
    let name = lexer.at_name("the name of a state")?;
    module.state(&name).ok_or_else(|| Lexer::error_at(pos, format!("state @{name} is not declared")))
}

fn parse_memory(lexer: &mut Lexer, module: &Module) -> Result<LoweredBuffer, ParseError> {
    let pos = lexer.position();
    let memory = match lexer.ident("param, state, new_rows, page_table, input, output or temp")?.as_str() {
        "param" => {
            let pos = lexer.position();
            let name = lexer.at_name("the name of a parameter")?;
            let id = module.param(&name);
            BufferKind::Param(
                id.ok_or_else(|| Lexer::error_at(pos, format!("parameter @{name} is not declared")))?,
            )
        }
        "state" => BufferKind::State(parse_state(lexer, module)?),
        "new_rows" => BufferKind::NewRows(parse_state(lexer, module)?),
        "page_table" => BufferKind::PageTable,
        "input" => BufferKind::Input(lexer.u32("the number of an input")?),
        "output" => BufferKind::Output(lexer.u32("the number of an output")?),
        "temp" => BufferKind::Temp,
        other => {
            let message = format!(
                "expected param, state, new_rows, page_table, input, output or temp, found `{other}`"
            );
            return Err(Lexer::error_at(pos, message));
        }
    };
    lexer.expect_keyword("bytes")?;
    let bytes = parse_dim(lexer)?;
    Ok(LoweredBuffer { memory, bytes, apart: lexer.accept_keyword("apart") })
}

fn parse_launch(
    lexer: &mut Lexer,
    kernels: &[Kernel],
    buffers: &EntityArena<BufferId, LoweredBuffer>,
) -> Result<LoweredLaunch, ParseError> {
    let pos = lexer.position();
    let name = lexer.at_name("the kernel to launch")?;
    let kernel = kernels.iter().position(|k| k.name == name);
    let kernel =
        kernel.ok_or_else(|| Lexer::error_at(pos, format!("the level has no kernel @{name} above")))?;
    lexer.expect("(")?;
    let (mut args, mut dims) = (Vec::new(), Vec::new());
    while !lexer.accept(")") {
        if lexer.accept(";") {
            dims = lexer.list(")", parse_dim)?;
            break;
        }
        args.push(parse_arg(lexer, buffers)?);
        if !lexer.accept(",") && !matches!(lexer.peek(), LexToken::Punct(";" | ")")) {
            return Err(lexer.error("expected `,`, `;` or `)` after an argument"));
        }
    }
    let (grid, repeat, shares) = parse_schedule(lexer)?;
    Ok(LoweredLaunch { work: LaunchWork::Kernel(kernel), args, dims, grid, repeat, schedule: shares })
}

fn parse_arg(
    lexer: &mut Lexer,
    buffers: &EntityArena<BufferId, LoweredBuffer>,
) -> Result<BufferArg, ParseError> {
    let access = one_of(lexer, &ACCESSES, access_name)?;
    let buffer = buffer(lexer, buffers)?;
    let partition = if lexer.accept_keyword("rows") {
        Some(Partition::Rows(parse_dim(lexer)?))
    } else if lexer.accept_keyword("tiles") {
        Some(Partition::Tiles(lexer.int("a number of tiles")?))
    } else {
        None
    };
    let in_place = match lexer.accept_keyword("over") {
        true => {
            lexer.expect("[")?;
            lexer.list("]", |lexer| Ok(lexer.u32("the number of an argument")? as usize))?
        }
        false => Vec::new(),
    };
    let mut bytes = |keyword, what| if lexer.accept_keyword(keyword) { lexer.uint(what) } else { Ok(0) };
    let row_bytes = bytes("stride", "bytes from row to row")?;
    let sequence_bytes = bytes("sequence", "bytes from sequence to sequence")?;
    Ok(BufferArg { buffer, access, partition, in_place, row_bytes, sequence_bytes })
}
