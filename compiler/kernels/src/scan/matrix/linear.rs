//! Bodies that are linear in the state: what a step does in a form that several steps can be joined by.

use mlcc_ir::compute::RedOp;
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::{Function, Node, ValueId};
use mlcc_ir::kernel::{BinOp, UnOp};
use mlcc_ir::ops::Op;
use std::collections::BTreeMap;

/// What needs nothing of the state.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum Known {
    One,
    Value(ValueId),
    Product(Box<Known>, Box<Known>),
    Negative(Box<Known>),
}

impl Known {
    fn times(self, other: Known) -> Known {
        match (self, other) {
            (Known::One, other) | (other, Known::One) => other,
            (a, b) => Known::Product(Box::new(a), Box::new(b)),
        }
    }

    fn negative(self) -> Known {
        Known::Negative(Box::new(self))
    }
}

/// A step of a state `S` with rows and columns: `S' = S diag(decay) + found direction^T + value key^T` where
/// `found = S probe`, and `y = S query + found (direction . read) + value (own . read)`. `value` is a number per row, everything else
/// one per column.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Linear {
    pub decay: Known,
    pub value: Known,
    pub key: Known,
    pub query: Known,
    /// `own` and `read`, as one product that is summed over the columns; none if `y` has nothing of the step's own value.
    pub own: Option<Known>,
    pub correction: Option<Correction>,
}

/// What is changed by what the state says before.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Correction {
    pub probe: Known,
    pub direction: Known,
    /// `direction` and `read`, as `own` of [`Linear`].
    pub read: Option<Known>,
}

/// `S diag(decay) + found direction^T + row column^T`, each if it is there.
#[derive(Clone, Default)]
struct Matrix {
    decay: Option<Known>,
    direction: Option<Known>,
    added: Option<(Known, Known)>,
}

/// A number per row: `found times + known`.
#[derive(Clone, Default)]
struct Row {
    times: Option<Known>,
    known: Option<Known>,
}

#[derive(Clone)]
enum Form {
    Known,
    Row(Row),
    Matrix(Matrix),
}

impl Linear {
    /// Of a body with one state and one result, see [`super::shape_of`]; `None` if it is not of this form.
    pub fn of(body: &Function) -> Option<Linear> {
        let &[state, y] = body.outputs.as_slice() else { return None };
        let mut analysis = Analysis { body, forms: BTreeMap::new(), probe: None };
        let first = Matrix { decay: Some(Known::One), ..Matrix::default() };
        for (i, &v) in body.inputs.iter().enumerate() {
            let form = if i == 0 { Form::Matrix(first.clone()) } else { Form::Known };
            analysis.forms.insert(v, form);
        }
        let mut read = None;
        for (_, node) in body.live() {
            if node.outputs.as_slice() == [y] {
                read = Some(analysis.summed(node)?);
            } else {
                let form = analysis.form(node)?;
                analysis.forms.insert(node.outputs[0], form);
            }
        }
        let Some(Form::Matrix(Matrix { decay: Some(decay), direction, added: Some((value, key)) })) =
            analysis.forms.remove(&state)
        else {
            return None;
        };
        let Matrix { decay: Some(query), direction: of_found, added: own } = read? else { return None };
        if own.as_ref().is_some_and(|(row, _)| *row != value) {
            return None;
        }
        let correction = match (analysis.probe, direction) {
            (Some(probe), Some(direction)) => Some(Correction { probe, direction, read: of_found }),
            (None, None) => None,
            _ => return None,
        };
        Some(Linear { decay, value, key, query, own: own.map(|(_, column)| column), correction })
    }
}

struct Analysis<'a> {
    body: &'a Function,
    forms: BTreeMap<ValueId, Form>,
    /// What `found` is: one sum of products with the state.
    probe: Option<Known>,
}

impl Analysis<'_> {
    /// What a node computes; `None` if that is no form.
    fn form(&mut self, node: &Node) -> Option<Form> {
        let forms: Vec<Form> =
            node.inputs.iter().map(|v| self.forms.get(v).cloned()).collect::<Option<_>>()?;
        if forms.iter().all(|form| matches!(form, Form::Known)) {
            return node.op.is_elementwise().then_some(Form::Known);
        }
        match (&node.op, forms.as_slice()) {
            (Op::Binary(BinOp::Mul), [form, Form::Known]) => self.scaled(form.clone(), node.inputs[1]),
            (Op::Binary(BinOp::Mul), [Form::Known, form]) => self.scaled(form.clone(), node.inputs[0]),
            (Op::Binary(BinOp::Add), [a, b]) => self.sum([a.clone(), b.clone()], node),
            (Op::Binary(BinOp::Sub), [a, b]) => {
                let b = self.lifted(b.clone(), a, node.inputs[1])?;
                self.sum([a.clone(), negative(b)], node)
            }
            (Op::Unary(UnOp::Neg), [form]) => Some(negative(form.clone())),
            (Op::Reduce { .. }, _) => match self.summed(node)? {
                Matrix { decay: Some(probe), direction: None, added: None } if self.probe.is_none() => {
                    self.probe = Some(probe);
                    Some(Form::Row(Row { times: Some(Known::One), known: None }))
                }
                _ => None,
            },
            _ => None,
        }
    }

    /// The matrix whose columns a node adds up.
    fn summed(&self, node: &Node) -> Option<Matrix> {
        match (&node.op, self.forms.get(node.inputs.first()?)?) {
            (Op::Reduce { op: RedOp::Sum, .. }, Form::Matrix(matrix)) => Some(matrix.clone()),
            _ => None,
        }
    }

    /// Rows and columns of a known value: the factor of each, which is one where it is broadcast.
    fn factors(&self, v: ValueId) -> Option<(Known, Known)> {
        let ty = self.body.ty(v);
        let long =
            |from_last: usize| ty.rank() > from_last && ty.dims[ty.rank() - 1 - from_last] != Dim::from(1);
        match (long(1), long(0)) {
            (true, false) => Some((Known::Value(v), Known::One)),
            (false, _) => Some((Known::One, Known::Value(v))),
            (true, true) => {
                let node = self.body.def(v).filter(|node| node.op == Op::Binary(BinOp::Mul))?;
                let [(row, column), (other_row, other_column)] =
                    [self.factors(node.inputs[0])?, self.factors(node.inputs[1])?];
                Some((row.times(other_row), column.times(other_column)))
            }
        }
    }

    /// A form times a known value.
    fn scaled(&self, form: Form, by: ValueId) -> Option<Form> {
        let (row, column) = self.factors(by)?;
        let wide = *self.body.ty(by).dims.last().unwrap_or(&Dim::from(1)) != Dim::from(1);
        let times = |known: Option<Known>, by: &Known| known.map(|known| known.times(by.clone()));
        match form {
            Form::Known => None,
            // A number per head may stand on both sides.
            Form::Row(Row { times: found, known }) if !wide => match (found, row == Known::One) {
                (found, true) => {
                    Some(Form::Row(Row { times: times(found, &column), known: times(known, &column) }))
                }
                (None, false) => Some(Form::Row(Row { times: None, known: times(known, &row) })),
                (Some(_), false) => None,
            },
            Form::Row(Row { times: found, known }) if row == Known::One => Some(Form::Matrix(Matrix {
                decay: None,
                direction: times(found, &column),
                added: known.map(|known| (known, column)),
            })),
            Form::Row(_) => None,
            Form::Matrix(Matrix { decay, direction, added }) if row == Known::One => {
                Some(Form::Matrix(Matrix {
                    decay: times(decay, &column),
                    direction: times(direction, &column),
                    added: added.map(|(row, key)| (row, key.times(column))),
                }))
            }
            Form::Matrix(_) => None,
        }
    }

    /// A known value in the form of what it is added to.
    fn lifted(&self, form: Form, other: &Form, v: ValueId) -> Option<Form> {
        match (&form, other) {
            (Form::Known, Form::Row(_)) => {
                let (row, column) = self.factors(v)?;
                (column == Known::One).then_some(Form::Row(Row { times: None, known: Some(row) }))
            }
            (Form::Known, Form::Matrix(_)) => {
                let added = Some(self.factors(v)?);
                Some(Form::Matrix(Matrix { added, ..Matrix::default() }))
            }
            _ => Some(form),
        }
    }

    fn sum(&self, [a, b]: [Form; 2], node: &Node) -> Option<Form> {
        fn either<T>(a: Option<T>, b: Option<T>) -> Option<Option<T>> {
            match (a, b) {
                (Some(_), Some(_)) => None,
                (a, b) => Some(a.or(b)),
            }
        }
        let (first, second) =
            (self.lifted(a.clone(), &b, node.inputs[0])?, self.lifted(b, &a, node.inputs[1])?);
        match (first, second) {
            (Form::Row(a), Form::Row(b)) => {
                Some(Form::Row(Row { times: either(a.times, b.times)?, known: either(a.known, b.known)? }))
            }
            (Form::Matrix(a), Form::Matrix(b)) => Some(Form::Matrix(Matrix {
                decay: either(a.decay, b.decay)?,
                direction: either(a.direction, b.direction)?,
                added: either(a.added, b.added)?,
            })),
            _ => None,
        }
    }
}

fn negative(form: Form) -> Form {
    let of = |known: Option<Known>| known.map(Known::negative);
    match form {
        Form::Known => Form::Known,
        Form::Row(Row { times, known }) => Form::Row(Row { times: of(times), known: of(known) }),
        Form::Matrix(Matrix { decay, direction, added }) => Form::Matrix(Matrix {
            decay: of(decay),
            direction: of(direction),
            added: added.map(|(row, column)| (row, column.negative())),
        }),
    }
}
