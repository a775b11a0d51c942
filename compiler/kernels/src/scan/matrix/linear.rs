//! Bodies that are linear in the state: what a step does in a form that several steps can be joined by.

use mlcc_ir::compute::RedOp;
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::{Function, GraphNode, ValueId};
use mlcc_ir::kernel::{BinOp, UnOp};
use mlcc_ir::ops::Op;
use std::collections::BTreeMap;

/// An expression that does not depend on the state.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum StateFreeExpr {
    One,
    Value(ValueId),
    Product(Box<StateFreeExpr>, Box<StateFreeExpr>),
    Negative(Box<StateFreeExpr>),
}

impl StateFreeExpr {
    fn times(self, other: StateFreeExpr) -> StateFreeExpr {
        match (self, other) {
            (StateFreeExpr::One, other) | (other, StateFreeExpr::One) => other,
            (a, b) => StateFreeExpr::Product(Box::new(a), Box::new(b)),
        }
    }

    fn negative(self) -> StateFreeExpr {
        StateFreeExpr::Negative(Box::new(self))
    }
}

/// A step of a state `S` with rows and columns: `S' = S diag(decay) + found direction^T + value key^T` where
/// `found = S probe`, and `y = S query + found (direction . read) + value (own . read)`. `value` is a number
/// per row, everything else one per column.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct LinearRecurrence {
    pub decay: StateFreeExpr,
    pub value: StateFreeExpr,
    pub key: StateFreeExpr,
    pub query: StateFreeExpr,
    /// `own` and `read`, as one product that is summed over the columns; none if `y` does not depend on the
    /// step's own value.
    pub own_readout: Option<StateFreeExpr>,
    pub correction: Option<DeltaRule>,
}

/// The correction by what the state retrieves before the step.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct DeltaRule {
    pub probe: StateFreeExpr,
    pub direction: StateFreeExpr,
    /// `direction` and `read`, as `own` of [`LinearRecurrence`].
    pub readout: Option<StateFreeExpr>,
}

/// `S diag(decay) + found direction^T + row column^T`, each if it is there.
#[derive(Clone, Default)]
struct MatrixForm {
    decay: Option<StateFreeExpr>,
    direction: Option<StateFreeExpr>,
    added: Option<(StateFreeExpr, StateFreeExpr)>,
}

/// A number per row: `found times + known`.
#[derive(Clone, Default)]
struct RowForm {
    times: Option<StateFreeExpr>,
    known: Option<StateFreeExpr>,
}

#[derive(Clone)]
enum BodyForm {
    Known,
    Row(RowForm),
    Matrix(MatrixForm),
}

impl LinearRecurrence {
    /// Analyzes a body with one state and one result, see [`super::shape_of`]; `None` if it is not of this
    /// form.
    pub fn analyze(body: &Function) -> Option<LinearRecurrence> {
        let &[state, y] = body.outputs.as_slice() else { return None };
        let mut analysis = LinearAnalysis { body, forms: BTreeMap::new(), probe: None };
        let first = MatrixForm { decay: Some(StateFreeExpr::One), ..MatrixForm::default() };
        for (i, &v) in body.inputs.iter().enumerate() {
            let form = if i == 0 { BodyForm::Matrix(first.clone()) } else { BodyForm::Known };
            analysis.forms.insert(v, form);
        }
        let mut read = None;
        for (_, node) in body.live_nodes() {
            if node.outputs.as_slice() == [y] {
                read = Some(analysis.summed(node)?);
            } else {
                let form = analysis.form(node)?;
                analysis.forms.insert(node.outputs[0], form);
            }
        }
        let Some(BodyForm::Matrix(MatrixForm { decay: Some(decay), direction, added: Some((value, key)) })) =
            analysis.forms.remove(&state)
        else {
            return None;
        };
        let MatrixForm { decay: Some(query), direction: of_found, added: own } = read? else { return None };
        if own.as_ref().is_some_and(|(row, _)| *row != value) {
            return None;
        }
        let correction = match (analysis.probe, direction) {
            (Some(probe), Some(direction)) => Some(DeltaRule { probe, direction, readout: of_found }),
            (None, None) => None,
            _ => return None,
        };
        Some(LinearRecurrence {
            decay,
            value,
            key,
            query,
            own_readout: own.map(|(_, column)| column),
            correction,
        })
    }
}

struct LinearAnalysis<'a> {
    body: &'a Function,
    forms: BTreeMap<ValueId, BodyForm>,
    /// The probe of `found`, which is one sum of products with the state.
    probe: Option<StateFreeExpr>,
}

impl LinearAnalysis<'_> {
    /// The form of a node's result; `None` if it has none.
    fn form(&mut self, node: &GraphNode) -> Option<BodyForm> {
        let forms: Vec<BodyForm> =
            node.inputs.iter().map(|v| self.forms.get(v).cloned()).collect::<Option<_>>()?;
        if forms.iter().all(|form| matches!(form, BodyForm::Known)) {
            return node.op.is_elementwise().then_some(BodyForm::Known);
        }
        match (&node.op, forms.as_slice()) {
            (Op::Binary(BinOp::Mul), [form, BodyForm::Known]) => self.scaled(form.clone(), node.inputs[1]),
            (Op::Binary(BinOp::Mul), [BodyForm::Known, form]) => self.scaled(form.clone(), node.inputs[0]),
            (Op::Binary(BinOp::Add), [a, b]) => self.sum([a.clone(), b.clone()], node),
            (Op::Binary(BinOp::Sub), [a, b]) => {
                let b = self.lifted(b.clone(), a, node.inputs[1])?;
                self.sum([a.clone(), negative(b)], node)
            }
            (Op::Unary(UnOp::Neg), [form]) => Some(negative(form.clone())),
            (Op::Reduce { .. }, _) => match self.summed(node)? {
                MatrixForm { decay: Some(probe), direction: None, added: None } if self.probe.is_none() => {
                    self.probe = Some(probe);
                    Some(BodyForm::Row(RowForm { times: Some(StateFreeExpr::One), known: None }))
                }
                _ => None,
            },
            _ => None,
        }
    }

    /// The matrix whose columns a node adds up.
    fn summed(&self, node: &GraphNode) -> Option<MatrixForm> {
        match (&node.op, self.forms.get(node.inputs.first()?)?) {
            (Op::Reduce { op: RedOp::Sum, .. }, BodyForm::Matrix(matrix)) => Some(matrix.clone()),
            _ => None,
        }
    }

    /// Rows and columns of a known value: the factor of each, which is one where it is broadcast.
    fn factors(&self, v: ValueId) -> Option<(StateFreeExpr, StateFreeExpr)> {
        let ty = self.body.ty(v);
        let long =
            |from_last: usize| ty.rank() > from_last && ty.dims[ty.rank() - 1 - from_last] != Dim::from(1);
        match (long(1), long(0)) {
            (true, false) => Some((StateFreeExpr::Value(v), StateFreeExpr::One)),
            (false, _) => Some((StateFreeExpr::One, StateFreeExpr::Value(v))),
            (true, true) => {
                let node = self.body.defining_node(v).filter(|node| node.op == Op::Binary(BinOp::Mul))?;
                let [(row, column), (other_row, other_column)] =
                    [self.factors(node.inputs[0])?, self.factors(node.inputs[1])?];
                Some((row.times(other_row), column.times(other_column)))
            }
        }
    }

    /// A form times a known value.
    fn scaled(&self, form: BodyForm, by: ValueId) -> Option<BodyForm> {
        let (row, column) = self.factors(by)?;
        let wide = *self.body.ty(by).dims.last().unwrap_or(&Dim::from(1)) != Dim::from(1);
        let times =
            |known: Option<StateFreeExpr>, by: &StateFreeExpr| known.map(|known| known.times(by.clone()));
        match form {
            BodyForm::Known => None,
            // A number per head may be on both sides.
            BodyForm::Row(RowForm { times: found, known }) if !wide => {
                match (found, row == StateFreeExpr::One) {
                    (found, true) => Some(BodyForm::Row(RowForm {
                        times: times(found, &column),
                        known: times(known, &column),
                    })),
                    (None, false) => Some(BodyForm::Row(RowForm { times: None, known: times(known, &row) })),
                    (Some(_), false) => None,
                }
            }
            BodyForm::Row(RowForm { times: found, known }) if row == StateFreeExpr::One => {
                Some(BodyForm::Matrix(MatrixForm {
                    decay: None,
                    direction: times(found, &column),
                    added: known.map(|known| (known, column)),
                }))
            }
            BodyForm::Row(_) => None,
            BodyForm::Matrix(MatrixForm { decay, direction, added }) if row == StateFreeExpr::One => {
                Some(BodyForm::Matrix(MatrixForm {
                    decay: times(decay, &column),
                    direction: times(direction, &column),
                    added: added.map(|(row, key)| (row, key.times(column))),
                }))
            }
            BodyForm::Matrix(_) => None,
        }
    }

    /// A known value in the form of what it is added to.
    fn lifted(&self, form: BodyForm, other: &BodyForm, v: ValueId) -> Option<BodyForm> {
        match (&form, other) {
            (BodyForm::Known, BodyForm::Row(_)) => {
                let (row, column) = self.factors(v)?;
                (column == StateFreeExpr::One)
                    .then_some(BodyForm::Row(RowForm { times: None, known: Some(row) }))
            }
            (BodyForm::Known, BodyForm::Matrix(_)) => {
                let added = Some(self.factors(v)?);
                Some(BodyForm::Matrix(MatrixForm { added, ..MatrixForm::default() }))
            }
            _ => Some(form),
        }
    }

    fn sum(&self, [a, b]: [BodyForm; 2], node: &GraphNode) -> Option<BodyForm> {
        fn either<T>(a: Option<T>, b: Option<T>) -> Option<Option<T>> {
            match (a, b) {
                (Some(_), Some(_)) => None,
                (a, b) => Some(a.or(b)),
            }
        }
        let (first, second) =
            (self.lifted(a.clone(), &b, node.inputs[0])?, self.lifted(b, &a, node.inputs[1])?);
        match (first, second) {
            (BodyForm::Row(a), BodyForm::Row(b)) => Some(BodyForm::Row(RowForm {
                times: either(a.times, b.times)?,
                known: either(a.known, b.known)?,
            })),
            (BodyForm::Matrix(a), BodyForm::Matrix(b)) => Some(BodyForm::Matrix(MatrixForm {
                decay: either(a.decay, b.decay)?,
                direction: either(a.direction, b.direction)?,
                added: either(a.added, b.added)?,
            })),
            _ => None,
        }
    }
}

fn negative(form: BodyForm) -> BodyForm {
    let of = |known: Option<StateFreeExpr>| known.map(StateFreeExpr::negative);
    match form {
        BodyForm::Known => BodyForm::Known,
        BodyForm::Row(RowForm { times, known }) => {
            BodyForm::Row(RowForm { times: of(times), known: of(known) })
        }
        BodyForm::Matrix(MatrixForm { decay, direction, added }) => BodyForm::Matrix(MatrixForm {
            decay: of(decay),
            direction: of(direction),
            added: added.map(|(row, column)| (row, column.negative())),
        }),
    }
}
