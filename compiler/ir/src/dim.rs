//! Sizes known at compile time or linear in a few run-time symbols.
//!
//! Canonical form: a constant plus terms sorted by atom with non-zero coefficients; structural equality is equality.

use std::fmt;

/// A size that is known only when a step runs. The set is closed; ranges come from the build options.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Sym {
    /// Tokens in this call.
    N,
    /// Sequences in this call.
    B,
    /// Tokens already in the cache.
    Past,
}

impl Sym {
    pub const ALL: [Sym; 3] = [Sym::N, Sym::B, Sym::Past];
    pub fn name(self) -> &'static str {
        match self {
            Sym::N => "n",
            Sym::B => "b",
            Sym::Past => "past",
        }
    }
}

/// What a coefficient may multiply.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Atom {
    Sym(Sym),
    FloorDiv(Box<Dim>, i64),
    Min(Box<Dim>, Box<Dim>),
    Max(Box<Dim>, Box<Dim>),
}

/// A size: `constant + sum(coefficient * atom)`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Dim {
    constant: i64,
    terms: Vec<(Atom, i64)>,
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
    pub fn tokens(n: i64) -> Self {
        SymValues { n, b: 1, past: 0 }
    }
    pub fn get(&self, sym: Sym) -> i64 {
        match sym {
            Sym::N => self.n,
            Sym::B => self.b,
            Sym::Past => self.past,
        }
    }
}

impl Dim {
    pub fn sym(sym: Sym) -> Dim {
        Dim { constant: 0, terms: vec![(Atom::Sym(sym), 1)] }
    }
    /// The constant value, if there is no symbol in it.
    pub fn as_const(&self) -> Option<i64> {
        self.terms.is_empty().then_some(self.constant)
    }
    pub fn constant(&self) -> i64 {
        self.constant
    }
    pub fn terms(&self) -> &[(Atom, i64)] {
        &self.terms
    }
    fn normalise(constant: i64, mut terms: Vec<(Atom, i64)>) -> Dim {
        terms.sort();
        let mut merged: Vec<(Atom, i64)> = Vec::with_capacity(terms.len());
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
            None => Dim { constant: 0, terms: vec![(Atom::FloorDiv(Box::new(self.clone()), divisor), 1)] },
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
                Dim { constant: 0, terms: vec![(Atom::Min(Box::new(a.clone()), Box::new(b.clone())), 1)] }
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
                Dim { constant: 0, terms: vec![(Atom::Max(Box::new(a.clone()), Box::new(b.clone())), 1)] }
            }
        }
    }
    /// Value for given symbols.
    pub fn eval(&self, values: &SymValues) -> i64 {
        let atom = |a: &Atom| match a {
            Atom::Sym(s) => values.get(*s),
            Atom::FloorDiv(d, by) => d.eval(values).div_euclid(*by),
            Atom::Min(a, b) => a.eval(values).min(b.eval(values)),
            Atom::Max(a, b) => a.eval(values).max(b.eval(values)),
        };
        self.terms.iter().fold(self.constant, |sum, (a, c)| sum + c * atom(a))
    }
    /// Replaces a symbol by a size (used to specialise `n` to 1).
    pub fn substitute(&self, sym: Sym, by: &Dim) -> Dim {
        let mut out = Dim::from(self.constant);
        for (atom, coefficient) in &self.terms {
            let value = match atom {
                Atom::Sym(s) if *s == sym => by.clone(),
                Atom::Sym(s) => Dim::sym(*s),
                Atom::FloorDiv(d, divisor) => d.substitute(sym, by).floor_div(*divisor),
                Atom::Min(a, b) => a.substitute(sym, by).minimum(&b.substitute(sym, by)),
                Atom::Max(a, b) => a.substitute(sym, by).maximum(&b.substitute(sym, by)),
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
impl From<Sym> for Dim {
    fn from(sym: Sym) -> Dim {
        Dim::sym(sym)
    }
}
impl From<&Dim> for Dim {
    fn from(dim: &Dim) -> Dim {
        dim.clone()
    }
}

impl fmt::Display for Dim {
    /// `3`, `n`, `2*n + 1`, `(n + 15) / 16`, `min(n, past)`.
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
                Atom::Sym(s) => f.write_str(s.name())?,
                Atom::FloorDiv(d, by) => write!(f, "floordiv({d}, {by})")?,
                Atom::Min(a, b) => write!(f, "min({a}, {b})")?,
                Atom::Max(a, b) => write!(f, "max({a}, {b})")?,
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
