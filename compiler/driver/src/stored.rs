//! The graph of an artifact, interpreted on the very weights that the artifact stores: what its kernels have
//! to compute.

use std::collections::BTreeSet;

use mlcc_abi::{EntryPoint, section};
use mlcc_interp::graph::{GraphError, Interpreter, RankedModel, SequenceRows, StateValues, Tensor};
use mlcc_ir::dim::SymValues;
use mlcc_ir::entity::EntityId;
use mlcc_ir::module::{Module, ParamId, ParamSource};
use mlcc_ir::ops::Op;
use mlcc_ir::types::{DType, Packing};
use mlcc_models::Checkpoint;
use mlcc_passes::LoweredProgram;
use mlcc_quant::{dequantize, half_steps};
use mlcc_runtime::Model;

use crate::compile::graph::{ENTRY, TEXTS_ENTRY, from_section};
use crate::weights::{matrix_shape, param_of_rank, stored_param};

/// Most weights that are read: 12 bytes of memory for each.
const WEIGHTS: u64 = 1 << 28;

/// Most weights times positions that are interpreted: minutes.
const WORK: u64 = 1 << 33;

/// The relative distance by which each weight is moved, to see what small differences of activations may grow
/// to: as far as kernels may be off a part of the graph (16-bit codes in attention, blocks of 16-bit
/// activations).
const MOVED: f64 = 1.0 / 4096.0;

/// The way in which weights are moved before the graph is interpreted; the same way for the same seed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PerturbedWeights {
    /// The stored values.
    Unmoved,
    /// Values moved by up to 2^-12 of themselves.
    Slightly(u64),
    /// Values moved to where they may have been before they were rounded to the format that they are stored
    /// in, but at least as above.
    WithinSteps(u64),
}

/// The stored values of a parameter.
#[derive(Clone, Debug)]
struct StoredParam {
    value: Tensor,
    /// The distance of each weight from the value of its code before it was rounded, at most; empty where
    /// weights are plain numbers.
    steps: Vec<f32>,
}

/// The graph with its weights.
pub struct StoredGraph {
    module: Module,
    /// Parameters by rank, then by number; `None` where the entry function does not read it.
    params: Vec<Vec<Option<StoredParam>>>,
    /// Positions that may be interpreted, of all prompts together.
    pub positions: usize,
}

impl StoredGraph {
    /// Reads the graph and the weights of an artifact. The error is a reason not to interpret them, for
    /// people.
    pub fn open(model: &Model) -> Result<StoredGraph, String> {
        let bytes = model.section(section::GRAPH).ok_or("the artifact holds no graph: build it again")?;
        let module = from_section(bytes).map_err(|e| format!("section {}: {e}", section::GRAPH))?;
        StoredGraph::new(module, |module, id, rank| load_param(model, module, id, rank))
    }

    /// The graph of a program, with the weights as the weight writer would store them.
    pub fn of_program(program: &LoweredProgram, checkpoint: &Checkpoint) -> Result<StoredGraph, String> {
        StoredGraph::new(program.module.clone(), |module, id, rank| {
            let param = param_of_rank(&module.params[id], rank).map_err(|e| e.to_string())?;
            let stored = stored_param(checkpoint, &param, program.pack_options(&param.name));
            stored.map(|(value, steps)| StoredParam { value, steps }).map_err(|e| e.to_string())
        })
    }

    fn new(
        module: Module,
        stored: impl Fn(&Module, ParamId, usize) -> Result<StoredParam, String>,
    ) -> Result<StoredGraph, String> {
        let entries = [(ENTRY, 1), (TEXTS_ENTRY, 2)];
        let found = entries.iter().find_map(|&(name, inputs)| Some((name, inputs, module.function(name)?.1)));
        let (name, inputs, entry) = found.ok_or_else(|| format!("its graph has no function {ENTRY}"))?;
        if entry.inputs.len() != inputs || entry.outputs.is_empty() {
            return Err(format!("{name} of its graph does not take tokens and give logits or vectors"));
        }
        let nodes = module.functions.values().flat_map(|f| f.live_nodes());
        let read = nodes.filter_map(|(_, n)| if let Op::Param(id) = n.op { Some(id) } else { None });
        let used: BTreeSet<ParamId> = read.collect();
        let size = |id: &ParamId| {
            let (n, k) = matrix_shape(&module.params[*id]).unwrap_or((usize::MAX, 1));
            (n as u64).saturating_mul(k as u64)
        };
        let weights = used.iter().map(size).fold(0u64, u64::saturating_add);
        if weights > WEIGHTS {
            return Err(format!(
                "the graph has {weights} weights, and no more than {WEIGHTS} are interpreted: check a smaller model of the \
                 family, or judge the distance from the reference by --tolerance"
            ));
        }
        let mut params = vec![vec![None; module.params.len()]; module.rank_count()];
        for (rank, params) in params.iter_mut().enumerate() {
            for &id in &used {
                params[id.index()] = Some(stored(&module, id, rank)?);
            }
        }
        let positions = usize::try_from(WORK / weights.max(1)).unwrap_or(usize::MAX);
        Ok(StoredGraph { module, params, positions })
    }

    /// True if some weights have steps of a packed format.
    pub fn is_packed(&self) -> bool {
        self.params.iter().flatten().flatten().any(|param| !param.steps.is_empty())
    }

    /// True of models that choose experts for each token.
    pub fn chooses_experts(&self) -> bool {
        let mut nodes = self.module.functions.values().flat_map(|f| f.live_nodes());
        nodes.any(|(_, node)| matches!(node.op, Op::TopK { .. }))
    }

    /// Logits at every position of a prompt, one row after the other.
    pub fn logits(&self, tokens: &[i32], moved: PerturbedWeights) -> Result<Vec<f32>, String> {
        self.logits_after(&[], tokens, moved)
    }

    /// The same behind the source text of an encoder-decoder model, if there is one.
    pub fn logits_after(
        &self,
        source: &[i32],
        tokens: &[i32],
        moved: PerturbedWeights,
    ) -> Result<Vec<f32>, String> {
        let sizes = |tokens: &[i32]| SymValues::for_tokens(tokens.len() as i64);
        let behind = SymValues { past: source.len() as i64, ..sizes(tokens) };
        self.run(moved, 1, |interpreter, states| {
            if !source.is_empty() {
                interpreter.run_named(
                    EntryPoint::Encode.name(),
                    &[Tensor::ids(source)],
                    &mut states[0],
                    sizes(source),
                )?;
            }
            interpreter.run_named(ENTRY, &[Tensor::ids(tokens)], &mut states[0], behind)
        })
    }

    /// Vectors of texts, in order, by a model of texts.
    pub fn embeddings(&self, texts: &[&[i32]], moved: PerturbedWeights) -> Result<Vec<f32>, String> {
        let tokens = texts.concat();
        let pieces: Vec<SequenceRows> =
            texts.iter().map(|text| SequenceRows { past: 0, rows: text.len() as i64 }).collect();
        let ends = texts.iter().scan(0, |end, text| {
            *end += text.len() as i32;
            Some(*end - 1)
        });
        let mut wanted: Vec<i32> = ends.collect();
        wanted.resize(tokens.len(), 0);
        self.run(moved, texts.len(), |interpreter, states| {
            let (entry, _) = interpreter
                .module()
                .function(TEXTS_ENTRY)
                .ok_or_else(|| GraphError::NoFunction(format!("@{TEXTS_ENTRY}")))?;
            let inputs = [Tensor::ids(&tokens), Tensor::ids(&wanted)];
            interpreter.run_sequences(entry, &inputs, states, &pieces, texts.len())
        })
    }

    /// The first output of what `step` does with the states of `sequences` sequences.
    fn run(
        &self,
        moved: PerturbedWeights,
        sequences: usize,
        step: impl Fn(&Interpreter<'_>, &mut Vec<StateValues>) -> Result<Vec<Tensor>, GraphError> + Sync,
    ) -> Result<Vec<f32>, String> {
        let value = |(id, param): (usize, &Option<StoredParam>)| match param {
            Some(param) if is_table(&self.module.params[ParamId::from_index(id)].source) => {
                param.value.clone()
            }
            Some(param) => param.perturbed(moved, (id as u64) << 40),
            None => Tensor::f32(&[0], &[]),
        };
        let values = |rank: &Vec<Option<StoredParam>>| rank.iter().enumerate().map(value).collect();
        let ranks = RankedModel::new(self.params.iter().map(|rank| (&self.module, values(rank))).collect());
        let states = StateValues::new(&self.module).map_err(|e| e.to_string())?;
        let mut states = vec![vec![states; sequences]; self.params.len()];
        // All ranks give the same.
        let first = ranks.run(&mut states, step).map_err(|e| e.to_string())?.into_iter().next();
        Ok(first.as_ref().and_then(|out| out.first()).map(Tensor::to_f32).unwrap_or_default())
    }
}

/// True of what the model's definition has computed, as numbers of heads: such numbers are no weights, and
/// exact.
fn is_table(source: &ParamSource) -> bool {
    match source {
        ParamSource::Values(_) => true,
        ParamSource::Ranks(parts) => parts.iter().all(is_table),
        _ => false,
    }
}

/// Loads the values that the artifact stores for a parameter of its graph.
fn load_param(model: &Model, module: &Module, id: ParamId, rank: usize) -> Result<StoredParam, String> {
    let param = &module.params[id];
    let wrong = |what: &str| format!("parameter {} of its graph {what}", param.name);
    let (n, k) = matrix_shape(param).ok_or_else(|| wrong("has no constant shape"))?;
    let stored = model.table().find_param(&param.name).ok_or_else(|| wrong("is not among the weights"))?;
    let dims: Vec<usize> = param.ty.dims.iter().filter_map(|d| usize::try_from(d.as_const()?).ok()).collect();
    if !stored.dims.iter().map(|&d| d as usize).eq(dims.iter().copied()) {
        return Err(wrong("is stored in another shape"));
    }
    let dtype = DType::parse(&stored.format);
    let dtype = dtype.filter(|d| *d == param.ty.dtype).ok_or_else(|| wrong("is stored in another format"))?;
    let packing = match stored.packing.as_str() {
        "" => Some(Packing::RowMajor),
        name => Packing::ALL.into_iter().find(|p| p.name() == name),
    };
    let packing = packing.ok_or_else(|| wrong("is stored in an unknown order"))?;
    let bytes = model.section(&mlcc_runtime::weights_section(rank)).unwrap_or(&[]);
    let range = usize::try_from(stored.offset).ok().zip(usize::try_from(stored.bytes).ok());
    let bytes = range.and_then(|(at, len)| bytes.get(at..at.checked_add(len)?));
    let bytes = bytes.ok_or_else(|| wrong("lies outside of the weights"))?;
    let all = dequantize(dtype, packing, n, k, bytes).map_err(|e| wrong(&e.to_string()))?;
    let steps = if dtype.is_packed() { half_steps(dtype, packing, n, k, bytes) } else { Ok(Vec::new()) };
    let steps = steps.map_err(|e| wrong(&e.to_string()))?;
    Ok(StoredParam {
        value: Tensor { dtype, dims, data: all.iter().map(|&x| f64::from(x)).collect() },
        steps,
    })
}

impl StoredParam {
    /// The weights, each of them moved by its own share of what is permitted. `stream` keeps parameters
    /// apart.
    fn perturbed(&self, moved: PerturbedWeights, stream: u64) -> Tensor {
        let mut value = self.value.clone();
        let (seed, steps) = match moved {
            PerturbedWeights::Unmoved => return value,
            PerturbedWeights::Slightly(seed) => (seed, None),
            PerturbedWeights::WithinSteps(seed) => (seed, Some(&self.steps)),
        };
        let relative = match (steps, value.dtype) {
            (Some(_), DType::BF16) => 1.0 / 256.0,
            (Some(_), DType::F16) => 1.0 / 2048.0,
            _ => MOVED,
        };
        let mut state = seed.wrapping_add(stream);
        for (i, x) in value.data.iter_mut().enumerate() {
            // SplitMix64.
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            let unit = ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 52) as f64 - 1.0;
            let step = steps.and_then(|steps| steps.get(i)).map_or(0.0, |&step| f64::from(step));
            *x += unit * step.max(relative * x.abs());
        }
        value
    }
}
