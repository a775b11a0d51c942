//! Attention written in primitive ops, `softmax(mask(scale(q k^T))) v`, becomes one `attention` op, for which
//! there are kernels that never hold the matrix of scores.
//!
//! The match goes from the last product upwards. Between the two products there may be, in any order that
//! makes sense: factors (also on queries or keys), soft-capping, ALiBi and masks as selections, as additions,
//! or as minima with huge numbers, clamps to the range of a float type, and float casts. Masks and biases are
//! read as linear forms in the positions of query and key, so that it does not matter how they are spelled.
//! The order of axes is followed through reshapes and permutations. A window may have other scores behind it
//! for its first keys (attention sinks): they come from queries of their own, and all else has to be alike.
//! The softmax may have one more term per head in its sum (see [`null`]). Terms of a table may be added by
//! distance (see [`distances`]), and a count may hide the first keys or all others.

mod distances;
mod layout;
mod null;
mod positions;
mod sinks;

use crate::dce::remove_dead_nodes;
use crate::outline::entry_functions;
use crate::rewrite::{count_key, times_text};
use crate::{LoweredProgram, PassContext, PassError, canonicalize};
use distances::ScoreBias;
use layout::{LayoutChain, constant};
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::{Function, GraphNode, ValueId};
use mlcc_ir::kernel::{BinOp, UnOp};
use mlcc_ir::module::Module;
use mlcc_ir::ops::{AttentionOp, KeySpan, Op, OpError};
use mlcc_ir::types::{DType, TensorType};
use positions::{PositionForm, PositionReader};
use sinks::AttentionSinks;

const PASS: &str = "fuse_attention";
/// Numbers at least this large mean infinity: the largest f16 is 65504.
const HUGE: f64 = 6e4;
const OTHER_SCORES: &str = "the prefix sees other scores";

pub fn run(program: &mut LoweredProgram, ctx: &mut PassContext) -> Result<usize, PassError> {
    let mut total = 0;
    for id in entry_functions(&program.module) {
        let f = &program.module.functions[id];
        let (mut found, mut misses) = (Vec::new(), Vec::new());
        for (node_id, node) in f.live_nodes() {
            match match_attention(f, node) {
                Ok(attention) => found.push((node_id, attention)),
                Err(Some(why)) => count_key(&mut misses, why),
                Err(None) => {}
            }
        }
        for (why, n) in misses {
            ctx.note(format!("@{}: not an attention, because {why} ({})", f.name, times_text(n)));
        }
        if found.is_empty() {
            continue;
        }
        ctx.note(format!(
            "@{}: softmax between two products as one attention ({})",
            f.name,
            times_text(found.len())
        ));
        total += found.len();
        let mut new = f.clone();
        for (node, attention) in found {
            let at = new.body.iter().position(|&n| n == node).unwrap_or(new.body.len());
            let end = new.body.len();
            let old = new.nodes[node].outputs[0];
            let value = attention.emit(&program.module, &mut new, old).map_err(PassError::op_error(PASS))?;
            let added: Vec<_> = new.body.drain(end..).collect();
            new.body.splice(at..at, added);
            new.replace_uses(old, value);
        }
        program.module.functions[id] = new;
        remove_dead_nodes(&mut program.module, id);
    }
    if total > 0 {
        // The order of axes of the product and the order that its users need cancel.
        canonicalize::run(program, ctx)?;
    }
    Ok(total)
}

/// The reason why something is not an attention: `None` if it does not look like one at all.
type MissReason = Option<String>;

fn miss<T>(why: impl Into<String>) -> Result<T, MissReason> {
    Err(Some(why.into()))
}

/// An attention that was found, in values of the function.
struct AttentionMatch {
    op: AttentionOp,
    /// `[n, heads, size]`, `[t, kv, size]` and `[t, kv, value size]` after a reshape.
    inputs: [(ValueId, TensorType); 3],
    slopes: Option<(ValueId, f64)>,
    /// The value that counts the keys of a prefix or a span.
    count: Option<ValueId>,
    /// Terms by distance.
    terms: Option<ScoreBias>,
    /// Queries for sinks, `[n, heads, size]` after a reshape.
    sink_queries: Option<ValueId>,
    /// `[heads]` after a reshape.
    null_logits: Option<ValueId>,
    /// Sizes of the axes before `n` in the result, with their role.
    axes: Vec<(Dim, AxisRole)>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum AxisRole {
    Kv,
    Group,
    /// Size 1.
    None,
}

/// The ops between the product and the softmax.
#[derive(Default)]
struct ScoreTransform<'f> {
    scale: f64,
    softcap: f64,
    /// The number of later keys that a mask shows.
    ahead: Option<usize>,
    window: usize,
    /// Slopes with the distance that they are factors of.
    slopes: Option<(ValueId, PositionForm)>,
    prefix: Option<ValueId>,
    /// The keys that a count leaves visible.
    span: Option<(KeySpan, ValueId)>,
    terms: Option<ScoreBias>,
    sinks: Option<AttentionSinks<'f>>,
    /// Logits that join the sum of the softmax.
    null_logits: Option<ValueId>,
    /// The operand of a prefix selection for keys of the prefix: the scores before other masks.
    unmasked: Option<ValueId>,
}

fn match_attention(f: &Function, node: &GraphNode) -> Result<AttentionMatch, MissReason> {
    let Op::MatMul { transpose_b } = node.op else { return Err(None) };
    let softmax = skip_casts(f, node.inputs[0]);
    let (input, null_logits) = match f.defining_node(softmax) {
        Some(GraphNode { op: Op::Softmax, inputs, .. }) => (inputs[0], None),
        Some(_) => null::read(f, softmax).map(|(scores, logits)| (scores, Some(logits))).ok_or(None)?,
        None => return Err(None),
    };
    let dims = &f.ty(softmax).dims;
    if dims.len() < 2 {
        return miss("the softmax has no axis of queries");
    }
    let (n, t) = (&dims[dims.len() - 2], &dims[dims.len() - 1]);
    let reader = PositionReader { f, n, t };
    let mut scores = ScoreTransform { scale: 1.0, null_logits, ..ScoreTransform::default() };
    let product = scores.match_scores(&reader, input)?;
    if n.as_const() == Some(1) {
        // No key comes after that of the last query.
        scores.ahead = Some(0);
    }
    if scores.ahead != Some(0) && (scores.prefix.is_some() || scores.sinks.is_some()) {
        return miss("no causal mask was found");
    }
    let counted = scores.span.is_some() && (scores.prefix.is_some() || scores.sinks.is_some());
    if counted || (scores.terms.is_some() && scores.sinks.is_some()) {
        return miss("keys of a part of the cache, or distance biases, are combined with a prefix or sinks");
    }
    scores.build_match(f, (n, t), product, (node, transpose_b))
}

fn skip_casts(f: &Function, mut v: ValueId) -> ValueId {
    while let Some(GraphNode { op: Op::Cast(dtype), inputs, .. }) = f.defining_node(v) {
        if !dtype.is_float() || !f.ty(inputs[0]).dtype.is_float() {
            break;
        }
        v = inputs[0];
    }
    v
}

impl<'f> ScoreTransform<'f> {
    /// Reads the ops between the softmax's input and the product; returns the product.
    fn match_scores(&mut self, r: &PositionReader<'f>, mut v: ValueId) -> Result<&'f GraphNode, MissReason> {
        loop {
            v = skip_casts(r.f, v);
            let Some(node) = r.f.defining_node(v) else {
                return miss("the scores are an input of the function");
            };
            let has_shape = |i: &ValueId| r.f.ty(*i).dims == r.f.ty(v).dims;
            match &node.op {
                Op::MatMul { .. } => {
                    return match self.unmasked.is_none_or(|u| skip_casts(r.f, u) == v) {
                        true => Ok(node),
                        false => miss(OTHER_SCORES),
                    };
                }
                Op::SelectGe => v = self.match_selection(r, &node.inputs)?,
                Op::Binary(op) => {
                    let (x, other) = match (has_shape(&node.inputs[0]), has_shape(&node.inputs[1])) {
                        (true, _) if !self.is_bias(r, node.inputs[0]) => (node.inputs[0], node.inputs[1]),
                        (_, true) if *op != BinOp::Sub && *op != BinOp::Div => {
                            (node.inputs[1], node.inputs[0])
                        }
                        _ => return miss(format!("{} changes the shape of the scores", op.name())),
                    };
                    v = self.binary(r, *op, x, other)?;
                }
                other => return miss(format!("{} is between product and softmax", other.name())),
            }
            if self.unmasked.is_some_and(|u| skip_casts(r.f, u) == skip_casts(r.f, v)) {
                self.unmasked = None;
            }
        }
    }

    /// True for values that are masks or biases of full shape (decode has no others).
    fn is_bias(&self, r: &PositionReader<'f>, v: ValueId) -> bool {
        let Some(node) = r.f.defining_node(v) else { return false };
        match &node.op {
            Op::SelectGe => node.inputs[2..].iter().all(|&x| constant(r.f, x).is_some()),
            Op::Binary(BinOp::Mul) => {
                node.inputs.iter().any(|&x| r.read_near(x).is_some_and(|p| p.key != 0.0))
            }
            Op::Binary(BinOp::Add) => node.inputs.iter().all(|&x| self.is_bias(r, x)),
            Op::Cast(_) => self.is_bias(r, node.inputs[0]),
            Op::Reshape { .. } | Op::Permute { .. } => distances::is_gathered(r.f, v),
            _ => constant(r.f, v).is_some(),
        }
    }

    /// `a >= b ? x : y` with scores on one side; returns the scores.
    fn match_selection(&mut self, r: &PositionReader<'f>, inputs: &[ValueId]) -> Result<ValueId, MissReason> {
        let &[a, b, x, y] = inputs else { return Err(None) };
        let form = self.match_condition(r, a, b)?;
        let hidden = |v: ValueId| constant(r.f, v).is_some_and(|c| c <= -1e4);
        match (hidden(x), hidden(y)) {
            (false, true) => self.apply_mask(form, x),
            (true, false) => self.apply_mask(negated(form), y),
            (false, false) if form.coefficients() == (0.0, -1.0, 1.0, -1.0) && self.prefix.is_none() => {
                // The op shows every key of the prefix.
                if self.ahead.is_some() || self.window != 0 || self.sinks.is_some() {
                    return miss("a mask is applied to the selection of the prefix");
                }
                self.prefix = form.count;
                self.unmasked = Some(x);
                Ok(y)
            }
            (false, false) if self.sinks.is_none() => {
                self.sinks = Some(AttentionSinks::read(r, y)?);
                self.apply_mask(form, x)
            }
            _ => miss("a selection is no mask"),
        }
    }

    fn match_condition(
        &self,
        r: &PositionReader,
        a: ValueId,
        b: ValueId,
    ) -> Result<PositionForm, MissReason> {
        let form = r.read(a).zip(r.read(b)).and_then(|(a, b)| a.sub(b));
        form.ok_or_else(|| Some("a condition is not linear in the positions".into()))
    }

    /// Keys are seen where `form >= 0`.
    fn apply_mask<T>(&mut self, form: PositionForm, rest: T) -> Result<T, MissReason> {
        if self.softcap != 0.0 {
            return miss("a mask is applied before the soft cap");
        }
        match form.coefficients() {
            // j <= p + ahead
            (1.0, -1.0, 0.0, c) if c >= 0.0 && self.ahead.is_none_or(|ahead| ahead == c as usize) => {
                self.ahead = Some(c as usize);
            }
            // p - j < window
            (-1.0, 1.0, 0.0, c) if c >= 0.0 && (self.window == 0 || self.window == c as usize + 1) => {
                self.window = c as usize + 1;
            }
            // j < count, j >= count
            (0.0, -1.0, 1.0, -1.0) if self.span.is_none() => {
                self.span = form.count.map(|n| (KeySpan::First, n))
            }
            (0.0, 1.0, -1.0, 0.0) if self.span.is_none() => {
                self.span = form.count.map(|n| (KeySpan::Rest, n))
            }
            (p, j, prefix, c) => {
                return miss(format!(
                    "a mask shows keys where {p} p + {j} j + {prefix} prefix + {c} >= 0, for query p and key j"
                ));
            }
        }
        Ok(rest)
    }

    /// `x op other` where `x` are the scores; returns what is left of them.
    fn binary(
        &mut self,
        r: &PositionReader,
        op: BinOp,
        x: ValueId,
        other: ValueId,
    ) -> Result<ValueId, MissReason> {
        match (op, constant(r.f, other)) {
            (BinOp::Max, Some(c)) if c <= -HUGE => Ok(x),
            (BinOp::Min, Some(c)) if c >= HUGE => Ok(x),
            (BinOp::Min, None) => self.select_bias(r, other, HUGE, f64::INFINITY).map(|()| x),
            (BinOp::Add, None) => self.match_bias(r, other).map(|()| x),
            (BinOp::Mul, Some(c)) => self.match_factor(r, x, c),
            (BinOp::Div, Some(c)) if c != 0.0 => self.match_factor(r, x, 1.0 / c),
            (_, Some(c)) => miss(format!("{} by {c} changes the scores", op.name())),
            (_, None) => miss(format!("{} with something that is not a mask", op.name())),
        }
    }

    /// An added value: a mask of zeros and huge negative numbers, ALiBi, or the sum of both.
    fn match_bias(&mut self, r: &PositionReader, v: ValueId) -> Result<(), MissReason> {
        let v = skip_casts(r.f, v);
        let Some(node) = r.f.defining_node(v) else {
            return miss("an input of the function is added to the scores");
        };
        match &node.op {
            Op::SelectGe => self.select_bias(r, v, 0.0, 0.0),
            Op::Binary(BinOp::Add) => node.inputs.iter().try_for_each(|&v| self.match_bias(r, v)),
            Op::Binary(BinOp::Mul) => {
                let forms = [r.read_near(node.inputs[0]), r.read_near(node.inputs[1])];
                let (slopes, form) = match forms {
                    [_, Some(form)] if form.key != 0.0 => (node.inputs[0], form),
                    [Some(form), _] if form.key != 0.0 => (node.inputs[1], form),
                    _ => return miss("a product is added to the scores that is not linear in the keys"),
                };
                let once = self.slopes.is_none() && self.scale == 1.0 && self.softcap == 0.0;
                if self.unmasked.is_some() {
                    return miss(OTHER_SCORES);
                }
                if !once || form.prefix != 0.0 {
                    return miss("a second or scaled bias");
                }
                self.slopes = Some((slopes, form));
                Ok(())
            }
            _ if distances::is_gathered(r.f, v) => {
                if self.unmasked.is_some() {
                    return miss(OTHER_SCORES);
                }
                if self.terms.is_some() || self.scale != 1.0 || self.softcap != 0.0 {
                    return miss("a second or scaled bias");
                }
                self.terms = Some(ScoreBias::read(r, v)?);
                Ok(())
            }
            other => miss(format!("{} is added to the scores", other.name())),
        }
    }

    /// `seen` (between the bounds) or a huge negative number, by a condition.
    fn select_bias(&mut self, r: &PositionReader, v: ValueId, low: f64, high: f64) -> Result<(), MissReason> {
        let v = skip_casts(r.f, v);
        let Some(GraphNode { op: Op::SelectGe, inputs, .. }) = r.f.defining_node(v) else {
            return miss("something that is not a mask is joined with the scores");
        };
        let form = self.match_condition(r, inputs[0], inputs[1])?;
        let seen = |c: f64| (low..=high).contains(&c);
        match (constant(r.f, inputs[2]), constant(r.f, inputs[3])) {
            (Some(x), Some(y)) if seen(x) && y <= -1e4 => self.apply_mask(form, ()),
            (Some(x), Some(y)) if x <= -1e4 && seen(y) => self.apply_mask(negated(form), ()),
            _ => miss("a mask has other values than its neutral one and a huge negative number"),
        }
    }

    /// A factor of the scores, or the outer part of `cap * tanh(x / cap)`.
    fn match_factor(&mut self, r: &PositionReader, x: ValueId, c: f64) -> Result<ValueId, MissReason> {
        if self.unmasked.is_some() {
            return miss(OTHER_SCORES);
        }
        let inner = skip_casts(r.f, x);
        let Some(GraphNode { op: Op::Unary(UnOp::Tanh), inputs, .. }) = r.f.defining_node(inner) else {
            self.scale *= c;
            return Ok(x);
        };
        if self.softcap != 0.0 || self.scale != 1.0 || c <= 0.0 {
            return miss("a second or scaled soft cap");
        }
        self.softcap = c;
        self.scale = c;
        Ok(inputs[0])
    }

    /// The operands in the order of axes that the op needs.
    fn build_match(
        self,
        f: &Function,
        (n, t): (&Dim, &Dim),
        product: &GraphNode,
        (mixed, values_transposed): (&GraphNode, bool),
    ) -> Result<AttentionMatch, MissReason> {
        let Op::MatMul { transpose_b } = product.op else { return Err(None) };
        let (q, k, v) = (product.inputs[0], product.inputs[1], mixed.inputs[1]);
        let lead = f.ty(product.outputs[0]).dims[..f.ty(product.outputs[0]).rank() - 2].to_vec();
        let (qt, kt, vt) = (f.ty(q), f.ty(k), f.ty(v));
        if f.ty(product.outputs[0]).dims[lead.len()..] != [n.clone(), t.clone()]
            || qt.rank() != lead.len() + 2
        {
            return miss("the scores have other axes than the softmax");
        }
        if qt.dims[..lead.len()] != lead[..] || f.ty(mixed.inputs[0]).dims[..lead.len()] != lead[..] {
            return miss("queries and scores have other heads");
        }
        let roles = axis_roles(&lead, kt)?;
        if roles != self::axis_roles(&lead, vt)? {
            return miss("keys and values have other heads");
        }
        let axes: Vec<(Dim, AxisRole)> = lead.into_iter().zip(roles).collect();
        let size = |role: AxisRole| -> Option<i64> {
            axes.iter().filter(|(_, r)| *r == role).try_fold(1, |p, (d, _)| Some(p * d.as_const()?))
        };
        let (Some(kv), Some(group)) = (size(AxisRole::Kv), size(AxisRole::Group)) else {
            return miss("the number of heads is not constant");
        };
        let width =
            |ty: &TensorType, transposed: bool| ty.dims[ty.rank() - if transposed { 2 } else { 1 }].clone();
        let (key_size, value_size) = (width(kt, !transpose_b), width(vt, values_transposed));

        let of = |role: AxisRole| axes.iter().enumerate().filter(move |(_, a)| a.1 == role).map(|(i, _)| i);
        let Some((query, query_scale)) = queries_first(f, q, &axes) else {
            return miss("the queries' rows are moved apart");
        };
        let (key, key_scale) = rows_first(f, k, &axes, !transpose_b, true)?;
        let (value, _) = rows_first(f, v, &axes, values_transposed, false)?;
        for (name, v) in [("slopes", self.slopes.map(|(slopes, _)| slopes)), ("logits", self.null_logits)] {
            let ordered = of(AxisRole::Kv).chain(of(AxisRole::Group)).is_sorted();
            let Some(ty) = v.map(|v| f.ty(v)) else { continue };
            if !ordered || ty.dtype != DType::F32 || ty.elements().as_const() != Some(kv * group) {
                return miss(format!("{name} {ty} are not one per head"));
            }
        }
        let terms = self.terms.map(|terms| terms.of_heads(f, &axes, kv * group)).transpose()?;
        let sink_queries = match &self.sinks {
            Some(sinks) => Some(sinks.sink_queries(f, &self, (product, query_scale), &axes)?),
            None => None,
        };
        let op = AttentionOp {
            scale: self.scale * query_scale * key_scale,
            softcap: self.softcap,
            window: self.window,
            ahead: self.ahead.unwrap_or(AttentionOp::ALL),
            sinks: self.sinks.as_ref().map_or(0, |s| s.count),
            alibi: self.slopes.is_some(),
            prefix: self.prefix.is_some(),
            span: self.span.map_or(KeySpan::All, |(span, _)| span),
            terms: terms.map(|terms| terms.zero_row),
            null_logits: self.null_logits.is_some(),
            codes: false,
        };
        let heads_of = |rows: &Dim, heads: i64, size: &Dim, dtype| TensorType {
            dtype,
            dims: vec![rows.clone(), Dim::from(heads), size.clone()],
        };
        let common = if f.ty(key).dtype == f.ty(value).dtype { f.ty(key).dtype } else { DType::F32 };
        let inputs = [
            (query, heads_of(n, kv * group, &key_size, DType::F32)),
            (key, heads_of(t, kv, &key_size, common)),
            (value, heads_of(t, kv, &value_size, common)),
        ];
        // Terms that depend on the query alone do not change the softmax.
        let slopes = self.slopes.map(|(slopes, distance)| (slopes, distance.key));
        let null_logits = self.null_logits;
        let count = self.prefix.or(self.span.map(|(_, count)| count));
        Ok(AttentionMatch { op, inputs, slopes, count, terms, sink_queries, null_logits, axes })
    }
}

/// Visible where `form < 0`, of integers.
fn negated(form: PositionForm) -> PositionForm {
    let mut form = form.scale(-1.0);
    form.constant -= 1.0;
    form
}

/// The roles of the scores' leading axes in an operand.
fn axis_roles(lead: &[Dim], operand: &TensorType) -> Result<Vec<AxisRole>, MissReason> {
    let own = &operand.dims[..operand.rank() - 2];
    if own.len() > lead.len() {
        return miss("keys or values have more axes than the scores");
    }
    let missing = lead.len() - own.len();
    let role = |(i, size): (usize, &Dim)| match i.checked_sub(missing).map(|i| &own[i]) {
        _ if size.as_const() == Some(1) => Ok(AxisRole::None),
        None => Ok(AxisRole::Group),
        Some(d) if d.as_const() == Some(1) => Ok(AxisRole::Group),
        Some(d) if d == size => Ok(AxisRole::Kv),
        Some(_) => miss("keys or values have other heads than the scores"),
    };
    lead.iter().enumerate().map(role).collect()
}

/// The value that holds queries as `[n, heads, size]`, with its scale.
fn queries_first(f: &Function, q: ValueId, axes: &[(Dim, AxisRole)]) -> Option<(ValueId, f64)> {
    let chain = LayoutChain::trace(f, q, true);
    let lists = &chain.axes;
    let of = |role: AxisRole| axes.iter().enumerate().filter(move |(_, a)| a.1 == role).map(|(i, _)| i);
    let order = [
        vec![lists.len() - 2],
        of(AxisRole::Kv).collect(),
        of(AxisRole::Group).collect(),
        vec![lists.len() - 1],
    ];
    let order: Vec<usize> = order.concat().iter().flat_map(|&i| lists[i].clone()).collect();
    chain.in_order(&order)
}

/// The value that holds keys or values as `[t, heads, size]`.
fn rows_first(
    f: &Function,
    v: ValueId,
    axes: &[(Dim, AxisRole)],
    transposed: bool,
    scaled: bool,
) -> Result<(ValueId, f64), MissReason> {
    let chain = LayoutChain::trace(f, v, scaled);
    let lists = &chain.axes;
    let missing = axes.len() - (lists.len() - 2);
    let (t, size) = match transposed {
        true => (lists.len() - 1, lists.len() - 2),
        false => (lists.len() - 2, lists.len() - 1),
    };
    let heads = axes.iter().enumerate().filter(|(_, a)| a.1 == AxisRole::Kv).map(|(i, _)| i - missing);
    let order: Vec<usize> = std::iter::once(t).chain(heads).chain([size]).collect();
    let order: Vec<usize> = order.iter().flat_map(|&i| lists[i].clone()).collect();
    chain.in_order(&order).ok_or_else(|| Some("keys or values have no rows by position".into()))
}

impl AttentionMatch {
    /// Appends the op and what brings its result into the order of `old`.
    fn emit(&self, module: &Module, f: &mut Function, old: ValueId) -> Result<ValueId, OpError> {
        let TensorType { dtype, dims } = f.ty(old).clone();
        let mut append = |op: Op, inputs: &[ValueId]| Ok::<_, OpError>(f.append(module, op, inputs)?[0]);
        let mut inputs = Vec::new();
        for (v, ty) in &self.inputs {
            let v = append(Op::Reshape { dims: ty.dims.clone() }, &[*v])?;
            inputs.push(append(Op::Cast(ty.dtype), &[v])?);
        }
        if let Some((slopes, factor)) = self.slopes {
            let heads = self.inputs[0].1.dims[1].clone();
            let mut slopes = append(Op::Reshape { dims: vec![heads] }, &[slopes])?;
            if factor != 1.0 {
                let factor = append(Op::Constant { value: factor, dtype: DType::F32 }, &[])?;
                slopes = append(Op::Binary(BinOp::Mul), &[slopes, factor])?;
            }
            inputs.push(slopes);
        }
        inputs.extend(self.count);
        if let Some(queries) = self.sink_queries {
            let TensorType { dtype, dims } = self.inputs[0].1.clone();
            let queries = append(Op::Reshape { dims }, &[queries])?;
            inputs.push(append(Op::Cast(dtype), &[queries])?);
        }
        if let Some(logits) = self.null_logits {
            let heads = self.inputs[0].1.dims[1].clone();
            inputs.push(append(Op::Reshape { dims: vec![heads] }, &[logits])?);
        }
        if let Some(terms) = self.terms {
            inputs.push(match terms.transposed {
                true => terms.table,
                false => append(Op::Permute { perm: vec![1, 0] }, &[terms.table])?,
            });
        }
        let rows = append(Op::Attention(self.op.clone()), &inputs)?;
        let rows = append(Op::Cast(dtype), &[rows])?;
        // [n, heads, size] -> [n, kv axes, group axes, size] -> the old order.
        let with =
            |role: AxisRole| self.axes.iter().enumerate().filter(move |(_, a)| a.1 == role).map(|(i, _)| i);
        let order: Vec<usize> = with(AxisRole::Kv).chain(with(AxisRole::Group)).collect();
        let (n, size) = (self.inputs[0].1.dims[0].clone(), self.inputs[2].1.dims[2].clone());
        let split = order.iter().map(|&i| self.axes[i].0.clone());
        let split = std::iter::once(n).chain(split).chain([size]).collect();
        let rows = append(Op::Reshape { dims: split }, &[rows])?;
        let long: Vec<usize> = (0..self.axes.len()).filter(|i| self.axes[*i].1 != AxisRole::None).collect();
        let place = |axis: &usize| 1 + order.iter().position(|o| o == axis).unwrap_or(0);
        let perm = long.iter().map(place).chain([0, 1 + order.len()]).collect();
        let moved = append(Op::Permute { perm }, &[rows])?;
        append(Op::Reshape { dims }, &[moved])
    }
}
