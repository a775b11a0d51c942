//! Choice of how products that follow each other are split, by cost.

use super::{ShardError, ShardedModule};
use crate::{PassError, PassOptions};
use mlcc_ir::dim::SymValues;
use mlcc_ir::module::Module;
use mlcc_ir::ops::Op;
use mlcc_target::ExchangeCost;

/// The way in which products that follow each other are split.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum TpMode {
    /// All products are split by rows of the weight: the parts of the ranks are gathered, and have the bits
    /// of one rank.
    #[default]
    Gather,
    /// Products are split by rows, and the products that read such parts by columns: these are terms of sums,
    /// which are added in the order of the ranks.
    Reduce,
    /// The same split and bits as [`TpMode::Gather`]; inputs of products on 8-bit activations are gathered as
    /// codes and scales ([`crate::exchange_codes`]).
    Codes,
    /// The cheaper one of the first two, by all-gathers; a model that one of them cannot split is split by
    /// the other.
    Auto,
}

impl TpMode {
    pub const ALL: [TpMode; 4] = [TpMode::Gather, TpMode::Reduce, TpMode::Codes, TpMode::Auto];

    pub fn name(self) -> &'static str {
        match self {
            TpMode::Gather => "gather",
            TpMode::Reduce => "reduce",
            TpMode::Codes => "codes",
            TpMode::Auto => "auto",
        }
    }
}

/// The module for a number of ranks, and lines that say why it is split so.
pub(super) fn shard_for_mode(
    module: &Module,
    ranks: usize,
    options: &PassOptions,
) -> Result<Result<(ShardedModule, Vec<String>), ShardError>, PassError> {
    let alone = |sums| Ok(super::shard_module(module, ranks, sums)?.map(|sharded| (sharded, Vec::new())));
    match options.tp_mode {
        TpMode::Gather | TpMode::Codes => alone(false),
        TpMode::Reduce => alone(true),
        TpMode::Auto => {
            let [gather, reduce] =
                [super::shard_module(module, ranks, false)?, super::shard_module(module, ranks, true)?];
            Ok(match (gather, reduce) {
                (Ok(gather), Ok(reduce)) => Ok(choose_cheaper(gather, reduce, options)),
                (Ok(gather), Err(error)) => {
                    Ok((gather, vec![format!("auto: gather, since for reduce {error}")]))
                }
                (Err(error), Ok(reduce)) => {
                    Ok((reduce, vec![format!("auto: reduce, since for gather {error}")]))
                }
                (Err(error), Err(_)) => Err(error),
            })
        }
    }
}

/// The cost of the all-gathers of an entry function, for each token.
struct CollectiveCost {
    entry: &'static str,
    tokens: i64,
    all_gathers: u64,
    /// Bytes that a rank receives.
    bytes: u64,
}

impl CollectiveCost {
    fn for_entry(module: &Module, entry: &'static str, tokens: i64) -> Option<CollectiveCost> {
        let (_, f) = module.function(entry)?;
        let sizes = SymValues::for_tokens(tokens);
        let (mut exchanges, mut bytes) = (0, 0);
        for (_, node) in f.live_nodes() {
            let Op::AllGather { ranks } = node.op else { continue };
            let ty = f.ty(node.inputs[0]);
            let elements = ty.dims.iter().map(|dim| dim.eval(&sizes).max(0) as u64).product::<u64>();
            exchanges += 1;
            bytes += (ranks as u64 - 1) * elements * ty.dtype.bytes().unwrap_or(0) as u64;
        }
        Some(CollectiveCost { entry, tokens, all_gathers: exchanges, bytes })
    }

    /// Costs of a single token, and of a token of a whole chunk of a prompt.
    fn of_tokens(module: &Module, chunk: i64) -> Vec<CollectiveCost> {
        let prompt = if module.function("prefill").is_some() { "prefill" } else { "step" };
        [("decode", 1), (prompt, chunk)]
            .into_iter()
            .filter_map(|(e, n)| CollectiveCost::for_entry(module, e, n))
            .collect()
    }

    fn microseconds(&self, cost: ExchangeCost) -> f64 {
        cost.nanoseconds(self.all_gathers, self.bytes) / 1e3 / self.tokens.max(1) as f64
    }

    /// `decode with 1 token: 6 exchanges, 4096 bytes, 12.4 us a token`.
    fn describe(&self, cost: ExchangeCost) -> String {
        let CollectiveCost { entry, tokens, all_gathers: exchanges, bytes } = self;
        let time = self.microseconds(cost);
        let tokens = if *tokens == 1 { "1 token".into() } else { format!("{tokens} tokens") };
        format!("{entry} of {tokens}: {exchanges} exchanges, {bytes} bytes, {time:.1} us a token")
    }
}

/// The one whose all-gathers take less time for a token of a text and one of a prompt together, with the sum
/// for both.
fn choose_cheaper(
    gather: ShardedModule,
    reduce: ShardedModule,
    options: &PassOptions,
) -> (ShardedModule, Vec<String>) {
    let cost = options.all_gather_cost;
    let sum = |name: &str, module: &Module| {
        let costs = CollectiveCost::of_tokens(module, options.chunk);
        let time: f64 = costs.iter().map(|c| c.microseconds(cost)).sum();
        let lines: Vec<String> = costs.iter().map(|c| c.describe(cost)).collect();
        (time, format!("{name}: {}; together {time:.1} us", lines.join("; ")))
    };
    let ((of_gather, first), (of_reduce, second)) =
        (sum("gather", &gather.module), sum("reduce", &reduce.module));
    let chosen = if of_reduce < of_gather { TpMode::Reduce } else { TpMode::Gather };
    let why = format!(
        "auto: {}, with {} ns for an exchange and {} MB/s to each rank",
        chosen.name(),
        cost.latency_ns,
        cost.mbytes_per_s
    );
    let sharded = if chosen == TpMode::Reduce { reduce } else { gather };
    (sharded, vec![first, second, why])
}
