//! Queries that grow with the logarithm of their position beyond the original context (Nakanishi 2025, as in Llama 4).

use super::attention;
use crate::config::ConfigFields;
use crate::error::ConfigError;
use crate::model_builder::ModelBuilder;
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::ValueId;
use mlcc_ir::kernel::UnOp;
use mlcc_ir::types::DType;
use serde_json::Value;

#[derive(Clone, Debug, PartialEq)]
pub struct QueryTemperature {
    /// How fast queries grow.
    pub beta: f64,
    /// Queries grow from this position on.
    pub original_context: usize,
}

impl QueryTemperature {
    /// From `rope_parameters`; `context` is the original one where they do not say it.
    pub fn read(parameters: &ConfigFields, context: usize) -> Result<QueryTemperature, ConfigError> {
        let beta = parameters.float_or("llama_4_scaling_beta", 0.0)?;
        if !(0.0..=1e3).contains(&beta) {
            let expected = "a number from 0 to 1000";
            return Err(parameters.invalid_value("llama_4_scaling_beta", expected, &Value::from(beta)));
        }
        let original_context = parameters.size_or("original_max_position_embeddings", context)?;
        Ok(QueryTemperature { beta, original_context })
    }

    /// `1 + beta * log(1 + floor(position / original context))` for the tokens of one sequence, `[n, 1, 1]`.
    pub fn factors(&self, net: &mut ModelBuilder) -> ValueId {
        let (n, positions) = (net.n(), net.positions());
        let period = attention::integer_constant(net, self.original_context as i64);
        let periods = net.div(positions, period);
        let periods = net.cast(periods, DType::F32);
        let one = net.constant(1.0);
        let periods = net.add(periods, one);
        let growth = net.unary(UnOp::Log, periods);
        let growth = net.scale(growth, self.beta);
        let scale = net.add(growth, one);
        net.reshape(scale, [n, Dim::from(1), Dim::from(1)])
    }
}
