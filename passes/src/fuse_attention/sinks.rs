//! Attention sinks: other scores behind a window, for its first keys.

use super::layout::constant;
use super::positions::PositionReader;
use super::{AxisRole, MissReason, ScoreTransform, miss, queries_first, skip_casts};
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::{Function, GraphNode, ValueId};
use mlcc_ir::ops::Op;

/// The scores beyond the window, for its first keys.
pub struct AttentionSinks<'f> {
    pub count: usize,
    scores: Box<ScoreTransform<'f>>,
    product: &'f GraphNode,
}

impl<'f> AttentionSinks<'f> {
    /// Reads the operand of a window's selection for keys beyond it: other scores for the first ones, and the
    /// others hidden.
    pub fn read(r: &PositionReader<'f>, v: ValueId) -> Result<AttentionSinks<'f>, MissReason> {
        let Some(GraphNode { op: Op::SelectGe, inputs, .. }) = r.f.defining_node(skip_casts(r.f, v)) else {
            return miss("a selection is no mask");
        };
        let hidden = constant(r.f, inputs[3]).is_some_and(|c| c <= -1e4);
        let form = r.read(inputs[0]).zip(r.read(inputs[1])).and_then(|(a, b)| a.sub(b));
        let count = match form.map(|p| p.coefficients()) {
            Some((0.0, -1.0, 0.0, c)) if c >= 0.0 && hidden => c as usize + 1,
            _ => return miss("what stands beyond a window is no score of its first keys"),
        };
        let mut scores = ScoreTransform { scale: 1.0, ..ScoreTransform::default() };
        let product = scores.match_scores(r, inputs[2])?;
        match scores.ahead.is_some()
            || scores.window > 0
            || scores.prefix.is_some()
            || scores.sinks.is_some()
            || scores.span.is_some()
            || scores.terms.is_some()
        {
            true => miss("the scores of a window's first keys have masks of their own"),
            false => Ok(AttentionSinks { count, scores: Box::new(scores), product }),
        }
    }

    /// The queries, if all else is as in the window: the same keys, factors and cap, and biases that count
    /// from `min(p, window + sinks - 1)`.
    pub fn sink_queries(
        &self,
        f: &Function,
        near: &ScoreTransform,
        (product, near_scale): (&GraphNode, f64),
        axes: &[(Dim, AxisRole)],
    ) -> Result<ValueId, MissReason> {
        let [q, k] = self.product.inputs[..] else { return Err(None) };
        let same = self.product.op == product.op
            && k == product.inputs[1]
            && f.ty(q) == f.ty(product.inputs[0])
            && self.scores.softcap == near.softcap;
        let Some((query, scale)) = queries_first(f, q, axes).filter(|_| same) else {
            return miss("a window's first keys have scores of another kind");
        };
        if near.window == 0 || near.prefix.is_some() || self.scores.scale * scale != near.scale * near_scale {
            return miss("a window's first keys have scores of another scale");
        }
        let last = (near.window + self.count - 1) as f64;
        let biased = match (near.slopes, self.scores.slopes) {
            (None, None) => true,
            (Some((slopes, a)), Some((far, b))) => {
                let counts = a.query == -a.key && b.near == -b.key && b.limit == Some(last);
                let alike = a.key == b.key && a.constant == b.constant;
                slopes == far && counts && alike && a.near == 0.0 && b.query == 0.0
            }
            _ => false,
        };
        if biased { Ok(query) } else { miss("a window's first keys have another bias") }
    }
}
