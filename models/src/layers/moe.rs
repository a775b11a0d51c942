//! Mixtures of experts: routing and the products with the chosen experts.

use super::Activation;
use super::linear::Linear;
use crate::config::ConfigFields;
use crate::error::ConfigError;
use crate::transformer::Net;
use mlcc_ir::compute::RedOp;
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::ValueId;
use mlcc_ir::module::{ParamRole, ParamSource};
use mlcc_ir::types::{DType, TensorType};
use serde_json::Value;

/// Gated experts chosen per token (Shazeer et al. 2017; Mixtral, Jiang et al. 2024).
#[derive(Clone, Debug, PartialEq)]
pub struct Experts {
    pub count: usize,
    /// Experts per token.
    pub chosen: usize,
    /// Width inside of an expert.
    pub intermediate: usize,
    /// The weights of the chosen experts are scaled to sum to 1.
    pub normalised: bool,
    pub activation: Activation,
}

/// Names of a mixture's tensors.
pub struct ExpertNames<'a> {
    pub router: &'a str,
    /// Expert `i` is `{experts}.{i}`.
    pub experts: &'a str,
    /// Gate, up and down projection in an expert.
    pub parts: [&'a str; 3],
}

/// Larger than in any published model.
const MOST_EXPERTS: usize = 1024;

impl Experts {
    /// `count` are the names of the field with the number of experts.
    pub fn read(
        fields: &ConfigFields,
        count: &[&'static str],
        intermediate: usize,
        normalised: bool,
    ) -> Result<Experts, ConfigError> {
        let (field, chosen_field) = (fields.first(count), "num_experts_per_tok");
        let (count, chosen) = (fields.size(field)?, fields.size(chosen_field)?);
        if count > MOST_EXPERTS {
            return Err(fields.wrong(field, &format!("at most {MOST_EXPERTS}"), &Value::from(count)));
        }
        if chosen > count {
            let expected = format!("at most {field}, which is {count}");
            return Err(fields.wrong(chosen_field, &expected, &Value::from(chosen)));
        }
        let activation = Activation::read(fields, &["hidden_act"], Activation::Silu)?;
        Ok(Experts { count, chosen, intermediate, normalised, activation })
    }

    /// `[n, hidden]` to `[n, hidden]`.
    pub fn apply(&self, net: &mut Net, x: ValueId, names: &ExpertNames) -> ValueId {
        let (hidden, inner) = (net.width(x), self.intermediate);
        let scores = Linear::new(names.router, self.count).unquantized().apply(net, x);
        let probabilities = net.softmax(scores);
        let (mut weights, ids) = net.top_k(probabilities, self.chosen);
        if self.normalised {
            let sum = net.reduce(RedOp::Sum, weights, 1);
            weights = net.div(weights, sum);
        }
        let n = net.n();
        let rows = net.reshape(x, [n.clone(), Dim::from(1), Dim::from(hidden)]);
        let [gate, up, down] = names.parts;
        let gate = self.matrices(net, names, gate, inner, hidden);
        let gate = net.matmul_experts(rows, gate, ids, self.count);
        let up = self.matrices(net, names, up, inner, hidden);
        let up = net.matmul_experts(rows, up, ids, self.count);
        let gate = self.activation.apply(net, gate);
        let product = net.mul(gate, up);
        let down = self.matrices(net, names, down, hidden, inner);
        let outputs = net.matmul_experts(product, down, ids, self.count);
        let weights = net.reshape(weights, [n.clone(), Dim::from(self.chosen), Dim::from(1)]);
        let weighted = net.mul(outputs, weights);
        let sum = net.reduce(RedOp::Sum, weighted, 1);
        net.reshape(sum, [n, Dim::from(hidden)])
    }

    /// One matrix of every expert, below one another: `[count * out, input]`.
    fn matrices(&self, net: &mut Net, names: &ExpertNames, part: &str, out: usize, input: usize) -> ValueId {
        let tensors = (0..self.count)
            .map(|i| net.tensor(&format!("{}.{i}.{part}.weight", names.experts), &[out, input]))
            .collect();
        let ty = TensorType::new(DType::F32, [self.count * out, input]);
        let name = format!("{}.{part}.weight", names.experts);
        net.param_from(&name, ParamRole::Linear, ty, ParamSource::Concat(tensors))
    }
}
