//! Plans in words, for `--explain-passes`.

use super::{AttentionDot, AttentionPlan, DecodePlan, GpuAttentionPlan, PrefillPlan, SLICES, WarpLayout};
use std::fmt;

impl fmt::Display for AttentionPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AttentionPlan::Decode(plan) => write!(f, "{plan}"),
            AttentionPlan::Prefill(plan) => write!(f, "{plan}"),
            AttentionPlan::Gpu(plan) => write!(f, "{plan}"),
        }
    }
}

impl fmt::Display for DecodePlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DecodePlan { lanes, heads, sets, slots, block, .. } = self;
        write!(f, "at most {SLICES} slices in blocks of {block} keys, {lanes} lanes")?;
        write!(
            f,
            ", {sets} x {heads} heads in {slots} slots of a vector of scores, {} in one of products",
            self.across
        )?;
        write!(f, ", {}", self.products)?;
        let prefetches = self.prefetch.iter().any(Option::is_some);
        match self.in_order {
            true => write!(
                f,
                "; blocks are read in order, because this core drops prefetches beside the work of few heads"
            ),
            false if prefetches => write!(f, ", prefetches a block ahead"),
            false => Ok(()),
        }
    }
}

impl fmt::Display for AttentionDot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AttentionDot::Floats => write!(f, "products of floats"),
            AttentionDot::Bytes(dot) => write!(f, "products of bytes by {}", dot.instr.def().name),
            AttentionDot::Words(dot) => write!(f, "products of 16-bit codes by {}", dot.instr().def().name),
        }
    }
}

impl fmt::Display for PrefillPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PrefillPlan { lanes, positions, keys, set, scores, accumulators: sums, .. } = self;
        write!(
            f,
            "tiles of {positions} positions against blocks of {keys} keys, sets of {set} rows, {lanes} lanes"
        )?;
        write!(f, ", in registers {} keys x {} vectors of scores", scores.0, scores.1)?;
        write!(f, " and {} rows x {} vectors of sums", sums.0, sums.1)?;
        if let Some(dot) = self.pairs {
            write!(f, ", products of 16-bit codes by {}", dot.instr().def().name)?;
        }
        if self.prefetch.iter().any(Option::is_some) {
            write!(f, ", prefetches {} rows per register tile", self.rows_ahead)?;
        }
        write!(f, "; {}", self.why)
    }
}

impl fmt::Display for GpuAttentionPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let GpuAttentionPlan { positions, heads, keys, slices, .. } = self;
        write!(f, "blocks of {positions} positions x {heads} heads, tiles of {keys} keys in shared memory")?;
        if let Some(WarpLayout { rows, keys, key, value, codes }) = &self.matrix {
            write!(f, "; tensor cores, {rows} x {keys} warps, keys of {key}, values of {value}")?;
            if *codes {
                write!(f, " times the scale of the row")?;
            }
        }
        match slices {
            1 => Ok(()),
            _ => write!(f, "; at most {slices} slices, because one query alone gives too few blocks"),
        }
    }
}
