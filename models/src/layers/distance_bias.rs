//! Learned terms of attention scores by the distance of query and key (Raffel et al. 2020): distances have buckets, which get
//! wider with the distance, and a bucket has a term for each head.

use crate::model_builder::ModelBuilder;
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::ValueId;
use mlcc_ir::module::{ParamRole, ParamSource, RowBlocks};
use mlcc_ir::ops::Op;
use mlcc_ir::types::{DType, TensorType};

/// How distances are divided among buckets; reference: `T5Attention._relative_position_bucket` of transformers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DistanceBuckets {
    pub count: usize,
    /// From here on all distances have the last bucket.
    pub max_distance: usize,
    /// Half of the buckets are for keys behind the query.
    pub both_sides: bool,
}

impl DistanceBuckets {
    /// Buckets of one side.
    pub fn buckets_per_side(&self) -> usize {
        if self.both_sides { self.count / 2 } else { self.count }
    }

    /// Why no distance has a bucket in such a division, if so.
    pub fn invalid_reason(&self) -> Option<String> {
        let exact = self.buckets_per_side() / 2;
        if exact == 0 || (self.both_sides && !self.count.is_multiple_of(2)) {
            return Some(format!("{} buckets cannot be divided among distances", self.count));
        }
        (self.max_distance <= exact).then(|| {
            format!(
                "the largest distance, {}, is one of the {exact} with a bucket of its own",
                self.max_distance
            )
        })
    }

    /// The bucket of key `j` for the query at `p`, where `distance` is `j - p`.
    pub fn bucket_of(&self, distance: i64) -> usize {
        let (side, exact) = (self.buckets_per_side(), self.buckets_per_side() / 2);
        let first = if self.both_sides && distance > 0 { side } else { 0 };
        let apart =
            if self.both_sides { distance.unsigned_abs() } else { (-distance).max(0) as u64 } as usize;
        if apart < exact {
            return first + apart;
        }
        // In f32, as the reference: where one bucket ends and the next begins is a matter of rounding.
        let ratio =
            (apart as f32 / exact as f32).ln() / (self.max_distance as f64 / exact as f64).ln() as f32;
        let wider = (ratio * (side - exact) as f32) as usize;
        first + (exact + wider).min(side - 1)
    }

    /// The nearest distance from which on nothing changes.
    fn last_distance(&self) -> usize {
        let all = self.bucket_of(-(self.max_distance as i64));
        (0..self.max_distance).rev().find(|&d| self.bucket_of(-(d as i64)) != all).map_or(0, |d| d + 1)
    }
}

/// The table of an attention.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DistanceBias {
    /// Name of the tensor `[buckets, heads]`.
    pub name: String,
    pub buckets: DistanceBuckets,
    pub heads: usize,
}

impl DistanceBias {
    /// Terms `[kv, group, n, t]` for queries at `row: i32[n, 1]` and keys at `column: i32[t]`. The table is `[heads, distances]`: its
    /// columns are the rows of the tensor, each as often as its bucket has distances.
    pub fn apply(
        &self,
        net: &mut ModelBuilder,
        (row, column): (ValueId, ValueId),
        (kv, group): (&Dim, &Dim),
    ) -> ValueId {
        let DistanceBuckets { count, both_sides, .. } = self.buckets;
        let last = self.buckets.last_distance() as i64;
        let ahead = if both_sides { last } else { 0 };
        let bucket = |distance| RowBlocks::range(self.buckets.bucket_of(distance), 1, count);
        let source = net.declare_tensor(&self.name, &[count, self.heads]);
        let rows = (-last..=ahead).map(|d| ParamSource::Rows(bucket(d), Box::new(source.clone())));
        let ty = TensorType::new(DType::F32, [self.heads, (last + ahead + 1) as usize]);
        let name = format!("{}.by_distance", self.name);
        let source = ParamSource::Transpose(Box::new(ParamSource::Concat(rows.collect())));
        let table = net.param_from(&name, ParamRole::Vector, ty, source);
        let table = net.permute(table, &[1, 0]);

        let integer = |net: &mut ModelBuilder, value: i64| {
            net.op(Op::Constant { value: value as f64, dtype: DType::I32 }, &[])
        };
        let distance = net.sub(column, row);
        let (nearest, farthest) = (integer(net, ahead), integer(net, -last));
        let distance = net.max(distance, farthest);
        let distance = net.min(distance, nearest);
        let places = net.sub(distance, farthest);
        let terms = net.gather(table, places);
        let dims = net.ty(terms).dims.clone();
        let terms = net.permute(terms, &[2, 0, 1]);
        net.reshape(terms, [kv.clone(), group.clone(), dims[0].clone(), dims[1].clone()])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Buckets that transformers 4.56 gives, of both sides and of one.
    #[test]
    fn buckets_are_those_of_the_reference() {
        let both = DistanceBuckets { count: 32, max_distance: 128, both_sides: true };
        let of = |b: &DistanceBuckets, ds: &[i64]| ds.iter().map(|&d| b.bucket_of(d)).collect::<Vec<_>>();
        assert_eq!(
            of(&both, &[0, -1, -7, -8, -11, -12, -16, -23, -64, -127, -500]),
            [0, 1, 7, 8, 8, 9, 10, 11, 14, 15, 15]
        );
        assert_eq!(of(&both, &[1, 7, 8, 16, 32, 500]), [17, 23, 24, 26, 28, 31]);
        let one = DistanceBuckets { both_sides: false, ..both };
        assert_eq!(
            of(&one, &[5, 0, -15, -16, -18, -19, -32, -64, -128, -900]),
            [0, 0, 15, 16, 16, 17, 21, 26, 31, 31]
        );
        assert_eq!(both.last_distance(), 91);
        assert_eq!(one.last_distance(), 113);
    }

    #[test]
    fn divisions_that_are_none() {
        let fault = |count, most, both_sides| {
            DistanceBuckets { count, max_distance: most, both_sides }.invalid_reason()
        };
        assert!(fault(32, 128, true).is_none());
        assert!(fault(2, 128, true).is_some() && fault(33, 128, true).is_some());
        assert!(fault(32, 16, false).is_some() && fault(32, 8, true).is_some());
    }
}
