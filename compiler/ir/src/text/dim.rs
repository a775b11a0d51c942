//! Sizes in text: `3`, `n`, `2*n + 1`, `floordiv(n + 15, 16)`, `min(n, past)`, `mul(n, past)`; read with any
//! arithmetic that stays linear.

use super::lexer::{LexToken, Lexer, ParseError};
use crate::dim::{Dim, SizeSymbol};

/// Largest constant or coefficient in a size that the parser makes, so that arithmetic on it cannot overflow.
const LIMIT: i128 = 1 << 53;

pub fn parse_dim(lexer: &mut Lexer) -> Result<Dim, ParseError> {
    lexer.enter()?;
    let mut sum = term(lexer)?;
    loop {
        let pos = lexer.position();
        let sign = match lexer.peek() {
            LexToken::Punct("+") => 1,
            LexToken::Punct("-") => -1,
            _ => break,
        };
        lexer.advance();
        let next = term(lexer)?.scale(sign);
        if magnitude(&sum) + magnitude(&next) > LIMIT {
            return Err(Lexer::error_at(pos, "size too large"));
        }
        sum = sum.add(&next);
    }
    lexer.leave();
    Ok(sum)
}

fn magnitude(dim: &Dim) -> i128 {
    let coefficients = dim.terms().iter().map(|(_, c)| i128::from(*c).abs());
    coefficients.fold(i128::from(dim.constant()).abs(), i128::max)
}

fn term(lexer: &mut Lexer) -> Result<Dim, ParseError> {
    let mut product = factor(lexer)?;
    while *lexer.peek() == LexToken::Punct("*") {
        let pos = lexer.position();
        lexer.advance();
        let next = factor(lexer)?;
        if magnitude(&product) * magnitude(&next) > LIMIT {
            return Err(Lexer::error_at(pos, "size too large"));
        }
        product = product.mul(&next).ok_or_else(|| {
            Lexer::error_at(pos, format!("({product}) * ({next}) is not linear in the symbols"))
        })?;
    }
    Ok(product)
}

fn factor(lexer: &mut Lexer) -> Result<Dim, ParseError> {
    if lexer.accept("(") {
        let inner = parse_dim(lexer)?;
        lexer.expect(")")?;
        return Ok(inner);
    }
    if lexer.accept("-") {
        lexer.enter()?;
        let inner = factor(lexer)?.scale(-1);
        lexer.leave();
        return Ok(inner);
    }
    let pos = lexer.position();
    if let LexToken::Int(value) = *lexer.peek() {
        lexer.advance();
        return match i64::try_from(value) {
            Ok(value) if i128::from(value) <= LIMIT => Ok(Dim::from(value)),
            _ => Err(Lexer::error_at(pos, "size too large")),
        };
    }
    let name = lexer.ident("a size")?;
    if let Some(sym) = SizeSymbol::ALL.into_iter().find(|s| s.name() == name) {
        return Ok(Dim::sym(sym));
    }
    if !matches!(name.as_str(), "floordiv" | "min" | "max" | "mul") {
        let known: Vec<&str> = SizeSymbol::ALL.iter().map(|s| s.name()).collect();
        let message = format!(
            "unknown size `{name}`: expected a number, {}, floordiv, min, max or mul",
            known.join(", ")
        );
        return Err(Lexer::error_at(pos, message));
    }
    lexer.expect("(")?;
    if name == "mul" {
        return product(lexer);
    }
    let a = parse_dim(lexer)?;
    lexer.expect(",")?;
    let (b_pos, b) = (lexer.position(), parse_dim(lexer)?);
    lexer.expect(")")?;
    match (name.as_str(), b.as_const()) {
        ("min", _) => Ok(a.minimum(&b)),
        ("max", _) => Ok(a.maximum(&b)),
        (_, Some(divisor)) if divisor > 0 => Ok(a.floor_div(divisor)),
        _ => Err(Lexer::error_at(b_pos, format!("floordiv by {b}: the divisor must be a positive constant"))),
    }
}

/// Factors up to the closing parenthesis.
fn product(lexer: &mut Lexer) -> Result<Dim, ParseError> {
    let mut product = parse_dim(lexer)?;
    while !lexer.accept(")") {
        lexer.expect(",")?;
        let (pos, next) = (lexer.position(), parse_dim(lexer)?);
        if magnitude(&product) * magnitude(&next) > LIMIT {
            return Err(Lexer::error_at(pos, "size too large"));
        }
        product = product.product(&next);
    }
    Ok(product)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dim::SymValues;

    fn parse(text: &str) -> Result<Dim, String> {
        let mut lexer = Lexer::new(text).map_err(|e| e.to_string())?;
        let dim = parse_dim(&mut lexer).map_err(|e| e.to_string())?;
        if lexer.at_end() { Ok(dim) } else { Err(format!("left over: {}", lexer.peek())) }
    }

    #[test]
    fn prints_as_read() {
        for text in [
            "3",
            "-3",
            "n",
            "2*n + 1",
            "-n + b - 4",
            "floordiv(n + 15, 16)",
            "min(n, past)",
            "3*max(n, b) - 1",
            "mul(n, n + past)",
            "8*mul(past - 1, n, n) + 2",
        ] {
            assert_eq!(parse(text).unwrap().to_string(), text);
        }
        assert_eq!(parse("(n + 1) * 4 - 2*n").unwrap().to_string(), "2*n + 4");
        assert_eq!(parse("floordiv(32*n, 16)").unwrap().to_string(), "2*n");
    }

    #[test]
    fn bad_sizes_are_refused() {
        for (text, message) in [
            ("n * past", "1:3: (n) * (past) is not linear in the symbols"),
            ("m", "1:1: unknown size `m`: expected a number, n, b, past, floordiv, min, max or mul"),
            ("floordiv(n, 0)", "1:13: floordiv by 0: the divisor must be a positive constant"),
            ("floordiv(n, b)", "1:13: floordiv by b: the divisor must be a positive constant"),
            ("n +", "1:4: expected a size, found the end of the text"),
            ("18446744073709551615", "1:1: size too large"),
            ("4294967296 * 4294967296", "1:12: size too large"),
        ] {
            assert_eq!(parse(text).unwrap_err(), message);
        }
        assert!(parse(&"(".repeat(100_000)).unwrap_err().contains("nested deeper"));
        assert!(parse(&"-".repeat(100_000)).unwrap_err().contains("nested deeper"));
    }

    /// A random size: every way to build one.
    fn random(state: &mut u64, depth: u32) -> Dim {
        let mut next = |bound: u64| {
            *state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (*state >> 33) % bound
        };
        let (choice, small) = (if depth == 0 { next(2) } else { next(8) }, next(40) as i64 - 12);
        match choice {
            0 => Dim::from(small),
            1 => Dim::sym(SizeSymbol::ALL[next(3) as usize]),
            2 => random(state, depth - 1).add(&random(state, depth - 1)),
            3 => random(state, depth - 1).sub(&random(state, depth - 1)),
            4 if small % 2 == 0 => random(state, depth - 1).scale(small),
            4 => random(state, depth - 1).product(&random(state, depth - 1)),
            5 => random(state, depth - 1).floor_div(small.abs() + 1),
            6 => random(state, depth - 1).minimum(&random(state, depth - 1)),
            _ => random(state, depth - 1).maximum(&random(state, depth - 1)),
        }
    }

    #[test]
    fn random_sizes_round_trip() {
        for seed in 0..5000 {
            let dim = random(&mut { seed }, 4);
            let text = dim.to_string();
            let again = parse(&text).unwrap_or_else(|e| panic!("{text}: {e}"));
            assert_eq!(again, dim, "{text}");
            let values = SymValues { n: 5, b: 2, past: 9 };
            assert_eq!(again.eval(&values), dim.eval(&values));
        }
    }
}
