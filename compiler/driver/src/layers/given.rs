//! The graph with the outputs of its layers given by another executor.
//!
//! Every part of the model is interpreted on what the executor has in the place of its operands, so that a
//! departure is that part's own: an activation that rounds to the other code in an early layer does not move
//! the codes of all later ones. States (caches, those of recurrent models) are the interpreter's.

use std::collections::BTreeSet;

use mlcc_interp::graph::Tensor;
use mlcc_ir::graph::{Function, ValueId};
use mlcc_ir::module::Module;
use mlcc_models::Checkpoint;

use super::run::{GraphLayers, ParamPacking};
use super::{BoxedError, TapCall, TapOutput};

/// The entry functions that calls go to.
const ENTRIES: [&str; 2] = ["prefill", "decode"];

/// The taps of a graph, each computed from those of `found` before it.
pub fn run_given(
    module: &Module,
    checkpoint: &Checkpoint,
    packs: &ParamPacking,
    calls: &[TapCall],
    found: &[Vec<TapOutput>],
) -> Result<Vec<Vec<TapOutput>>, BoxedError> {
    let in_all = |entry: &str, name: &String| {
        let mut of_entry = calls.iter().zip(found).filter(|(call, _)| call.entry() == entry);
        of_entry.all(|(_, taps)| taps.iter().any(|tap| tap.name == *name))
    };
    let mut module = module.clone();
    let mut given: Vec<(&str, Vec<String>)> = Vec::new();
    for entry in ENTRIES {
        let Some((id, _)) = module.function(entry) else { continue };
        let names: Vec<String> = module.taps_of(entry).to_vec();
        let names = replace_taps(&mut module.functions[id], &names, |name| in_all(entry, name));
        given.push((entry, names));
    }
    let mut graph = GraphLayers::new(&module, checkpoint, packs)?;
    let mut all = Vec::with_capacity(calls.len());
    for (call, taps) in calls.iter().zip(found) {
        let names = given.iter().find(|(entry, _)| *entry == call.entry()).map_or(&[][..], |(_, n)| n);
        let values = names.iter().filter_map(|name| taps.iter().find(|tap| tap.name == *name));
        all.push(graph.taps(call, values.map(tensor).collect())?);
    }
    Ok(all)
}

fn tensor(tap: &TapOutput) -> Tensor {
    let rows = tap.values.len() / tap.width.max(1);
    let values = tap.values.iter().map(|&x| f64::from(x)).collect();
    Tensor::new(mlcc_ir::types::DType::F32, &[rows, tap.width], values)
}

/// Makes inputs of the requested taps: the readers of such a value read the input. The outputs stay. Returns
/// the taps of the new inputs, in their order.
fn replace_taps(f: &mut Function, names: &[String], wanted: impl Fn(&String) -> bool) -> Vec<String> {
    let taps: Vec<(String, ValueId)> =
        names.iter().cloned().zip(f.outputs.iter().skip(1).copied()).filter(|(n, _)| wanted(n)).collect();
    let (mut given, mut seen) = (Vec::new(), BTreeSet::new());
    for (name, value) in taps {
        // A value may have two names.
        if !seen.insert(value) {
            continue;
        }
        let input = f.add_input(f.ty(value).clone());
        for node in f.body.clone() {
            f.nodes[node].inputs.iter_mut().filter(|v| **v == value).for_each(|v| *v = input);
        }
        given.push(name);
    }
    given
}
