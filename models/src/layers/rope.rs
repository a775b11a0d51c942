//! Rotary position embedding (Su et al. 2021): heads as pairs that are turned by the position times a frequency.

use super::attention::integer_constant;
use crate::model_builder::ModelBuilder;
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::ValueId;
use mlcc_ir::kernel::UnOp;
use mlcc_ir::types::DType;
use std::f64::consts::TAU;

/// Rotary embedding of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    pub frequencies: RopeFrequencies,
    /// Which elements form a pair.
    pub pairing: RopePairing,
    /// Factor of cosine and sine (the attention factor of YaRN and LongRoPE).
    pub scale: f32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopePairing {
    /// Element `i` with `i + half` (GPT-NeoX, Llama).
    Half,
    /// Element `2 i` with `2 i + 1` (GPT-J, GLM).
    Interleaved,
}

/// Radians per position of each pair.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeFrequencies {
    Fixed(Vec<f32>),
    /// Dynamic NTK scaling: the base grows with the sequence once it is longer than `original`.
    Dynamic {
        table: Vec<f32>,
        original: usize,
        factor: f64,
    },
    /// LongRoPE (Ding et al. 2024): `long` once the sequence is longer than `original`, `short` before.
    Long {
        short: Vec<f32>,
        long: Vec<f32>,
        original: usize,
    },
}

/// Cosine and sine at the positions of a call, computed once and used by all layers.
#[derive(Clone, Copy, Debug)]
pub struct RopeTables {
    tables: CosSinTables,
    /// Where queries stand for attention sinks.
    sink_tables: Option<CosSinTables>,
    half: usize,
    pairs: RopePairing,
}

/// `[n, 1, half]` both.
#[derive(Clone, Copy, Debug)]
struct CosSinTables {
    cos: ValueId,
    sin: ValueId,
}

impl Rope {
    /// The unscaled embedding of the first `dims` elements of each head.
    pub fn plain(dims: usize, theta: f64, pairing: RopePairing) -> Rope {
        Rope { frequencies: RopeFrequencies::Fixed(frequencies(dims, theta)), pairing, scale: 1.0 }
    }

    /// Tables for the positions of this call. `name` tells tables of one model from each other.
    pub fn tables(&self, net: &mut ModelBuilder, name: &str) -> RopeTables {
        let (positions, rows) = (net.positions(), net.cache_rows());
        net.for_sequences(|net| {
            let tables = self.tables_at(net, name, positions);
            let places = net.sink_positions(rows);
            let at_sinks = places.map(|places| self.tables_at(net, name, places).tables);
            RopeTables { sink_tables: at_sinks, ..tables }
        })
    }

    /// Tables of a model with two kinds of layers: by this embedding, and by that of layers with a window.
    pub fn tables_with_local(&self, net: &mut ModelBuilder, local: &Rope) -> [RopeTables; 2] {
        let tables = self.tables(net, "rope");
        [tables, if local == self { tables } else { local.tables(net, "rope.local") }]
    }

    /// Tables for `positions: i32[n]` of one sequence.
    pub fn tables_at(&self, net: &mut ModelBuilder, name: &str, positions: ValueId) -> RopeTables {
        let n = net.n();
        let (angles, half) = self.angles(net, name, positions);
        let table = |net: &mut ModelBuilder, op: UnOp| {
            let mut table = net.unary(op, angles);
            if self.scale != 1.0 {
                table = net.scale(table, f64::from(self.scale));
            }
            net.reshape(table, [n.clone(), Dim::from(1), Dim::from(half)])
        };
        let (cos, sin) = (table(net, UnOp::Cos), table(net, UnOp::Sin));
        RopeTables { tables: CosSinTables { cos, sin }, sink_tables: None, half, pairs: self.pairing }
    }

    /// Angles `[n, half]` at positions `i32[n]` (or floats), and how many there are of one.
    fn angles(&self, net: &mut ModelBuilder, name: &str, positions: ValueId) -> (ValueId, usize) {
        if let (Some(_), Some(table)) = (net.streaming_window(), self.fixed_frequencies(net)) {
            return (unbounded_angles(net, name, positions, table), table.len());
        }
        let (frequencies, half) = self.frequencies(net, name);
        let (n, positions) = (net.n(), net.cast(positions, DType::F32));
        let positions = net.reshape(positions, [n, Dim::from(1)]);
        (net.mul(positions, frequencies), half)
    }

    /// Frequencies that hold for all lengths that are possible here.
    fn fixed_frequencies(&self, net: &ModelBuilder) -> Option<&[f32]> {
        match &self.frequencies {
            RopeFrequencies::Fixed(table) => Some(table),
            RopeFrequencies::Long { short, original, .. } => {
                (max_positions(net) <= *original).then_some(short)
            }
            RopeFrequencies::Dynamic { table, original, .. } => {
                (max_positions(net) <= *original).then_some(table)
            }
        }
        .map(Vec::as_slice)
    }

    /// Frequencies `[half]` for this call, and how many there are.
    fn frequencies(&self, net: &mut ModelBuilder, name: &str) -> (ValueId, usize) {
        if let Some(table) = self.fixed_frequencies(net) {
            return (net.table_param(name, table.to_vec()), table.len());
        }
        match &self.frequencies {
            RopeFrequencies::Fixed(table) => (net.table_param(name, table.clone()), table.len()),
            RopeFrequencies::Long { short, long, original } => {
                let half = short.len();
                let short = net.table_param(&format!("{name}.short"), short.clone());
                let long = net.table_param(&format!("{name}.long"), long.clone());
                let length = sequence_length_f32(net);
                let limit = net.constant((*original + 1) as f64);
                (net.select_ge(length, limit, long, short), half)
            }
            RopeFrequencies::Dynamic { table, original, factor } => {
                let half = table.len();
                let exponents = (0..half).map(|i| (-2.0 * i as f64 / (2.0 * half as f64 - 2.0)) as f32);
                let exponents = net.table_param(&format!("{name}.exponents"), exponents.collect());
                let table = net.table_param(name, table.clone());
                // (factor * length / original - (factor - 1))^(exponent), which is 1 up to the original length.
                let length = sequence_length_f32(net);
                let original_length = net.constant(*original as f64);
                let length = net.max(length, original_length);
                let stretch = net.scale(length, factor / *original as f64);
                let less = net.constant(factor - 1.0);
                let base = net.sub(stretch, less);
                let log = net.unary(UnOp::Log, base);
                let power = net.mul(exponents, log);
                let power = net.exp(power);
                (net.mul(table, power), half)
            }
        }
    }
}

/// Tokens that positions may come to.
fn max_positions(net: &ModelBuilder) -> usize {
    net.streaming_window().map_or(net.context(), |s| s.window)
}

/// [`ModelBuilder::sequence_length`] as `f32[1]`.
fn sequence_length_f32(net: &mut ModelBuilder) -> ValueId {
    let length = net.sequence_length();
    net.cast(length, DType::F32)
}

/// Bits of a position that are turned at once.
const DIGIT: u32 = 11;

/// Angles `[n, half]` of positions that go on for ever: f32 products of large positions would lose what tells neighbours
/// apart. So positions are taken as digits of [`DIGIT`] bits, and what a step of the higher ones turns is known up to whole
/// turns; all products stay below 2^11 pi. Up to 2^11 the angles are the plain ones.
fn unbounded_angles(net: &mut ModelBuilder, name: &str, positions: ValueId, table: &[f32]) -> ValueId {
    let (n, base) = (net.n(), integer_constant(net, 1 << DIGIT));
    let mut rest = positions;
    let [low, middle, high] = [0, 1, 2].map(|digit| {
        let higher = net.div(rest, base);
        let without = net.mul(higher, base);
        let value = net.sub(rest, without);
        rest = higher;
        let value = net.cast(value, DType::F32);
        let value = net.reshape(value, [n.clone(), Dim::from(1)]);
        let step = f64::from(digit * DIGIT).exp2();
        let turns = |f: &f32| (f64::from(*f) * step / TAU).round();
        let frequencies: Vec<f32> = match digit {
            0 => table.to_vec(),
            _ => table.iter().map(|f| (f64::from(*f) * step - turns(f) * TAU) as f32).collect(),
        };
        let name = if digit == 0 { name.to_string() } else { format!("{name}.digit{digit}") };
        let frequencies = net.table_param(&name, frequencies);
        net.mul(value, frequencies)
    });
    let sum = net.add(low, middle);
    net.add(sum, high)
}

/// `theta^(-2 i / dims)` for each pair.
pub fn frequencies(dims: usize, theta: f64) -> Vec<f32> {
    exact_frequencies(dims, theta).into_iter().map(|f| f as f32).collect()
}

/// The same before rounding.
pub fn exact_frequencies(dims: usize, theta: f64) -> Vec<f64> {
    (0..dims / 2).map(|i| theta.powf(-2.0 * i as f64 / dims as f64)).collect()
}

impl RopeTables {
    /// Elements of a head that are turned.
    pub fn dims(&self) -> usize {
        2 * self.half
    }

    /// Turns the first [`RopeTables::dims`] elements of every head of `x: [n, heads, size]`.
    pub fn apply(&self, net: &mut ModelBuilder, x: ValueId) -> ValueId {
        self.apply_at(net, x, self.tables)
    }

    /// The same with queries for attention sinks; `None` where there are no sinks.
    pub fn apply_for_sinks(&self, net: &mut ModelBuilder, x: ValueId) -> Option<ValueId> {
        self.sink_tables.map(|at| self.apply_at(net, x, at))
    }

    fn apply_at(&self, net: &mut ModelBuilder, x: ValueId, at: CosSinTables) -> ValueId {
        let (size, dims) = (net.width(x), self.dims());
        if dims >= size {
            return self.rotate(net, x, at);
        }
        let turned = slice_head_elements(net, x, 0, dims);
        let turned = self.rotate(net, turned, at);
        let rest = slice_head_elements(net, x, dims, size - dims);
        net.concat(&[turned, rest], 2)
    }

    /// All elements of `x: [n, heads, dims]`.
    fn rotate(&self, net: &mut ModelBuilder, x: ValueId, at: CosSinTables) -> ValueId {
        let half = self.half;
        match self.pairs {
            RopePairing::Half => {
                let (a, b) = (slice_head_elements(net, x, 0, half), slice_head_elements(net, x, half, half));
                let (a, b) = rotate_pairs(net, (a, b), at);
                net.concat(&[a, b], 2)
            }
            RopePairing::Interleaved => {
                let dims = net.ty(x).dims.clone();
                let (n, heads) = (dims[0].clone(), dims[1].clone());
                let pairs = net.reshape(x, [n.clone(), heads.clone(), Dim::from(half), Dim::from(2)]);
                let side = |net: &mut ModelBuilder, i: usize| {
                    let side = net.slice(pairs, 3, Dim::from(i), Dim::from(1));
                    net.reshape(side, [n.clone(), heads.clone(), Dim::from(half)])
                };
                let (a, b) = (side(net, 0), side(net, 1));
                let (a, b) = rotate_pairs(net, (a, b), at);
                let column = |net: &mut ModelBuilder, x| {
                    net.reshape(x, [n.clone(), heads.clone(), Dim::from(half), Dim::from(1)])
                };
                let (a, b) = (column(net, a), column(net, b));
                let joined = net.concat(&[a, b], 3);
                net.reshape(joined, dims)
            }
        }
    }
}

/// `(a cos - b sin, b cos + a sin)`.
fn rotate_pairs(
    net: &mut ModelBuilder,
    (a, b): (ValueId, ValueId),
    CosSinTables { cos, sin }: CosSinTables,
) -> (ValueId, ValueId) {
    let (ac, bs) = (net.mul(a, cos), net.mul(b, sin));
    let (bc, a_s) = (net.mul(b, cos), net.mul(a, sin));
    (net.sub(ac, bs), net.add(bc, a_s))
}

/// Elements `start..start + len` of every head of `x: [n, heads, size]`.
pub fn slice_head_elements(net: &mut ModelBuilder, x: ValueId, start: usize, len: usize) -> ValueId {
    net.slice(x, 2, Dim::from(start), Dim::from(len))
}
