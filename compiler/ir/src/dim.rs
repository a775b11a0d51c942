//! Sizes known at compile time or linear in a few run-time symbols. Numbers of elements may also be products
//! of such sizes.
//!
//! Canonical form: a constant plus terms sorted by atom with non-zero coefficients; structural equality is
//! equality.

use std::fmt;

/// A size that is known only when a step runs. The set is closed; ranges come from the build options.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum SizeSymbol {
    /// Tokens in this call.
    N,
    /// Sequences in this call.
    B,
    /// Tokens already in the cache.
    Past,
}

impl SizeSymbol {
    pub const ALL: [SizeSymbol; 3] = [SizeSymbol::N, SizeSymbol::B, SizeSymbol::Past];
    pub fn name(self) -> &'static str {
        match self {
            SizeSymbol::N => "n",
            SizeSymbol::B => "b",
            SizeSymbol::Past => "past",
        }
    }
}

/// A factor that a coefficient may multiply.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum DimAtom {
    Sym(SizeSymbol),
    FloorDiv(Box<Dim>, i64),
    Min(Box<Dim>, Box<Dim>),
    Max(Box<Dim>, Box<Dim>),
    /// Two or more sizes that are not constant and have no common factor among their coefficients, sorted. In
    /// numbers of elements only: dims of tensors stay linear.
    Product(Vec<Dim>),
}

/// A size: `constant + sum(coefficient * atom)`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Dim {
    constant: i64,
    terms: Vec<(DimAtom, i64)>,
}

/// Values of the symbols for one call, used to evaluate sizes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SymValues {
    pub n: i64,
    pub b: i64,
    pub past: i64,
}

impl SymValues {
    /// One sequence, `n` tokens, empty cache.
    pub fn for_tokens(n: i64) -> Self {
        SymValues { n, b: 1, past: 0 }
    }
    pub fn get(&self, sym: SizeSymbol) -> i64 {
        match sym {
            SizeSymbol::N => self.n,
            SizeSymbol::B => self.b,
            SizeSymbol::Past => self.past,
        }
    }
}

/// Bounds of the symbols that are known at compile time: `1 <= n <= chunk`, `1 <= b <= batch`, `past >= 0`,
/// `past + n <= context`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SizeBounds {
    pub chunk: i64,
    pub batch: i64,
    /// `None`: any number of tokens.
    pub context: Option<i64>,
}

impl Dim {
    pub fn sym(sym: SizeSymbol) -> Dim {
        Dim { constant: 0, terms: vec![(DimAtom::Sym(sym), 1)] }
    }
    pub fn of_atom(atom: DimAtom) -> Dim {
        Dim { constant: 0, terms: vec![(atom, 1)] }
    }
    /// The constant value, if there is no symbol in it.
    pub fn as_const(&self) -> Option<i64> {
        self.terms.is_empty().then_some(self.constant)
    }
    pub fn constant(&self) -> i64 {
        self.constant
    }
    pub fn terms(&self) -> &[(DimAtom, i64)] {
        &self.terms
    }
    fn normalise(constant: i64, mut terms: Vec<(DimAtom, i64)>) -> Dim {
        terms.sort();
        let mut merged: Vec<(DimAtom, i64)> = Vec::with_capacity(terms.len());
        for (atom, coefficient) in terms {
            match merged.last_mut() {
                Some((last, c)) if *last == atom => *c += coefficient,
                _ => merged.push((atom, coefficient)),
            }
        }
        merged.retain(|(_, c)| *c != 0);
        Dim { constant, terms: merged }
    }
    pub fn add(&self, other: &Dim) -> Dim {
        let terms = self.terms.iter().chain(&other.terms).cloned().collect();
        Dim::normalise(self.constant + other.constant, terms)
    }
    pub fn sub(&self, other: &Dim) -> Dim {
        self.add(&other.scale(-1))
    }
    pub fn scale(&self, factor: i64) -> Dim {
        let terms = self.terms.iter().map(|(a, c)| (a.clone(), c * factor)).collect();
        Dim::normalise(self.constant * factor, terms)
    }
    /// Product, where at least one side is constant (sizes stay linear); `None` otherwise.
    pub fn mul(&self, other: &Dim) -> Option<Dim> {
        match (self.as_const(), other.as_const()) {
            (_, Some(c)) => Some(self.scale(c)),
            (Some(c), _) => Some(other.scale(c)),
            _ => None,
        }
    }
    /// Product of any two sizes: linear where one is constant, else an atom of its own.
    pub fn product(&self, other: &Dim) -> Dim {
        if let Some(linear) = self.mul(other) {
            return linear;
        }
        let (mut coefficient, mut factors) = (1, Vec::new());
        for dim in [self, other] {
            let content = dim.content();
            coefficient *= content;
            let terms = dim.terms.iter().map(|(a, c)| (a.clone(), c / content)).collect();
            match Dim::normalise(dim.constant / content, terms) {
                Dim { constant: 0, terms } if matches!(terms[..], [(DimAtom::Product(_), 1)]) => {
                    if let Some((DimAtom::Product(inner), _)) = terms.into_iter().next() {
                        factors.extend(inner);
                    }
                }
                primitive => factors.push(primitive),
            }
        }
        factors.sort();
        Dim { constant: 0, terms: vec![(DimAtom::Product(factors), coefficient)] }
    }
    /// Greatest common divisor of all coefficients; negative if the first one is.
    fn content(&self) -> i64 {
        fn gcd(a: i64, b: i64) -> i64 {
            if b == 0 { a } else { gcd(b, a % b) }
        }
        let size = self.terms.iter().fold(self.constant.abs(), |g, (_, c)| gcd(g, c.abs()));
        match self.terms.first() {
            Some((_, c)) if *c < 0 => -size,
            _ => size.max(1),
        }
    }
    /// `floor(self / divisor)`, `divisor > 0`.
    pub fn floor_div(&self, divisor: i64) -> Dim {
        assert!(divisor > 0, "floor_div by {divisor}");
        if divisor == 1 {
            return self.clone();
        }
        if self.constant % divisor == 0 && self.terms.iter().all(|(_, c)| c % divisor == 0) {
            let terms = self.terms.iter().map(|(a, c)| (a.clone(), c / divisor)).collect();
            return Dim::normalise(self.constant / divisor, terms);
        }
        match self.as_const() {
            Some(c) => Dim::from(c.div_euclid(divisor)),
            None => Dim { constant: 0, terms: vec![(DimAtom::FloorDiv(Box::new(self.clone()), divisor), 1)] },
        }
    }
    /// `ceil(self / divisor)`.
    pub fn ceil_div(&self, divisor: i64) -> Dim {
        self.add(&Dim::from(divisor - 1)).floor_div(divisor)
    }
    pub fn minimum(&self, other: &Dim) -> Dim {
        match self.sub(other).as_const() {
            Some(d) => {
                if d <= 0 {
                    self.clone()
                } else {
                    other.clone()
                }
            }
            None => {
                let (a, b) = if self <= other { (self, other) } else { (other, self) };
                Dim { constant: 0, terms: vec![(DimAtom::Min(Box::new(a.clone()), Box::new(b.clone())), 1)] }
            }
        }
    }
    pub fn maximum(&self, other: &Dim) -> Dim {
        match self.sub(other).as_const() {
            Some(d) => {
                if d >= 0 {
                    self.clone()
                } else {
                    other.clone()
                }
            }
            None => {
                let (a, b) = if self <= other { (self, other) } else { (other, self) };
                Dim { constant: 0, terms: vec![(DimAtom::Max(Box::new(a.clone()), Box::new(b.clone())), 1)] }
            }
        }
    }
    /// Value for given symbols.
    pub fn eval(&self, values: &SymValues) -> i64 {
        let atom = |a: &DimAtom| match a {
            DimAtom::Sym(s) => values.get(*s),
            DimAtom::FloorDiv(d, by) => d.eval(values).div_euclid(*by),
            DimAtom::Min(a, b) => a.eval(values).min(b.eval(values)),
            DimAtom::Max(a, b) => a.eval(values).max(b.eval(values)),
            DimAtom::Product(factors) => factors.iter().map(|d| d.eval(values)).product(),
        };
        self.terms.iter().fold(self.constant, |sum, (a, c)| sum + c * atom(a))
    }
    /// Evaluates like [`Dim::eval`]; `None` where a number overflows.
    pub fn checked_eval(&self, values: &SymValues) -> Option<i64> {
        let atom = |a: &DimAtom| match a {
            DimAtom::Sym(s) => Some(values.get(*s)),
            DimAtom::FloorDiv(d, by) => d.checked_eval(values)?.checked_div_euclid(*by),
            DimAtom::Min(a, b) => Some(a.checked_eval(values)?.min(b.checked_eval(values)?)),
            DimAtom::Max(a, b) => Some(a.checked_eval(values)?.max(b.checked_eval(values)?)),
            DimAtom::Product(factors) => {
                factors.iter().try_fold(1i64, |all, d| all.checked_mul(d.checked_eval(values)?))
            }
        };
        self.terms.iter().try_fold(self.constant, |sum, (a, c)| sum.checked_add(c.checked_mul(atom(a)?)?))
    }
    /// Least and greatest value under the bounds (exact for linear sizes, else possibly wider); `None` if
    /// there is no limit or a number overflows.
    pub fn value_range(&self, bounds: &SizeBounds) -> Option<(i64, i64)> {
        let linear = |values: SymValues| {
            self.terms.iter().try_fold(self.constant, |sum, (atom, c)| match atom {
                DimAtom::Sym(s) => sum.checked_add(c.checked_mul(values.get(*s))?),
                _ => Some(sum),
            })
        };
        let grows = self.terms.iter().any(|(a, _)| *a == DimAtom::Sym(SizeSymbol::Past));
        let corners = match bounds.context {
            None if grows => return None,
            None => [(1, 0), (bounds.chunk, 0), (1, 0), (1, 0)],
            Some(context) => {
                let n = bounds.chunk.min(context);
                [(1, 0), (n, 0), (1, context - 1), (n, context - n)]
            }
        };
        let (mut low, mut high) = (i64::MAX, i64::MIN);
        for b in [1, bounds.batch] {
            for (n, past) in corners {
                let corner = linear(SymValues { n, b, past })?;
                (low, high) = (low.min(corner), high.max(corner));
            }
        }
        for (atom, c) in &self.terms {
            let (a, b) = match atom {
                DimAtom::Sym(_) => continue,
                DimAtom::FloorDiv(d, by) => {
                    let (low, high) = d.value_range(bounds)?;
                    (low.div_euclid(*by), high.div_euclid(*by))
                }
                DimAtom::Min(x, y) => {
                    let (x, y) = (x.value_range(bounds)?, y.value_range(bounds)?);
                    (x.0.min(y.0), x.1.min(y.1))
                }
                DimAtom::Max(x, y) => {
                    let (x, y) = (x.value_range(bounds)?, y.value_range(bounds)?);
                    (x.0.max(y.0), x.1.max(y.1))
                }
                DimAtom::Product(factors) => factors.iter().try_fold((1i64, 1i64), |(low, high), d| {
                    let (a, b) = d.value_range(bounds)?;
                    let all = [
                        low.checked_mul(a)?,
                        low.checked_mul(b)?,
                        high.checked_mul(a)?,
                        high.checked_mul(b)?,
                    ];
                    Some((*all.iter().min()?, *all.iter().max()?))
                })?,
            };
            let (a, b) = (a.checked_mul(*c)?, b.checked_mul(*c)?);
            low = low.checked_add(a.min(b))?;
            high = high.checked_add(a.max(b))?;
        }
        Some((low, high))
    }
    /// Replaces a symbol by a size (used to specialise `n` to 1).
    pub fn substitute(&self, sym: SizeSymbol, by: &Dim) -> Dim {
        let mut out = Dim::from(self.constant);
        for (atom, coefficient) in &self.terms {
            let value = match atom {
                DimAtom::Sym(s) if *s == sym => by.clone(),
                DimAtom::Sym(s) => Dim::sym(*s),
                DimAtom::FloorDiv(d, divisor) => d.substitute(sym, by).floor_div(*divisor),
                DimAtom::Min(a, b) => a.substitute(sym, by).minimum(&b.substitute(sym, by)),
                DimAtom::Max(a, b) => a.substitute(sym, by).maximum(&b.substitute(sym, by)),
                DimAtom::Product(factors) => {
                    factors.iter().fold(Dim::from(1), |p, d| p.product(&d.substitute(sym, by)))
                }
            };
            out = out.add(&value.scale(*coefficient));
        }
        out
    }
}

impl From<i64> for Dim {
    fn from(constant: i64) -> Dim {
        Dim { constant, terms: Vec::new() }
    }
}
impl From<usize> for Dim {
    fn from(constant: usize) -> Dim {
        Dim::from(constant as i64)
    }
}
impl From<i32> for Dim {
    fn from(constant: i32) -> Dim {
        Dim::from(i64::from(constant))
    }
}
impl From<SizeSymbol> for Dim {
    fn from(sym: SizeSymbol) -> Dim {
        Dim::sym(sym)
    }
}
impl From<&Dim> for Dim {
    fn from(dim: &Dim) -> Dim {
        dim.clone()
    }
}

impl fmt::Display for Dim {
    /// `3`, `n`, `2*n + 1`, `floordiv(n + 15, 16)`, `min(n, past)`, `mul(n, n + past)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut first = true;
        for (atom, coefficient) in &self.terms {
            match (first, *coefficient < 0) {
                (true, false) => {}
                (true, true) => f.write_str("-")?,
                (false, false) => f.write_str(" + ")?,
                (false, true) => f.write_str(" - ")?,
            }
            first = false;
            if coefficient.abs() != 1 {
                write!(f, "{}*", coefficient.abs())?;
            }
            match atom {
                DimAtom::Sym(s) => f.write_str(s.name())?,
                DimAtom::FloorDiv(d, by) => write!(f, "floordiv({d}, {by})")?,
                DimAtom::Min(a, b) => write!(f, "min({a}, {b})")?,
                DimAtom::Max(a, b) => write!(f, "max({a}, {b})")?,
                DimAtom::Product(factors) => {
                    let factors: Vec<String> = factors.iter().map(Dim::to_string).collect();
                    write!(f, "mul({})", factors.join(", "))?;
                }
            }
        }
        match (first, self.constant) {
            (true, c) => write!(f, "{c}"),
            (false, 0) => Ok(()),
            (false, c) if c < 0 => write!(f, " - {}", -c),
            (false, c) => write!(f, " + {c}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_have_one_form() {
        let (n, total) = (Dim::sym(SizeSymbol::N), Dim::sym(SizeSymbol::N).add(&Dim::sym(SizeSymbol::Past)));
        let scores = n.scale(4).product(&total);
        assert_eq!(scores, total.scale(2).product(&n.scale(2)));
        assert_eq!(scores.to_string(), "4*mul(n, n + past)");
        assert_eq!(scores.eval(&SymValues { n: 3, b: 1, past: 5 }), 96);
        assert_eq!(n.product(&Dim::from(3)), n.scale(3));
        assert_eq!(n.product(&n).product(&total), total.product(&n).product(&n));
        assert_eq!(
            scores.substitute(SizeSymbol::N, &Dim::from(1)),
            Dim::sym(SizeSymbol::Past).scale(4).add(&Dim::from(4))
        );
    }

    #[test]
    fn ranges_hold_every_value_and_are_reached_where_linear() {
        let (n, past) = (Dim::sym(SizeSymbol::N), Dim::sym(SizeSymbol::Past));
        let total = n.add(&past);
        let bounds = SizeBounds { chunk: 3, batch: 1, context: Some(7) };
        let dims = [
            (total.clone(), true),
            (n.scale(5).sub(&past.scale(2)), true),
            (total.floor_div(2).add(&n), false),
            (total.minimum(&Dim::from(4)), true),
            (n.scale(2).product(&total), true),
        ];
        for (dim, exact) in dims {
            let (low, high) = dim.value_range(&bounds).unwrap();
            let mut values = Vec::new();
            for n in 1..=3 {
                values.extend((0..=7 - n).map(|past| dim.eval(&SymValues { n, b: 1, past })));
            }
            let (least, most) = (*values.iter().min().unwrap(), *values.iter().max().unwrap());
            assert!(low <= least && most <= high, "{dim}");
            assert!(!exact || (low, high) == (least, most), "{dim}: {low}..{high}, is {least}..{most}");
        }
        assert_eq!(total.value_range(&SizeBounds { chunk: 3, batch: 1, context: None }), None);
        assert_eq!(n.value_range(&SizeBounds { chunk: 3, batch: 1, context: None }), Some((1, 3)));
    }
}
