//! Equivalence of two modules: both are interpreted on the same random weights and inputs. For tests of
//! passes.

use crate::compare::{ComparisonError, Tolerance, compare};
use crate::graph::{
    GraphError, Interpreter, RankError, RankedModel, SequenceRows, StateValues, Tensor, WeightLoadError,
    param_value, param_value_of_rank,
};
use mlcc_ir::dim::SymValues;
use mlcc_ir::graph::{Function, FunctionKind};
use mlcc_ir::module::{Module, ParamSource};
use mlcc_ir::sequences::{RowBatching, row_batching};
use mlcc_ir::types::{DType, TensorType};
use std::collections::BTreeMap;

/// Random integers are below this: valid ids for every table in tests.
const IDS: u64 = 8;

#[derive(Debug, thiserror::Error)]
pub enum EquivalenceError {
    #[error("{module} module: {error}")]
    Fails { module: &'static str, error: GraphError },
    #[error(transparent)]
    Weights(#[from] WeightLoadError),
    #[error("the split module: {0}")]
    Rank(#[from] RankError),
    #[error("function @{function}, step {step} with n = {n}, output {output}: rank {rank} has other bits")]
    Bits { function: String, step: usize, n: i64, output: usize, rank: usize },
    #[error("function @{function}, step {step} with n = {n}, {what}: {mismatch}")]
    Values { function: String, step: usize, n: i64, what: String, mismatch: ComparisonError },
    #[error("the module has no {0} any more")]
    Gone(String),
}

/// Random numbers in multiples of 1/8 from -2 to 2, the same on every machine.
struct RandomEighths(u64);

impl RandomEighths {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// A tensor of a type: floats in multiples of 1/8 from -2 to 2, integers from 0 to 7.
pub fn random_tensor(dtype: DType, dims: &[usize], seed: u64) -> Tensor {
    let mut numbers = RandomEighths(seed);
    let mut element = || match dtype.is_int() {
        true => (numbers.next() % IDS) as f64,
        false => (numbers.next() % 33) as f64 / 8.0 - 2.0,
    };
    let data = (0..dims.iter().product()).map(|_| element()).collect();
    Tensor::new(dtype, dims, data)
}

/// Random tensors for every input of a function; the rows whose logits it is asked for are some that there
/// are.
pub fn random_inputs(f: &Function, syms: &SymValues, seed: u64) -> Vec<Tensor> {
    let dims = |ty: &TensorType| ty.dims.iter().map(|d| d.eval(syms).max(0) as usize).collect::<Vec<_>>();
    let inputs = f.inputs.iter().enumerate();
    let mut inputs: Vec<Tensor> =
        inputs.map(|(i, &v)| random_tensor(f.ty(v).dtype, &dims(f.ty(v)), seed + i as u64)).collect();
    if let (RowBatching::Ragged, [_, wanted, ..]) = (row_batching(f), &mut inputs[..]) {
        wanted.data.iter_mut().for_each(|row| *row %= syms.n as f64);
    }
    inputs
}

/// A random checkpoint: every tensor that a module's parameters name, in the shape that they expect.
pub struct RandomWeights {
    tensors: BTreeMap<String, Tensor>,
}

impl RandomWeights {
    /// Sources that join tensors are taken to join equal parts.
    pub fn new(module: &Module, seed: u64) -> RandomWeights {
        let mut weights = RandomWeights { tensors: BTreeMap::new() };
        for param in module.params.values() {
            let dims: Vec<usize> =
                param.ty.dims.iter().map(|d| d.as_const().unwrap_or(1).max(0) as usize).collect();
            match param.is_adapter() {
                true => weights.add(&ParamSource::Tensor(param.name.clone()), dims, seed),
                false => weights.add(&param.source, dims, seed),
            }
        }
        weights
    }
    fn add(&mut self, source: &ParamSource, mut dims: Vec<usize>, seed: u64) {
        match source {
            ParamSource::Tensor(name) => {
                let seed = seed.wrapping_add(self.tensors.len() as u64 * 7919);
                let tensor = random_tensor(DType::F32, &dims, seed);
                self.tensors.entry(name.clone()).or_insert(tensor);
            }
            ParamSource::Scale(_, s)
            | ParamSource::NegExp(s)
            | ParamSource::Exp(s)
            | ParamSource::Offset(_, s)
            | ParamSource::Columns(_, s)
            | ParamSource::UnitRows(s) => self.add(s, dims, seed),
            ParamSource::Rows(blocks, s) => {
                if let Some(rows) = dims.first_mut() {
                    *rows = blocks.of;
                }
                self.add(s, dims, seed);
            }
            ParamSource::ColumnRange(range, s) => {
                if let Some(columns) = dims.last_mut() {
                    *columns = range.of;
                }
                self.add(s, dims, seed);
            }
            // The parameters of the whole module make the tensors.
            ParamSource::Values(_) | ParamSource::Ranks(_) | ParamSource::Adapter => {}
            ParamSource::Transpose(s) => {
                dims.reverse();
                self.add(s, dims, seed);
            }
            ParamSource::Concat(parts) => {
                if let Some(rows) = dims.first_mut() {
                    *rows /= parts.len().max(1);
                }
                parts.iter().for_each(|s| self.add(s, dims.clone(), seed));
            }
        }
    }
    /// [`RandomWeights::values`] of a rank.
    pub fn values_of_rank(&self, module: &Module, rank: usize) -> Result<Vec<Tensor>, WeightLoadError> {
        let tensor = |name: &str| self.tensors.get(name).cloned();
        module.params.values().map(|p| param_value_of_rank(p, rank, &tensor)).collect()
    }
    /// Values of all parameters of a module made from these tensors, by parameter.
    pub fn values(&self, module: &Module) -> Result<Vec<Tensor>, WeightLoadError> {
        let tensor = |name: &str| self.tensors.get(name).cloned();
        module.params.values().map(|p| param_value(p, &tensor)).collect()
    }
}

/// Runs every entry of `before` in both modules, for one and for three tokens (of as many sequences, where it
/// decodes a batch; of up to two, where it takes pieces), two steps each, and compares outputs and states.
pub fn same_meaning(
    before: &Module,
    after: &Module,
    seed: u64,
    tolerance: Tolerance,
) -> Result<(), EquivalenceError> {
    let weights = RandomWeights::new(before, seed);
    let (old, new) = (weights.values(before)?, weights.values(after)?);
    let entries = before.functions.values().filter(|f| f.kind == FunctionKind::Entry);
    for f in entries {
        for n in [1, 3] {
            same_function(ModulePair { before, after, old: &old, new: &new }, f, n, seed, tolerance)?;
        }
    }
    Ok(())
}

/// Runs every entry of `whole`, and on all ranks of `split`, as [`same_meaning`] does: every rank gives the
/// bits of the whole.
pub fn same_on_ranks(whole: &Module, split: &Module, seed: u64) -> Result<(), EquivalenceError> {
    let weights = RandomWeights::new(whole, seed);
    let values = weights.values(whole)?;
    let fails = |error| EquivalenceError::Fails { module: "the original", error };
    let interpreter = Interpreter::new(whole, |id| values[id.0 as usize].clone());
    let of_rank = |rank| Ok((split, weights.values_of_rank(split, rank)?));
    let ranks =
        RankedModel::new((0..split.rank_count()).map(of_rank).collect::<Result<_, EquivalenceError>>()?);
    for f in whole.functions.values().filter(|f| f.kind == FunctionKind::Entry) {
        for n in [1, 3] {
            let syms = SymValues::for_tokens(n);
            let new = |module| {
                StateValues::new(module).map(|state| vec![state; sequence_count(f, n)]).map_err(fails)
            };
            let (mut states, mut parts) = (new(whole)?, vec![new(split)?; split.rank_count()]);
            for step in 0..2 {
                let inputs = random_inputs(f, &syms, seed.wrapping_add(100 * (step as u64 + 1)));
                let want = run(&interpreter, &f.name, &inputs, &mut states, syms).map_err(fails)?;
                let got = ranks.run(&mut parts, |rank, states| run(rank, &f.name, &inputs, states, syms))?;
                for (rank, got) in got.iter().enumerate() {
                    let same = |(g, w): (&Tensor, &Tensor)| {
                        let bits = |t: &Tensor| t.data.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                        (g.dtype, &g.dims, bits(g)) == (w.dtype, &w.dims, bits(w))
                    };
                    if let Some(output) = got.iter().zip(&want).position(|pair| !same(pair)) {
                        return Err(EquivalenceError::Bits {
                            function: f.name.clone(),
                            step,
                            n,
                            output,
                            rank,
                        });
                    }
                }
            }
        }
    }
    Ok(())
}

/// Sequences of a call with `n` rows.
fn sequence_count(f: &Function, n: i64) -> usize {
    match row_batching(f) {
        RowBatching::Single => 1,
        RowBatching::OneEach => n as usize,
        RowBatching::Ragged => 2.min(n as usize),
    }
}

#[derive(Clone, Copy)]
struct ModulePair<'a> {
    before: &'a Module,
    after: &'a Module,
    old: &'a [Tensor],
    new: &'a [Tensor],
}

fn same_function(
    ModulePair { before, after, old, new }: ModulePair,
    f: &Function,
    n: i64,
    seed: u64,
    tolerance: Tolerance,
) -> Result<(), EquivalenceError> {
    let fails = |module| move |error| EquivalenceError::Fails { module, error };
    let (first, second) = ("the original", "the changed");
    let reference = Interpreter::new(before, |id| old[id.0 as usize].clone());
    let changed = Interpreter::new(after, |id| new[id.0 as usize].clone());
    let sequences = sequence_count(f, n);
    let mut states = vec![StateValues::new(before).map_err(fails(first))?; sequences];
    let mut new_states = vec![StateValues::new(after).map_err(fails(second))?; sequences];
    let syms = SymValues::for_tokens(n);
    for step in 0..2 {
        let inputs = random_inputs(f, &syms, seed.wrapping_add(100 * (step as u64 + 1)));
        let want = run(&reference, &f.name, &inputs, &mut states, syms).map_err(fails(first))?;
        let got = run(&changed, &f.name, &inputs, &mut new_states, syms).map_err(fails(second))?;
        let check = |what: String, got: &Tensor, want: &Tensor| {
            compare(got.data.iter().copied(), want.data.iter().copied(), tolerance).map(drop).map_err(
                |mismatch| EquivalenceError::Values { function: f.name.clone(), step, n, what, mismatch },
            )
        };
        for (i, (g, w)) in got.iter().zip(&want).enumerate() {
            check(format!("output {i}"), g, w)?;
        }
        for (id, state) in before.states.iter() {
            for (states, new_states) in states.iter().zip(&new_states) {
                let value = after.state(&state.name).and_then(|id| new_states.get(id));
                let (Some(g), Some(w)) = (value, states.get(id)) else {
                    return Err(EquivalenceError::Gone(format!("state @{}", state.name)));
                };
                check(format!("state @{}", state.name), g, w)?;
            }
        }
    }
    Ok(())
}

/// One step, of a batch where the function decodes one.
fn run(
    interpreter: &Interpreter,
    function: &str,
    inputs: &[Tensor],
    states: &mut [StateValues],
    syms: SymValues,
) -> Result<Vec<Tensor>, GraphError> {
    let Some((id, f)) = interpreter.module().function(function) else {
        return interpreter.run_named(function, inputs, &mut states[0], syms);
    };
    let past = syms.past;
    match row_batching(f) {
        RowBatching::Single => interpreter.run(id, inputs, &mut states[0], syms),
        RowBatching::OneEach => interpreter.run_batch(id, inputs, states, &vec![past; states.len()]),
        RowBatching::Ragged => {
            // The first sequence has what the others leave.
            let others = states.len() as i64 - 1;
            let mut pieces = vec![SequenceRows { past, rows: 1 }; states.len()];
            pieces[0].rows = syms.n - others;
            interpreter.run_sequences(id, inputs, states, &pieces, ((syms.n + 1) / 2) as usize)
        }
    }
}
