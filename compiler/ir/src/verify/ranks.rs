//! Invariants of modules that are split among ranks.

use super::VerifyError;
use crate::graph::FunctionKind;
use crate::module::{Module, ParamSource};
use crate::ops::Op;
use crate::step::{AllGather, BufferRef, MemoryBase, StepItem, StepProgram};
use crate::text::node_label;

/// All that is split is split among equally many ranks, and only entry functions have all-gathers.
pub(super) fn verify_ranks(module: &Module) -> Result<(), VerifyError> {
    let ranks = module.rank_count();
    for param in module.params.values() {
        if let ParamSource::Ranks(parts) = &param.source
            && parts.len() != ranks
        {
            let message = format!("{} parts, the module is made for {ranks} ranks", parts.len());
            return Err(VerifyError::new(format!("parameter @{}", param.name), message));
        }
    }
    for f in module.functions.values() {
        for (id, node) in f.live_nodes() {
            let Op::AllGather { ranks: here } = node.op else { continue };
            let fault = match f.kind {
                FunctionKind::Entry if here == ranks && ranks > 1 => continue,
                FunctionKind::Entry => format!("joins {here} ranks, the module is made for {ranks}"),
                _ => "only entry functions exchange".into(),
            };
            let place = format!("function @{}, {}", f.name, node_label(f, id));
            return Err(VerifyError::new(place, fault));
        }
    }
    for step in &module.steps {
        for item in &step.items {
            if let StepItem::AllGather(exchange) = item
                && exchange.shape.ranks != ranks
            {
                let message = format!("joins {} ranks, the module is made for {ranks}", exchange.shape.ranks);
                return Err(VerifyError::new(format!("step @{}, exchange", step.name), message));
            }
        }
    }
    Ok(())
}

/// The rows have a size and lie in the arena or come from and go to memory of the call, at places that are
/// the same in every call.
pub(super) fn verify_exchange(step: &StepProgram, exchange: &AllGather) -> Result<(), VerifyError> {
    let AllGather { part, all, shape: parts, .. } = exchange;
    let bad = |message: String| Err(VerifyError::new(format!("step @{}, exchange", step.name), message));
    if parts.ranks < 2 || parts.row_bytes == 0 {
        return bad(format!("{} ranks with rows of {} bytes join nothing", parts.ranks, parts.row_bytes));
    }
    let Some(all_bytes) = parts.row_bytes.checked_mul(parts.ranks as u64) else {
        return bad(format!("rows of {} bytes of {} ranks are too long", parts.row_bytes, parts.ranks));
    };
    for (what, place, row) in [("part", part, parts.row_bytes), ("result", all, all_bytes)] {
        let BufferRef { per_past, per_page, per_row, per_sequence, .. } = place;
        if [per_past, per_page, per_row, per_sequence].iter().any(|&&bytes| bytes > 0) {
            return bad(format!("the {what} lies at another place for every sequence"));
        }
        let end = place.offset.checked_add(place.bytes);
        if place.base == MemoryBase::Arena && end.is_none_or(|end| end > step.arena_bytes) {
            return bad(format!("the {what} ends beyond the arena of {} bytes", step.arena_bytes));
        }
        let rows = parts.rows.as_const().unwrap_or(1);
        if rows < 1
            || u64::try_from(rows).ok().and_then(|rows| rows.checked_mul(row)).is_none_or(|b| b > place.bytes)
        {
            return bad(format!("the {what} has {} bytes, {rows} rows of {row} are joined", place.bytes));
        }
    }
    if all.per_worker > 0 {
        return bad("the result has a copy for each worker, one of which exchanges".into());
    }
    let apart = part.base != all.base || part.end() <= all.offset || all.end() <= part.offset;
    if !apart {
        return bad("the part lies in the result".into());
    }
    Ok(())
}
