//! Parts of layers that remember, through the whole pipeline: convolutions, recurrences, latent attention and
//! routing of random shapes, with decays at the ends of what numbers can say, in pieces of every length
//! around a chunk. The kernels are interpreted, for CPUs with several workers and for a GPU with its races,
//! against the graph on the whole text at once.

mod run;

use mlcc_ir::compute::RedOp;
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::ValueId;
use mlcc_ir::module::ParamRole;
use mlcc_ir::testing::TestRng;
use mlcc_models::layers::conv::CausalConv;
use mlcc_models::layers::latent_attention::{LatentAttention, LatentPositions};
use mlcc_models::layers::matrix_state::{MatrixState, unit_length};
use mlcc_models::layers::moe::{
    ExpertGroups, ExpertNames, ExpertRouter, ExpertStorage, Glu, MoeLayer, RouterScoring,
};
use mlcc_models::layers::norm::Norm;
use mlcc_models::layers::rope::RopePairing;
use mlcc_models::layers::{ActivationFunction, Rope};
use mlcc_models::transformer::{ModelBuilder, ModelSizes, OuterLayers, Transformer};
use run::{check, levels_stay_as_they_are};

/// A layer alone: rows of a table go in, what comes out is compared.
#[derive(Clone, Debug)]
struct MixerLayer {
    part: MixerKind,
    width: usize,
}

#[derive(Clone, Debug)]
enum MixerKind {
    Conv { names: usize, taps: usize, bias: bool, activation: Option<ActivationFunction> },
    Delta { state: MatrixState, per_channel: bool, decay: DecayInput },
    Space { state: MatrixState, decay: DecayInput },
    Selective { state: MatrixState },
    Latent { latent: LatentAttention, rope: Option<Rope> },
    Experts { experts: MoeLayer, corrected: bool },
}

/// The source of the numbers by which a state decays.
#[derive(Clone, Copy, Debug, PartialEq)]
enum DecayInput {
    /// They are in the table.
    Given,
    /// Their logarithms do.
    Log,
}

/// Exactly 0 and 1 and what is next to them; numbers that f32 holds without its leading digit.
const DECAYS: [f32; 9] = [0.0, 1.0, 1.0 - 6e-8, 1.0 - 1e-6, 0.5, 1e-30, f32::MIN_POSITIVE, 1e-40, 1e-45];
/// `exp` of these: 1, what is next to 1, the smallest numbers with all digits, with few, and 0.
const LOGS: [f32; 9] = [0.0, -6e-8, -1e-6, -0.7, -20.0, -87.3, -95.0, -103.0, -200.0];

const VOCAB: usize = 24;

impl MixerLayer {
    fn new(part: MixerKind) -> MixerLayer {
        let width = match &part {
            MixerKind::Conv { names, .. } => names * 13,
            MixerKind::Delta { state, per_channel, .. } => {
                let keys = state.heads / state.shared_by * state.keys;
                let decays = if *per_channel { keys } else { state.heads };
                2 * keys + state.heads * state.values + decays + state.heads
            }
            MixerKind::Space { state, .. } => {
                2 * state.heads / state.shared_by * state.keys + state.heads * (state.values + 1)
            }
            MixerKind::Selective { state } => 2 * state.keys + 2 * state.values,
            MixerKind::Latent { .. } => 24,
            MixerKind::Experts { .. } => 32,
        };
        MixerLayer { part, width }
    }

    /// The content of the last columns of the table: decays, or their logarithms.
    fn decays(&self) -> (usize, &'static [f32]) {
        let of = |count: usize, decay: DecayInput| {
            (count, if decay == DecayInput::Log { &LOGS[..] } else { &DECAYS[..] })
        };
        match &self.part {
            MixerKind::Delta { state, per_channel: true, decay } => {
                of(state.heads / state.shared_by * state.keys, *decay)
            }
            MixerKind::Delta { state, decay, .. } | MixerKind::Space { state, decay } => {
                of(state.heads, *decay)
            }
            _ => (0, &[]),
        }
    }
}

/// Takes columns of `x: [n, ..]` in order.
struct ColumnCursor {
    x: ValueId,
    at: usize,
}

impl ColumnCursor {
    fn take(&mut self, net: &mut ModelBuilder, width: usize) -> ValueId {
        self.at += width;
        net.slice(self.x, 1, Dim::from(self.at - width), Dim::from(width))
    }

    fn heads(&mut self, net: &mut ModelBuilder, heads: usize, size: usize) -> ValueId {
        let part = self.take(net, heads * size);
        net.split_heads(part, heads)
    }
}

impl MixerLayer {
    /// The inputs of a recurrence: queries and keys of the groups, values of the heads.
    fn queries(
        &self,
        net: &mut ModelBuilder,
        columns: &mut ColumnCursor,
        state: MatrixState,
    ) -> [ValueId; 3] {
        let groups = state.heads / state.shared_by;
        let q = columns.heads(net, groups, state.keys);
        let k = columns.heads(net, groups, state.keys);
        [q, k, columns.heads(net, state.heads, state.values)]
    }

    fn decay(net: &mut ModelBuilder, x: ValueId, decay: DecayInput) -> ValueId {
        if decay == DecayInput::Log { net.exp(x) } else { x }
    }

    fn recurrence(&self, net: &mut ModelBuilder, layer: usize, x: ValueId) -> ValueId {
        let mut columns = ColumnCursor { x, at: 0 };
        match self.part {
            MixerKind::Delta { state, per_channel, decay: kind } => {
                let [q, k, v] = self.queries(net, &mut columns, state);
                let (q, k) = (unit_length(net, q, 1e-6), unit_length(net, k, 1e-6));
                let beta = columns.take(net, state.heads);
                let beta = net.sigmoid(beta);
                let decay = match per_channel {
                    true => columns.heads(net, state.heads / state.shared_by, state.keys),
                    false => columns.take(net, state.heads),
                };
                let decay = MixerLayer::decay(net, decay, kind);
                state.gated_delta_rule(net, layer, [q, k, v], [decay, beta])
            }
            MixerKind::Space { state, decay: kind } => {
                let [q, k, v] = self.queries(net, &mut columns, state);
                let decay = columns.take(net, state.heads);
                let decay = MixerLayer::decay(net, decay, kind);
                state.state_space(net, layer, [q, k, v], decay)
            }
            MixerKind::Selective { state } => {
                let q = columns.heads(net, 1, state.keys);
                let k = columns.heads(net, 1, state.keys);
                let v = columns.heads(net, 1, state.values);
                let dt = columns.heads(net, 1, state.values);
                let dt = net.square(dt);
                let slopes = net.weight_param("slopes", ParamRole::Vector, &[state.values, state.keys]);
                let slopes = net.reshape(slopes, [1, state.values, state.keys]);
                state.selective_state_space(net, layer, [q, k, v, dt], slopes)
            }
            _ => unreachable!("no recurrence"),
        }
    }
}

impl Transformer for MixerLayer {
    type Shared = ();

    fn sizes(&self) -> &ModelSizes {
        &ModelSizes { vocab: VOCAB, hidden: 0, layers: 1, heads: 1, kv_heads: 1, head_size: 1, context: 256 }
    }

    fn outer_layers(&self) -> OuterLayers {
        OuterLayers::hugging_face(Norm::None, false)
    }

    fn prepare_shared(&self, _: &mut ModelBuilder) {}

    fn embed(&self, net: &mut ModelBuilder) -> ValueId {
        net.embed("table", VOCAB, self.width)
    }

    fn add_layer(&self, net: &mut ModelBuilder, layer: usize, x: ValueId, (): &()) -> ValueId {
        match &self.part {
            MixerKind::Conv { names, taps, bias, activation } => {
                let all: Vec<String> = (0..*names).map(|i| format!("conv{i}")).collect();
                let names: Vec<&str> = all.iter().map(String::as_str).collect();
                let conv = CausalConv { names: &names, widths: &[], taps: *taps, bias: *bias };
                let y = conv.apply(net, layer, x);
                activation.map_or(y, |activation| activation.apply(net, y))
            }
            MixerKind::Latent { latent, rope } => {
                let tables = rope.as_ref().map(|rope| rope.tables(net, "rope"));
                let at = tables.as_ref().map_or(LatentPositions::NONE, LatentPositions::with_rope);
                latent.apply(net, layer, "latent", x, at)
            }
            MixerKind::Experts { experts, corrected } => {
                let correction = corrected.then_some("correction");
                let stored = ExpertStorage::Single { experts: "experts", parts: ["gate", "up", "down"] };
                let names = ExpertNames { router: "router", correction, expert_scale: None, storage: stored };
                experts.apply(net, x, &names)
            }
            _ => {
                let y = self.recurrence(net, layer, x);
                let (n, width) = (net.n(), net.ty(y).dims[1].product(&net.ty(y).dims[2]));
                net.reshape(y, [n, width])
            }
        }
    }

    fn logits(&self, net: &mut ModelBuilder, x: ValueId) -> ValueId {
        // A sum beside the rows, so that more than their own kernel reads them.
        let sum = net.reduce(RedOp::Sum, x, 1);
        net.concat(&[x, sum], 1)
    }
}

#[test]
fn convolutions() {
    for seed in 0..12 {
        let mut rng = TestRng(seed);
        let names = 1 + rng.below(3);
        let activations = [
            None,
            Some(ActivationFunction::Silu),
            Some(ActivationFunction::Gelu),
            Some(ActivationFunction::Relu),
        ];
        let part = MixerKind::Conv {
            names,
            taps: 2 + seed as usize % 3,
            bias: names == 1 && rng.chance(2),
            activation: rng.pick(&activations),
        };
        check(MixerLayer::new(part), seed);
    }
}

fn matrices(rng: &mut TestRng) -> MatrixState {
    let (groups, shared_by) = rng.pick(&[(1, 1), (2, 1), (3, 1), (1, 4), (2, 2), (2, 3)]);
    let (values, keys) = (rng.pick(&[1, 5, 8, 16, 32, 48]), rng.pick(&[2, 7, 8, 16, 24, 64]));
    MatrixState { heads: groups * shared_by, shared_by, values, keys }
}

#[test]
fn delta_rules() {
    for seed in 0..16 {
        let mut rng = TestRng(100 + seed);
        let decay = if rng.chance(2) { DecayInput::Given } else { DecayInput::Log };
        // Channels decay separately where each head has its own keys.
        let mut state = matrices(&mut rng);
        let per_channel = rng.chance(2);
        if per_channel {
            (state.heads, state.shared_by) = (state.heads / state.shared_by, 1);
        }
        check(MixerLayer::new(MixerKind::Delta { state, per_channel, decay }), seed);
    }
}

#[test]
fn state_spaces() {
    for seed in 0..10 {
        let mut rng = TestRng(200 + seed);
        let decay = if rng.chance(2) { DecayInput::Given } else { DecayInput::Log };
        let state = matrices(&mut rng);
        check(MixerLayer::new(MixerKind::Space { state, decay }), seed);
        let state = MatrixState { heads: 1, shared_by: 1, ..state };
        check(MixerLayer::new(MixerKind::Selective { state }), seed);
    }
}

#[test]
fn latent_attention() {
    for seed in 0..6 {
        let mut rng = TestRng(300 + seed);
        let turned = rng.pick(&[2, 4, 8, 16]);
        let pairs = rng.pick(&[RopePairing::Half, RopePairing::Interleaved]);
        let latent = LatentAttention {
            heads: 1 + rng.below(5),
            scale: rng.pick(&[0.2, 0.7]),
            query_rank: rng.chance(2).then(|| 8 + rng.below(20)),
            rank: rng.pick(&[5, 8, 16, 30, 32, 64]),
            nope_dim: rng.pick(&[3, 8, 16, 20]),
            rope_dim: turned,
            value_dim: rng.pick(&[4, 7, 16, 24]),
            bias: rng.chance(2),
            split: rng.chance(3),
        };
        let rope = (!rng.chance(3)).then(|| Rope::plain(turned, 1e4, pairs));
        check(MixerLayer::new(MixerKind::Latent { latent, rope }), seed);
    }
}

#[test]
fn routing() {
    for seed in 0..7 {
        let mut rng = TestRng(400 + seed);
        let groups = rng.chance(2).then(|| ExpertGroups {
            count: 4,
            groups_per_token: 2,
            scored_experts: 1 + rng.below(2),
        });
        let count = if groups.is_some() { rng.pick(&[8, 12, 16]) } else { 2 + rng.below(14) };
        let corrected = rng.chance(2);
        let sigmoid = RouterScoring::Sigmoid;
        let routing = ExpertRouter {
            count,
            // There are enough of the chosen groups.
            experts_per_token: 1 + rng.below(count / 2),
            scoring: match (groups, corrected) {
                (_, true) => sigmoid,
                (Some(_), false) => RouterScoring::Softmax,
                (None, false) => rng.pick(&[sigmoid, RouterScoring::Softmax, RouterScoring::SoftmaxOfChosen]),
            },
            bias: rng.chance(2),
            normalised: rng.chance(2),
            sum_epsilon: rng.pick(&[0.0, 1e-20]),
            scale: rng.pick(&[1.0, 2.5]),
            groups,
        };
        let glu = rng.pick(&[
            Glu::Plain(ActivationFunction::Silu),
            Glu::Clamped { limit: 0.5, slope: 1.7 },
            Glu::Ungated(ActivationFunction::ReluSquared),
        ]);
        let intermediate = rng.pick(&[16, 20, 32]);
        check(
            MixerLayer::new(MixerKind::Experts {
                experts: MoeLayer { routing, intermediate, glu, fused: false },
                corrected,
            }),
            seed,
        );
    }
}

/// A scan that goes in chunks where there are tensor cores, in two launches with a buffer between, and step
/// by step elsewhere.
#[test]
fn levels_with_other_launches_are_one_artifact() {
    let state = MatrixState { heads: 2, shared_by: 1, values: 32, keys: 16 };
    let layers = [
        MixerKind::Delta { state, per_channel: false, decay: DecayInput::Given },
        MixerKind::Space { state, decay: DecayInput::Log },
    ];
    for layer in layers.map(MixerLayer::new) {
        let launches = levels_stay_as_they_are(&layer, &["sm_90", "sm_80", "sm_75", "sm_70"]);
        assert!(launches[0] == launches[1] && launches[2] == launches[3], "{launches:?}");
        assert!(launches[1] > launches[2], "{launches:?}: only tensor cores go in chunks");
        levels_stay_as_they_are(&layer, &["x86-64-v4", "x86-64-v3", "x86-64-v2"]);
    }
}
