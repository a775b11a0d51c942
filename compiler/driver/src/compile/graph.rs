//! The graph of an artifact, from which its kernels were made: the computation on the weights that are
//! stored, kept so that `mlcc verify` needs only the artifact.

use std::collections::BTreeMap;

use miniz_oxide::deflate::compress_to_vec_zlib;
use miniz_oxide::inflate::decompress_to_vec_zlib_with_limit;
use mlcc_abi::EntryPoint;
use mlcc_ir::module::{FuncId, Module};
use mlcc_ir::ops::Op;
use mlcc_ir::text::{parse_module, print_module};
use mlcc_ir::verify::verify_module;

/// The entry function that is kept: all others compute the same.
pub const ENTRY: &str = "prefill_logits";

/// The entry function of a model of texts, which has no other.
pub const TEXTS_ENTRY: &str = "step";

/// Level of deflate.
const LEVEL: u8 = 6;

/// Most bytes of text; the graph of a model with a hundred layers has a few million.
const LIMIT: usize = 1 << 28;

/// The entry function with what it calls, parameters and states, as deflated text; `None` for a model without
/// the function. With that of the source text, if there is one.
pub(super) fn to_section(module: &Module) -> Option<Vec<u8>> {
    let (entry, _) = module.function(ENTRY).or_else(|| module.function(TEXTS_ENTRY))?;
    let encode = module.function(EntryPoint::Encode.name()).map(|(id, _)| id);
    let kept = retain_functions(module, std::iter::once(entry).chain(encode).collect());
    Some(compress_to_vec_zlib(print_module(&kept).as_bytes(), LEVEL))
}

/// The module with these functions and those that they call.
fn retain_functions(module: &Module, mut wanted: Vec<FuncId>) -> Module {
    let mut kept = Module::new(module.name.clone());
    kept.params = module.params.clone();
    kept.states = module.states.clone();
    let mut at = 0;
    while let Some(&id) = wanted.get(at) {
        let called = module.functions[id].live_nodes().filter_map(|(_, node)| callee(&node.op));
        for id in called {
            if !wanted.contains(&id) {
                wanted.push(id);
            }
        }
        at += 1;
    }
    let ids: BTreeMap<FuncId, FuncId> =
        wanted.iter().map(|&id| (id, kept.functions.push(module.functions[id].clone()))).collect();
    for &new in ids.values() {
        let f = &mut kept.functions[new];
        for node in f.body.clone() {
            match &mut f.nodes[node].op {
                Op::Call(id) | Op::Scan { body: id, .. } => *id = ids[id],
                _ => {}
            }
        }
    }
    kept
}

fn callee(op: &Op) -> Option<FuncId> {
    match op {
        Op::Call(id) | Op::Scan { body: id, .. } => Some(*id),
        _ => None,
    }
}

/// Reads the section.
pub fn from_section(bytes: &[u8]) -> Result<Module, String> {
    let text = decompress_to_vec_zlib_with_limit(bytes, LIMIT).map_err(|e| e.to_string())?;
    let text = String::from_utf8(text).map_err(|e| e.to_string())?;
    let module = parse_module(&text).map_err(|e| e.to_string())?;
    verify_module(&module).map_err(|e| e.to_string())?;
    Ok(module)
}
