//! The effect of reshapes and permutations on axes, followed from a value up to where it is made. Every axis
//! is a product of factors, outermost first; a reshape that divides an axis divides its factor.

use mlcc_ir::dim::Dim;
use mlcc_ir::graph::{Function, ValueId};
use mlcc_ir::kernel::BinOp;
use mlcc_ir::ops::Op;

type AxisFactor = usize;

/// A value and all that its elements are known to be: the values on the way up whose elements are the same in
/// another order, times `scale`.
pub struct LayoutChain {
    sizes: Vec<Dim>,
    /// The two parts of a factor that was divided.
    parts: Vec<Option<(AxisFactor, AxisFactor)>>,
    /// Factors of each axis of the value that the chain starts from.
    pub axes: Vec<Vec<AxisFactor>>,
    /// Values from the start upwards: each with the flat order of its factors and its factor against the
    /// start.
    places: Vec<(ValueId, Vec<AxisFactor>, f64)>,
}

impl LayoutChain {
    /// Follows `v` up through reshapes, permutations, float casts, and factors that are constants if
    /// `scaled`.
    pub fn trace(f: &Function, v: ValueId, scaled: bool) -> LayoutChain {
        let mut chain =
            LayoutChain { sizes: Vec::new(), parts: Vec::new(), axes: Vec::new(), places: Vec::new() };
        let mut axes: Vec<Vec<AxisFactor>> = f.ty(v).dims.iter().map(|d| chain.axis(d)).collect();
        chain.axes.clone_from(&axes);
        let (mut v, mut scale) = (v, 1.0);
        loop {
            chain.places.push((v, axes.concat(), scale));
            let Some(node) = f.defining_node(v) else { break };
            let x = match node.inputs.first() {
                Some(&x) => x,
                None => break,
            };
            match &node.op {
                Op::Reshape { .. } => match chain.regroup_axes(&axes, &f.ty(x).dims) {
                    Some(regrouped) => axes = regrouped,
                    None => break,
                },
                Op::Permute { perm } => {
                    let mut source = vec![Vec::new(); axes.len()];
                    perm.iter().zip(&axes).for_each(|(&from, axis)| source[from].clone_from(axis));
                    axes = source;
                }
                Op::Cast(dtype) if dtype.is_float() && f.ty(x).dtype.is_float() => {}
                Op::Binary(op) if scaled && f.ty(x).dims == f.ty(v).dims => {
                    match (op, constant(f, node.inputs[1])) {
                        (BinOp::Mul, Some(c)) => scale *= c,
                        (BinOp::Div, Some(c)) if c != 0.0 => scale /= c,
                        _ => break,
                    }
                }
                _ => break,
            }
            v = x;
        }
        chain
    }

    /// The highest value that holds the elements in this order of factors, with its scale.
    pub fn in_order(&self, order: &[AxisFactor]) -> Option<(ValueId, f64)> {
        let order = self.expand_factors(order);
        let found = self.places.iter().rev().find(|(_, flat, _)| self.expand_factors(flat) == order);
        found.map(|(v, _, scale)| (*v, *scale))
    }

    fn axis(&mut self, dim: &Dim) -> Vec<AxisFactor> {
        if dim.as_const() == Some(1) { vec![] } else { vec![self.factor(dim.clone())] }
    }

    fn factor(&mut self, size: Dim) -> AxisFactor {
        self.sizes.push(size);
        self.parts.push(None);
        self.sizes.len() - 1
    }

    /// Divided factors replaced by their parts.
    fn expand_factors(&self, factors: &[AxisFactor]) -> Vec<AxisFactor> {
        let mut out = Vec::new();
        for &factor in factors {
            match self.parts[factor] {
                Some((outer, inner)) => out.extend(self.expand_factors(&[outer, inner])),
                None => out.push(factor),
            }
        }
        out
    }

    /// The same flat order of elements under other dims.
    fn regroup_axes(&mut self, axes: &[Vec<AxisFactor>], dims: &[Dim]) -> Option<Vec<Vec<AxisFactor>>> {
        let mut flat = self.expand_factors(&axes.concat());
        flat.reverse();
        let mut out = Vec::new();
        for dim in dims {
            let (mut axis, mut need) = (Vec::new(), dim.clone());
            while need.as_const() != Some(1) {
                let factor = flat.pop()?;
                let size = self.sizes[factor].clone();
                if let Some(rest) = quotient(&need, &size) {
                    axis.push(factor);
                    need = rest;
                    continue;
                }
                let rest = quotient(&size, &need)?;
                let (outer, inner) = (self.factor(need), self.factor(rest));
                self.parts[factor] = Some((outer, inner));
                axis.push(outer);
                flat.push(inner);
                break;
            }
            out.push(axis);
        }
        flat.is_empty().then_some(out)
    }
}

/// `a / b` if it is a size without remainder.
fn quotient(a: &Dim, b: &Dim) -> Option<Dim> {
    if a == b {
        return Some(Dim::from(1));
    }
    let by = b.as_const().filter(|&c| c > 0)?;
    let quotient = a.floor_div(by);
    (quotient.scale(by) == *a).then_some(quotient)
}

/// The value of a constant, through reshapes and casts.
pub fn constant(f: &Function, v: ValueId) -> Option<f64> {
    let node = f.defining_node(v)?;
    match &node.op {
        Op::Constant { value, .. } => Some(*value),
        Op::Reshape { .. } | Op::Cast(_) => constant(f, node.inputs[0]),
        _ => None,
    }
}
