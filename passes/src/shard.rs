//! Splits a model among ranks: every product by rows of its weight, attention and scans by heads, embedding
//! and head by vocabulary. Parts that one rank has and all need are gathered by an all-gather (`exchange`).
//!
//! A value is held whole by every rank, or each rank holds one of parts along an axis that are equally long
//! ([`ShardSpec`]). Functions are rebuilt in order, and each op says what it makes of the parts that it gets
//! (`ops`); where it can do nothing with them, they are gathered first. Values of parameters and constants
//! are computed where they are needed, whole or in parts (`placement`). So no sum crosses ranks, and each
//! rank computes elements of the whole model with their bits.
//!
//! That is [`TpMode::Codes`]. With [`TpMode::Reduce`] a product of values that are held in parts is split by
//! columns of its weight: each rank has a term of a sum, which all ranks add in their order (`partial_sums`),
//! so its bits depend on the number of ranks.
//!
//! All ranks run the same functions. Only parameters differ: their source has a part for each rank.
//!
//! The placement of states, and products that are not split like others (keys of fewer heads than ranks), are
//! found out on the way: then the pass begins again with what it has learned ([`ShardPlan`]).

mod adapters;
mod mode;
mod ops;
mod partial_sums;
mod placement;
mod products;
mod ranges;
mod recompute;
mod shard_spec;

pub use mode::TpMode;

use crate::{LoweredProgram, PassContext, PassError, PassOptions, dce};
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::{Function, FunctionKind};
use mlcc_ir::module::{ColumnRange, FuncId, ModelParam, Module, ParamId, ParamRole, ParamSource, StateId};
use mlcc_ir::ops::OpError;
use mlcc_ir::types::{DType, TensorType};
use placement::FunctionSharder;
use shard_spec::{AxisParts, AxisSegments, RowShardSpec, ShardSpec, cut_type};
use std::collections::{BTreeMap, BTreeSet};

/// Numbers of ranks that an error tries.
const TRIED: std::ops::RangeInclusive<usize> = 2..=16;
/// A state's cut may be found out again so often; then every rank holds all of it.
const TRIES: usize = 3;
/// The pass begins again at most so often; every time it has learned something of states or products.
const ROUNDS: usize = 100;

/// The reasons why a model cannot be split.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ShardError {
    #[error("{what} cannot be divided among {ranks} ranks{works}")]
    Divide { what: String, ranks: usize, works: PossibleRanks },
    #[error("{what} cannot be split among {ranks} ranks: {why}; compile the model for one rank")]
    Unsupported { what: String, ranks: usize, why: String },
}

/// Numbers of ranks that a model can be split among.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PossibleRanks(pub Vec<usize>);

impl std::fmt::Display for PossibleRanks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let numbers: Vec<String> = self.0.iter().map(ToString::to_string).collect();
        match numbers.is_empty() {
            true => write!(f, "; no number of ranks up to {} works", TRIED.end()),
            false => write!(f, "; up to {}, these numbers work: {}", TRIED.end(), numbers.join(", ")),
        }
    }
}

/// The reasons why a function cannot be rebuilt now.
enum Unshardable {
    /// Something was learned: begin again.
    Again,
    /// A scan's body would need an all-gather.
    Gathers,
    Fails(ShardError),
    Op(OpError),
}

impl From<OpError> for Unshardable {
    fn from(error: OpError) -> Unshardable {
        Unshardable::Op(error)
    }
}

/// Knowledge from before the functions are rebuilt.
struct ShardPlan {
    ranks: usize,
    /// True if products of parts are split by columns.
    sums: bool,
    /// Parts of the rows of products, where they are not split by the rule for all.
    products: BTreeMap<ParamId, AxisParts>,
    /// Products whose parts attention has chosen.
    chosen: BTreeSet<ParamId>,
    /// Segments of the rows of products that are read apart.
    segments: BTreeMap<ParamId, AxisSegments>,
    /// Placements of states that a round was wrong about; `None`: whole.
    states: BTreeMap<StateId, Option<ShardSpec>>,
    /// The number of times that the cut of a state was wrong.
    wrong: BTreeMap<StateId, usize>,
}

impl ShardPlan {
    fn divide(&self, what: String) -> Unshardable {
        Unshardable::Fails(ShardError::Divide { what, ranks: self.ranks, works: PossibleRanks::default() })
    }
    fn unsupported(&self, what: String, why: impl Into<String>) -> Unshardable {
        Unshardable::Fails(ShardError::Unsupported { what, ranks: self.ranks, why: why.into() })
    }
}

/// A module while it is split.
struct ModuleSharder<'a> {
    old: &'a Module,
    new: Module,
    plan: &'a mut ShardPlan,
    /// Parameters that have taken the place of others, and what they are made of, in order of declaration.
    params: BTreeMap<(ParamId, RowShardSpec), ParamId>,
    /// New parameters that have some of the columns of old ones, as many parts as ranks.
    columns: BTreeMap<ParamId, ParamId>,
    /// New bodies of scans, with the cuts of their outputs, by the old body and the cuts of the inputs.
    bodies: BTreeMap<(FuncId, Vec<Option<ShardSpec>>), ShardedBody>,
    /// Old bodies whose place a new one has taken.
    replaced: BTreeSet<FuncId>,
    /// Placements of states; `None`: whole. Nothing is known yet of states that are not listed.
    states: BTreeMap<StateId, Option<ShardSpec>>,
    /// Something was learned: the rest of the function only looks for more of it, and its result is thrown
    /// away.
    again: bool,
    all_gathers: usize,
}

#[derive(Clone)]
struct ShardedBody {
    id: FuncId,
    outputs: Vec<Option<ShardSpec>>,
}

/// The result of the pass.
struct ShardedModule {
    module: Module,
    /// New parameters with the names of those whose rows they have.
    parts: Vec<(String, String)>,
    all_gathers: usize,
}

pub fn run(program: &mut LoweredProgram, ctx: &mut PassContext) -> Result<usize, PassError> {
    let ranks = ctx.options.ranks;
    if ranks <= 1 || program.module.rank_count() > 1 {
        return Ok(0);
    }
    let (module, options) = (&program.module, &ctx.options);
    let (sharded, why) = match mode::shard_for_mode(module, ranks, options)? {
        Ok(sharded) => sharded,
        Err(ShardError::Divide { what, ranks, .. }) => {
            let works =
                |&n: &usize| n != ranks && matches!(mode::shard_for_mode(module, n, options), Ok(Ok(_)));
            let works = PossibleRanks(TRIED.filter(works).collect());
            return Err(ShardError::Divide { what, ranks, works }.into());
        }
        Err(error) => return Err(error.into()),
    };
    why.into_iter().for_each(|line| ctx.note(line));
    for (part, whole) in &sharded.parts {
        if let Some(options) = program.pack_options.get(whole).copied() {
            program.pack_options.insert(part.clone(), options);
        }
    }
    let (parts, exchanges) = (sharded.parts.len(), sharded.all_gathers);
    ctx.note(format!("{ranks} ranks: {parts} parameters in parts, {exchanges} exchanges in all functions"));
    program.module = sharded.module;
    // Whole parameters whose parts are read would be packed without a reader.
    dce::run(program, &mut PassContext::new(PassOptions::new(vec![], 1)))?;
    Ok(parts)
}

/// The module for a number of ranks, with sums over ranks or without.
fn shard_module(
    module: &Module,
    ranks: usize,
    sums: bool,
) -> Result<Result<ShardedModule, ShardError>, PassError> {
    let (products, segments, states) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
    let (chosen, wrong) = (BTreeSet::new(), BTreeMap::new());
    let mut plan = ShardPlan { ranks, sums, products, chosen, segments, states, wrong };
    for _ in 0..ROUNDS {
        match ModuleSharder::new(module, &mut plan).run() {
            Ok(sharded) => return Ok(Ok(sharded)),
            Err(Unshardable::Again) => {}
            Err(Unshardable::Fails(error)) => return Ok(Err(error)),
            Err(Unshardable::Gathers) => {
                return Err(PassError::internal("shard", "an entry function may exchange"));
            }
            Err(Unshardable::Op(error)) => return Err(PassError::op_error("shard")(error)),
        }
    }
    Err(PassError::internal("shard", format!("no plan after {ROUNDS} rounds")))
}

impl<'a> ModuleSharder<'a> {
    fn new(old: &'a Module, plan: &'a mut ShardPlan) -> ModuleSharder<'a> {
        let mut new = old.clone();
        for (&state, cut) in &plan.states {
            cut_type(&mut new.states[state].ty, *cut);
        }
        let (params, columns) = (BTreeMap::new(), BTreeMap::new());
        let (bodies, replaced) = (BTreeMap::new(), BTreeSet::new());
        let states = plan.states.clone();
        ModuleSharder {
            old,
            new,
            plan,
            params,
            columns,
            bodies,
            replaced,
            states,
            again: false,
            all_gathers: 0,
        }
    }

    fn run(mut self) -> Result<ShardedModule, Unshardable> {
        let old = self.old;
        for (id, f) in old.functions.iter().filter(|(_, f)| f.kind == FunctionKind::Entry) {
            let inputs = vec![None; f.inputs.len()];
            let made = self.function(f, &inputs);
            if self.again {
                return Err(Unshardable::Again);
            }
            self.new.functions[id] = made?.0;
        }
        let name = |id: ParamId| self.new.params[id].name.clone();
        let parts = self.params.iter().map(|(&(whole, _), &part)| (whole, part));
        let parts = parts.chain(self.columns.iter().map(|(&whole, &part)| (whole, part)));
        let parts = parts.map(|(whole, part)| (name(part), name(whole))).collect();
        Ok(ShardedModule { parts, all_gathers: self.all_gathers, module: self.new })
    }

    /// A function whose inputs are held in some way, and the placement of its outputs. Outputs of an entry
    /// function are whole.
    fn function(
        &mut self,
        f: &'a Function,
        inputs: &[Option<ShardSpec>],
    ) -> Result<(Function, Vec<Option<ShardSpec>>), Unshardable> {
        let mut split = FunctionSharder::new(self, f, inputs);
        for (id, node) in f.live_nodes() {
            split.node(id, node)?;
        }
        let cuts = split.finish_outputs()?;
        Ok((split.out, cuts))
    }

    /// The body of a scan for inputs that are held in some way.
    fn shard_body(&mut self, id: FuncId, inputs: &[Option<ShardSpec>]) -> Result<ShardedBody, Unshardable> {
        let key = (id, inputs.to_vec());
        if let Some(body) = self.bodies.get(&key) {
            return Ok(body.clone());
        }
        let old: &'a Module = self.old;
        let (mut function, outputs) = self.function(&old.functions[id], inputs)?;
        let new = match self.replaced.insert(id) {
            true => {
                self.new.functions[id] = function;
                id
            }
            false => {
                function.name = format!("{}.{}", function.name, self.bodies.len());
                self.new.functions.push(function)
            }
        };
        let body = ShardedBody { id: new, outputs };
        self.bodies.insert(key, body.clone());
        Ok(body)
    }

    /// The cut of a state, which is fixed now if it was not known.
    fn state_shard(&mut self, state: StateId, wanted: Option<ShardSpec>) -> Option<ShardSpec> {
        if let Some(&cut) = self.states.get(&state) {
            return cut;
        }
        self.states.insert(state, wanted);
        cut_type(&mut self.new.states[state].ty, wanted);
        wanted
    }

    /// The cut of a state is wrong: takes another in the next round. Results of a round that has learned
    /// something cannot be trusted.
    fn correct_placement(&mut self, state: StateId, cut: Option<ShardSpec>) {
        if !std::mem::replace(&mut self.again, true) {
            let wrong = self.plan.wrong.entry(state).or_default();
            *wrong += 1;
            self.plan.states.insert(state, if *wrong < TRIES { cut } else { None });
        }
    }

    /// The parameter that has the rank's rows of another.
    fn part_of(&mut self, whole: ParamId, cut: RowShardSpec) -> ParamId {
        if let Some(&part) = self.params.get(&(whole, cut)) {
            return part;
        }
        let (param, ranks) = (&self.old.params[whole], self.plan.ranks);
        let mut ty = param.ty.clone();
        let (parts, rows) = (cut.parts, shard_spec::constant_size(&param.ty.dims[0]).unwrap_or(0));
        ty.dims[0] = Dim::from(cut.len(rows));
        let of_rank = |rank| cut.shard_source(&param.source, rows, rank, ranks);
        let source = ParamSource::Ranks((0..ranks).map(of_rank).collect());
        let mut name = format!("{}.part", param.name);
        if (cut.outer, parts.count) != (1, ranks) {
            name = format!("{name}.{}x{}", cut.outer, parts.count);
        }
        if cut.segments.is_some() {
            name.push_str(".segments");
        }
        let name = self.unused_name(name);
        let part = self.new.params.push(ModelParam { name, ty, source, ..param.clone() });
        self.params.insert((whole, cut), part);
        part
    }

    /// The parameter that has the rank's columns of a matrix; its columns divide.
    fn columns_of(&mut self, whole: ParamId) -> ParamId {
        if let Some(&part) = self.columns.get(&whole) {
            return part;
        }
        let (param, ranks) = (&self.old.params[whole], self.plan.ranks);
        let mut ty = param.ty.clone();
        cut_type(&mut ty, Some(ShardSpec::new(1, ranks)));
        let of = param.ty.dims[1].as_const().unwrap_or(0) as usize;
        let len = of / ranks;
        let of_rank = |rank: usize| {
            let range = ColumnRange { start: rank * len, len, of };
            ParamSource::ColumnRange(range, Box::new(param.source.clone()))
        };
        let source = ParamSource::Ranks((0..ranks).map(of_rank).collect());
        let name = self.unused_name(format!("{}.columns", param.name));
        let part = self.new.params.push(ModelParam { name, ty, source, ..param.clone() });
        self.columns.insert(whole, part);
        part
    }

    /// True if the columns of a matrix are the rows of its source.
    fn is_transposed(&self, param: ParamId) -> bool {
        let ModelParam { source, ty, .. } = &self.old.params[param];
        matches!(source, ParamSource::Transpose(_)) && ty.rank() == 2
    }

    /// The parameter that has the rank's columns of a transpose, by a cut of its axis 1.
    fn columns_by(&mut self, whole: ParamId, cut: ShardSpec) -> ParamId {
        let rows = RowShardSpec { outer: 0, parts: cut.parts, segments: cut.segments };
        if let Some(&part) = self.params.get(&(whole, rows)) {
            return part;
        }
        let (param, ranks) = (&self.old.params[whole], self.plan.ranks);
        let mut ty = param.ty.clone();
        cut_type(&mut ty, Some(cut));
        let columns = param.ty.dims[1].as_const().unwrap_or(0) as usize;
        let stored = match &param.source {
            ParamSource::Transpose(stored) => stored,
            other => other,
        };
        let by_rows = RowShardSpec { outer: 1, ..rows };
        let of_rank =
            |rank| ParamSource::Transpose(Box::new(by_rows.shard_source(stored, columns, rank, ranks)));
        let source = ParamSource::Ranks((0..ranks).map(of_rank).collect());
        let name = self.unused_name(format!("{}.part", param.name));
        let part = self.new.params.push(ModelParam { name, ty, source, ..param.clone() });
        self.params.insert((whole, rows), part);
        part
    }

    /// A vector of one number, `value(rank)`.
    fn add_number_param(&mut self, name: &str, value: impl Fn(usize) -> f32) -> ParamId {
        if let Some(known) = self.new.param(name) {
            return known;
        }
        let values = (0..self.plan.ranks).map(|rank| vec![value(rank)]);
        self.add_vector_param(name.into(), values.map(ParamSource::Values).collect(), 1)
    }

    /// A vector of numbers, by rank; equal ones are one parameter.
    fn add_numbers_param(&mut self, name: &str, values: Vec<Vec<f32>>) -> ParamId {
        let size = values.first().map_or(0, Vec::len);
        let source: Vec<_> = values.into_iter().map(ParamSource::Values).collect();
        let equal = |p: &ModelParam| matches!(&p.source, ParamSource::Ranks(of) if *of == source);
        if let Some((known, _)) = self.new.params.iter().find(|(_, p)| equal(p)) {
            return known;
        }
        let name = self.unused_name(name.into());
        self.add_vector_param(name, source, size)
    }

    fn add_vector_param(&mut self, name: String, by_rank: Vec<ParamSource>, size: usize) -> ParamId {
        self.new.params.push(ModelParam {
            name,
            ty: TensorType::new(DType::F32, [size]),
            role: ParamRole::Vector,
            source: ParamSource::Ranks(by_rank),
            packing: None,
        })
    }

    fn unused_name(&self, mut name: String) -> String {
        while self.new.param(&name).is_some() {
            name.push('_');
        }
        name
    }
}

/// The product of sizes.
fn dim_product(dims: &[Dim]) -> Dim {
    dims.iter().fold(Dim::from(1), |all, dim| all.product(dim))
}
