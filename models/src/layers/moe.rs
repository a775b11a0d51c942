//! Mixtures of experts (Shazeer et al. 2017): which experts a token gets, and the products with them.

use super::ActivationFunction;
use super::linear::LinearLayer;
use super::mlp;
use crate::config::ConfigFields;
use crate::error::ConfigError;
use crate::model_builder::ModelBuilder;
use mlcc_ir::compute::RedOp;
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::ValueId;
use mlcc_ir::module::{ParamRole, ParamSource, RowBlocks};
use mlcc_ir::types::{DType, TensorType};
use serde_json::Value;

/// Which experts a token gets, with which weights.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertRouter {
    pub count: usize,
    /// Experts per token.
    pub experts_per_token: usize,
    pub scoring: RouterScoring,
    /// The router has a bias.
    pub bias: bool,
    /// The weights of the chosen experts are scaled to sum to 1.
    pub normalised: bool,
    /// Added to that sum, which for sigmoids could be 0.
    pub sum_epsilon: f64,
    /// Factor of the weights.
    pub scale: f64,
    /// The choice is among the experts of the best groups only.
    pub groups: Option<ExpertGroups>,
}

/// Experts in groups of equal size, of which a token gets some (DeepSeek). A group is as good as its best experts together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertGroups {
    pub count: usize,
    /// Groups per token.
    pub groups_per_token: usize,
    /// How many experts of a group are looked at: one (DeepSeek-V2) or two (V3).
    pub scored_experts: usize,
}

impl ExpertGroups {
    /// From `topk_group` and the fields for the numbers of groups and of experts; `None` where there is one group or all are
    /// chosen.
    pub fn read(
        fields: &ConfigFields,
        groups_field: &str,
        experts_field: &str,
        best: usize,
    ) -> Result<Option<ExpertGroups>, ConfigError> {
        let (count, experts) = (fields.size_or(groups_field, 1)?, fields.size(experts_field)?);
        let chosen = fields.size_or("topk_group", count)?;
        if count > 1 && (!experts.is_multiple_of(count) || experts / count < best) {
            let expected = format!("a number of groups of at least {best} among {experts} experts");
            return Err(fields.invalid_value(groups_field, &expected, &Value::from(count)));
        }
        if chosen > count {
            let expected = format!("at most {groups_field}, which is {count}");
            return Err(fields.invalid_value("topk_group", &expected, &Value::from(chosen)));
        }
        let (per_token, within) = (fields.first_present(&PER_TOKEN), chosen * (experts / count));
        if fields.size(per_token)? > within {
            let expected = format!("at most {within}, the experts of {chosen} of {count} groups");
            return Err(fields.invalid_value(per_token, &expected, &fields.raw[per_token]));
        }
        Ok((chosen < count).then_some(ExpertGroups { count, groups_per_token: chosen, scored_experts: best }))
    }

    /// Scores `[n, experts]` with [`UNTAKEN`] in place of those of groups that are not chosen.
    fn mask_groups(self, net: &mut ModelBuilder, scores: ValueId, experts: usize) -> ValueId {
        let (n, count, size) = (net.n(), self.count, experts / self.count);
        let by_group = net.reshape(scores, [n.product(&Dim::from(count)), Dim::from(size)]);
        let (best, _) = net.top_k(by_group, self.scored_experts);
        let best = net.reduce(RedOp::Sum, best, 1);
        let best = net.reshape(best, [n.clone(), Dim::from(count)]);
        let (chosen, _) = net.top_k(best, self.groups_per_token);
        let least = net.slice(chosen, 1, Dim::from(self.groups_per_token - 1), Dim::from(1));
        let of = |net: &mut ModelBuilder, x, groups: usize, size: usize| {
            net.reshape(x, [n.clone(), Dim::from(groups), Dim::from(size)])
        };
        let (scores, best, least) =
            (of(net, scores, count, size), of(net, best, count, 1), of(net, least, 1, 1));
        let untaken = net.constant(UNTAKEN);
        let kept = net.select_ge(best, least, scores, untaken);
        net.reshape(kept, [n.clone(), Dim::from(experts)])
    }
}

/// What the router's outputs become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouterScoring {
    /// Softmax over all experts.
    Softmax,
    /// Softmax over the chosen ones.
    SoftmaxOfChosen,
    /// A sigmoid for each (DeepSeek-V3).
    Sigmoid,
}

/// Larger than in any published model.
const MOST_EXPERTS: usize = 1024;
/// Lower than any score with its correction, which may be far below 0; a number, so that arithmetic with it stays one.
const UNTAKEN: f64 = -1e30;
/// Names of the field with the experts per token.
const PER_TOKEN: [&str; 2] = ["num_experts_per_tok", "num_experts_per_token"];

impl ExpertRouter {
    /// Softmax over all. `count` are the names of the field with the number of experts.
    pub fn read(fields: &ConfigFields, count: &[&'static str]) -> Result<ExpertRouter, ConfigError> {
        let field = fields.first_present(count);
        let chosen_field = fields.first_present(&PER_TOKEN);
        let (count, chosen) = (fields.size(field)?, fields.size(chosen_field)?);
        fields.check_max(field, count, MOST_EXPERTS)?;
        if chosen > count {
            let expected = format!("at most {field}, which is {count}");
            return Err(fields.invalid_value(chosen_field, &expected, &Value::from(chosen)));
        }
        let scores = RouterScoring::Softmax;
        Ok(ExpertRouter {
            count,
            experts_per_token: chosen,
            scoring: scores,
            bias: false,
            normalised: false,
            sum_epsilon: 0.0,
            scale: 1.0,
            groups: None,
        })
    }

    /// Weights `f32[n, chosen]` and numbers `i32[n, chosen]` of the experts for `x: [n, hidden]`.
    fn apply(&self, net: &mut ModelBuilder, x: ValueId, names: &ExpertNames) -> (ValueId, ValueId) {
        let scores = LinearLayer::new(names.router, self.count).bias(self.bias).unquantized().apply(net, x);
        let (mut weights, ids) = match self.scoring {
            RouterScoring::Softmax => {
                let mut probabilities = net.softmax(scores);
                if let Some(groups) = self.groups {
                    probabilities = groups.mask_groups(net, probabilities, self.count);
                }
                net.top_k(probabilities, self.experts_per_token)
            }
            RouterScoring::SoftmaxOfChosen => {
                let (chosen, ids) = net.top_k(scores, self.experts_per_token);
                (net.softmax(chosen), ids)
            }
            RouterScoring::Sigmoid => {
                let scores = net.sigmoid(scores);
                self.choose_by_corrected_scores(net, scores, names.correction)
            }
        };
        if self.normalised {
            let mut sum = net.reduce(RedOp::Sum, weights, 1);
            if self.sum_epsilon > 0.0 {
                let smallest = net.constant(self.sum_epsilon);
                sum = net.add(sum, smallest);
            }
            weights = net.div(weights, sum);
        }
        if self.scale != 1.0 {
            weights = net.scale(weights, self.scale);
        }
        if let Some(name) = names.expert_scale {
            let scales = net.vector_param(name, self.count);
            let scales = self.gather_per_expert(net, scales, ids);
            weights = net.mul(weights, scales);
        }
        (weights, ids)
    }

    /// The choice by scores plus a learned correction, and the scores of the chosen without it.
    fn choose_by_corrected_scores(
        &self,
        net: &mut ModelBuilder,
        scores: ValueId,
        correction: Option<&str>,
    ) -> (ValueId, ValueId) {
        let Some(name) = correction else { return net.top_k(scores, self.experts_per_token) };
        let bias = net.vector_param(name, self.count);
        let mut corrected = net.add(scores, bias);
        if let Some(groups) = self.groups {
            corrected = groups.mask_groups(net, corrected, self.count);
        }
        let (_, ids) = net.top_k(corrected, self.experts_per_token);
        (self.gather_scores(net, scores, ids), ids)
    }

    /// The scores `[n, count]` of the chosen experts as they are, `[n, chosen]`. Taking the correction away from what was
    /// chosen by would leave the rounding of the sum, which a correction of 9 makes larger than small scores.
    fn gather_scores(&self, net: &mut ModelBuilder, scores: ValueId, ids: ValueId) -> ValueId {
        let (n, one, chosen, count) =
            (net.n(), Dim::from(1), Dim::from(self.experts_per_token), Dim::from(self.count));
        let ids = net.reshape(ids, [n.clone(), chosen.clone(), one.clone()]);
        let scores = net.reshape(scores, [n.clone(), one.clone(), count.clone()]);
        let numbers = net.iota(Dim::from(0), count.clone());
        let numbers = net.reshape(numbers, [one.clone(), one, count]);
        // Zeros but for the one whose number it is.
        let none = net.constant(0.0);
        let up_to = net.select_ge(ids, numbers, scores, none);
        let own = net.select_ge(numbers, ids, up_to, none);
        let own = net.reduce(RedOp::Sum, own, 2);
        net.reshape(own, [n, chosen])
    }

    /// The numbers of the chosen experts among those of all, `f32[count]`: `[n, chosen]`.
    fn gather_per_expert(&self, net: &mut ModelBuilder, numbers: ValueId, ids: ValueId) -> ValueId {
        let (n, chosen) = (net.n(), Dim::from(self.experts_per_token));
        let column = net.reshape(numbers, [self.count, 1]);
        let flat = net.reshape(ids, [n.product(&chosen)]);
        let of_chosen = net.gather(column, flat);
        net.reshape(of_chosen, [n, chosen])
    }
}

/// What stands between the two products of an expert.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Glu {
    /// `act(gate) * up`.
    Plain(ActivationFunction),
    /// `gate * sigmoid(slope * gate) * (up + 1)`, with the gate at most `limit`, and up between `-limit` and `limit`.
    Clamped { limit: f64, slope: f64 },
    /// `act(up)`: there is no gate.
    Ungated(ActivationFunction),
}

impl Glu {
    /// `gate` and `up` add the products of these parts.
    fn apply(
        self,
        net: &mut ModelBuilder,
        gate: impl FnOnce(&mut ModelBuilder) -> ValueId,
        up: impl FnOnce(&mut ModelBuilder) -> ValueId,
    ) -> ValueId {
        match self {
            Glu::Ungated(activation) => {
                let up = up(net);
                activation.apply(net, up)
            }
            Glu::Plain(activation) => {
                let (gate, up) = (gate(net), up(net));
                let gate = activation.apply(net, gate);
                net.mul(gate, up)
            }
            Glu::Clamped { limit, slope } => {
                let (gate, up) = (gate(net), up(net));
                let (low, high, one) = (net.constant(-limit), net.constant(limit), net.constant(1.0));
                let gate = net.min(gate, high);
                let up = net.min(up, high);
                let up = net.max(up, low);
                let steep = net.scale(gate, slope);
                let open = net.sigmoid(steep);
                let gate = net.mul(gate, open);
                let up = net.add(up, one);
                net.mul(gate, up)
            }
        }
    }
}

/// Gated experts.
#[derive(Clone, Debug, PartialEq)]
pub struct MoeLayer {
    pub routing: ExpertRouter,
    /// Width inside of an expert.
    pub intermediate: usize,
    pub glu: Glu,
    /// The experts of a layer are two tensors where [`ExpertStorage::Single`] would have them one by one.
    pub fused: bool,
}

/// The field that says that the experts of a layer are stored together. Published files have none: the tensors tell it.
pub(crate) const FUSED_EXPERTS: &str = "fused_experts";

/// Names of a mixture's tensors.
pub struct ExpertNames<'a> {
    pub router: &'a str,
    /// A vector that is added to the scores for the choice only.
    pub correction: Option<&'a str>,
    /// A vector of factors of the experts' weights.
    pub expert_scale: Option<&'a str>,
    pub storage: ExpertStorage<'a>,
}

/// How the matrices of the experts are stored.
#[derive(Clone, Copy)]
pub enum ExpertStorage<'a> {
    /// Expert `i` is `{experts}.{i}`, with layers for gate, up and down projection; those that are fused are packed, by the
    /// names `{experts}.gate_up_proj` (`up_proj` without a gate) and `{experts}.down_proj`.
    Single { experts: &'a str, parts: [&'a str; 3] },
    /// Tensors `[experts, 2 * intermediate, hidden]`, the gate's rows first, and `[experts, hidden, intermediate]`.
    Packed { gate_up: &'a str, down: &'a str },
    /// Tensors `[experts, hidden, 2 * intermediate]`, in which gate and up take turns, and `[experts, intermediate, hidden]`; with
    /// biases `{gate_up}_bias` and `{down}_bias` (gpt-oss).
    Columns { gate_up: &'a str, down: &'a str },
    /// Tensors `[experts, intermediate, hidden]` and `[experts, hidden, intermediate]`, with biases `{name}_bias` (gpt-oss in GGUF).
    Apart { parts: [&'a str; 3] },
}

/// One of the three products of an expert.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ExpertProjection {
    Gate,
    Up,
    Down,
}

impl ExpertProjection {
    fn name(self) -> &'static str {
        match self {
            ExpertProjection::Gate => "gate",
            ExpertProjection::Up => "up",
            ExpertProjection::Down => "down",
        }
    }
}

/// A gated MLP beside chosen experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SharedExpert {
    pub width: usize,
    pub activation: ActivationFunction,
}

impl MoeLayer {
    /// Plain gated experts, with softmax over all.
    pub fn read(
        fields: &ConfigFields,
        count: &[&'static str],
        intermediate: usize,
        normalised: bool,
    ) -> Result<MoeLayer, ConfigError> {
        let routing = ExpertRouter { normalised, ..ExpertRouter::read(fields, count)? };
        let activation = ActivationFunction::read(fields, &["hidden_act"], ActivationFunction::Silu)?;
        Ok(MoeLayer {
            routing,
            intermediate,
            glu: Glu::Plain(activation),
            fused: fields.flag_or(FUSED_EXPERTS, false)?,
        })
    }

    /// `[n, hidden]` to `[n, hidden]`.
    pub fn apply(&self, net: &mut ModelBuilder, x: ValueId, names: &ExpertNames) -> ValueId {
        self.apply_routed(net, x, x, names)
    }

    /// These experts and the one beside them that sees every row, by the names of DeepSeek V3: `NAME.gate`, `NAME.experts`,
    /// `NAME.shared_experts`. `corrected`: what the router chooses by has a bias.
    pub fn apply_with_shared(
        &self,
        net: &mut ModelBuilder,
        x: ValueId,
        name: &str,
        parts: [&'static str; 3],
        corrected: bool,
        shared: &SharedExpert,
    ) -> ValueId {
        let (router, inside) = (format!("{name}.gate"), format!("{name}.experts"));
        let correction = format!("{router}.e_score_correction_bias");
        let correction = corrected.then_some(correction.as_str());
        let stored = ExpertStorage::Single { experts: &inside, parts };
        let h = self.apply(
            net,
            x,
            &ExpertNames { router: &router, correction, expert_scale: None, storage: stored },
        );
        let beside = format!("{name}.shared_experts");
        let beside = mlp::gated_by_name(net, x, &beside, shared.width, false, shared.activation);
        net.add(h, beside)
    }

    /// The same where the router reads another `input`.
    pub fn apply_routed(
        &self,
        net: &mut ModelBuilder,
        input: ValueId,
        x: ValueId,
        names: &ExpertNames,
    ) -> ValueId {
        let (hidden, chosen) = (net.width(x), Dim::from(self.routing.experts_per_token));
        let (weights, ids) = self.routing.apply(net, input, names);
        let n = net.n();
        let rows = net.reshape(x, [n.clone(), Dim::from(1), Dim::from(hidden)]);
        let part =
            |part| move |net: &mut ModelBuilder| self.expert_matmul(net, rows, ids, (names, part), hidden);
        let product = self.glu.apply(net, part(ExpertProjection::Gate), part(ExpertProjection::Up));
        let outputs = self.expert_matmul(net, product, ids, (names, ExpertProjection::Down), hidden);
        let weights = net.reshape(weights, [n.clone(), chosen, Dim::from(1)]);
        let weighted = net.mul(outputs, weights);
        let sum = net.reduce(RedOp::Sum, weighted, 1);
        net.reshape(sum, [n, Dim::from(hidden)])
    }

    /// Rows `[n, chosen or 1, in]` times one matrix of each chosen expert: `[n, chosen, out]`.
    fn expert_matmul(
        &self,
        net: &mut ModelBuilder,
        x: ValueId,
        ids: ValueId,
        (names, part): (&ExpertNames, ExpertProjection),
        hidden: usize,
    ) -> ValueId {
        let (out, input) = match part {
            ExpertProjection::Gate | ExpertProjection::Up => (self.intermediate, hidden),
            ExpertProjection::Down => (hidden, self.intermediate),
        };
        let count = self.routing.count;
        let (name, source) = self.expert_weight_source(net, &names.storage, part, (out, input));
        let ty = TensorType::new(DType::F32, [count * out, input]);
        let weight = net.param_from(&name, ParamRole::Linear, ty, source);
        let y = net.matmul_experts(x, weight, ids, count);
        let table = match names.storage {
            ExpertStorage::Columns { gate_up, down } => self.expert_biases(
                net,
                if part == ExpertProjection::Down { down } else { gate_up },
                part,
                out,
            ),
            ExpertStorage::Apart { parts } => {
                let name = format!("{}_bias", parts[part as usize]);
                let source = net.declare_tensor(&name, &[count, out]);
                net.param_from(&name, ParamRole::Vector, TensorType::new(DType::F32, [count, out]), source)
            }
            ExpertStorage::Single { .. } | ExpertStorage::Packed { .. } => return y,
        };
        let (n, chosen) = (net.n(), Dim::from(self.routing.experts_per_token));
        let flat = net.reshape(ids, [n.product(&chosen)]);
        let bias = net.gather(table, flat);
        let bias = net.reshape(bias, [n, chosen, Dim::from(out)]);
        net.add(y, bias)
    }

    /// One matrix of every expert, below one another: `[count * out, input]`.
    fn expert_weight_source(
        &self,
        net: &mut ModelBuilder,
        stored: &ExpertStorage,
        part: ExpertProjection,
        (out, input): (usize, usize),
    ) -> (String, ParamSource) {
        let (count, inner) = (self.routing.count, self.intermediate);
        match *stored {
            ExpertStorage::Single { experts, .. } if self.fused => {
                let (gate_up, down) = (format!("{experts}.gate_up_proj"), format!("{experts}.down_proj"));
                match (self.glu, part) {
                    (Glu::Ungated(_), ExpertProjection::Up) => {
                        let name = format!("{experts}.up_proj");
                        let source = net.declare_tensor(&name, &[count, out, input]);
                        (name, source)
                    }
                    _ => {
                        let packed = ExpertStorage::Packed { gate_up: &gate_up, down: &down };
                        self.expert_weight_source(net, &packed, part, (out, input))
                    }
                }
            }
            ExpertStorage::Single { experts, parts } => {
                let which = parts[part as usize];
                let one = |i| net.declare_tensor(&format!("{experts}.{i}.{which}.weight"), &[out, input]);
                (format!("{experts}.{which}.weight"), ParamSource::Concat((0..count).map(one).collect()))
            }
            ExpertStorage::Apart { parts } => {
                let name = parts[part as usize];
                (name.to_string(), net.declare_tensor(name, &[count, out, input]))
            }
            ExpertStorage::Packed { down, .. } if part == ExpertProjection::Down => {
                (down.to_string(), net.declare_tensor(down, &[count, out, input]))
            }
            ExpertStorage::Packed { gate_up, .. } => {
                let source = Box::new(net.declare_tensor(gate_up, &[count, 2 * out, input]));
                let start = if part == ExpertProjection::Gate { 0 } else { inner };
                let rows = RowBlocks { start, len: inner, stride: 2 * inner, count, of: count * 2 * inner };
                (format!("{gate_up}.{}", part.name()), ParamSource::Rows(rows, source))
            }
            ExpertStorage::Columns { gate_up, down } => {
                let (name, columns) =
                    if part == ExpertProjection::Down { (down, out) } else { (gate_up, 2 * out) };
                let tensor = net.declare_tensor(name, &[count, input, columns]);
                let expert = |i: usize| {
                    let rows = RowBlocks::range(i * input, input, count * input);
                    let one = ParamSource::Rows(rows, Box::new(tensor.clone()));
                    part.select_columns(ParamSource::Transpose(Box::new(one)), columns)
                };
                (format!("{name}.{}", part.name()), ParamSource::Concat((0..count).map(expert).collect()))
            }
        }
    }

    /// The biases of all experts, `[count, out]`.
    fn expert_biases(
        &self,
        net: &mut ModelBuilder,
        name: &str,
        part: ExpertProjection,
        out: usize,
    ) -> ValueId {
        let (count, name) = (self.routing.count, format!("{name}_bias"));
        let columns = if part == ExpertProjection::Down { out } else { 2 * out };
        let tensor = net.declare_tensor(&name, &[count, columns]);
        let transposed = part.select_columns(ParamSource::Transpose(Box::new(tensor)), columns);
        let ty = TensorType::new(DType::F32, [count, out]);
        let source = ParamSource::Transpose(Box::new(transposed));
        net.param_from(&format!("{name}.{}", part.name()), ParamRole::Vector, ty, source)
    }
}

impl ExpertProjection {
    /// Its rows where those of gate and up take turns.
    fn select_columns(self, transposed: ParamSource, columns: usize) -> ParamSource {
        let start = match self {
            ExpertProjection::Down => return transposed,
            ExpertProjection::Gate => 0,
            ExpertProjection::Up => 1,
        };
        let rows = RowBlocks { start, len: 1, stride: 2, count: columns / 2, of: columns };
        ParamSource::Rows(rows, Box::new(transposed))
    }
}
